"""Sweeps: every cell logged once, resumed without loss, refused before anything runs when the grid
is wrong."""

import json
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from itertools import product

import in_process
import pandas as pd
import psutil
import pytest
import yaml
from refusal import refused

from workbench import log, process, sweep
from workbench.sweep import cluster, summary
from workbench.sweep import run as cell_runs
from workbench.sweep.grid import CellResult, locate, stored_cells
from workbench.sweep.identity import RUNTIMES
from workbench.sweep.table import table_lines

NO_MAC = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Core ML")


@pytest.fixture
def run_sweep(swept, tmp_path, calls_here):
    """A function that sweeps a grid in this process, in a log that only the test has, and returns
    the counts of `sweep.sweep`."""

    def run_sweep(grid: dict, **options) -> dict:
        folders = {"root": tmp_path / "log", "bundles": swept.bundles}
        return sweep.sweep(sweep.make_grid(grid), progress=False, **(folders | options))

    return run_sweep


@pytest.fixture
def runs(swept) -> pd.DataFrame:
    return log.load("runs", swept.log)


def shorten_runs(grid: dict, **more) -> dict:
    """The grid with short runs, and without a validation unless `more` has one."""
    run = grid["run"] | {"n_gen": 2, "repetitions": 1} | more.pop("run", {})
    return grid | {"run": run, "validate_ids": []} | more


def test_every_cell_is_logged_with_raw_samples_and_each_bundle_validated_once(
    swept, runs
):
    counts = swept.counts
    assert (counts["cells"], counts["done"], counts["failed"]) == (2, 2, 0)
    assert sorted(zip(runs["max_seq_len"], runs["T"])) == [(16, 1), (16, 2)]
    assert runs["verdict"].dropna().tolist() == ["GREEN"]
    samples = log.load("samples", swept.log)
    timed = samples[(samples["phase"] == "call") & ~samples["warmup"]]
    assert sorted(timed.groupby("run_id").size()) == [4, 8]
    layers = log.load("layers", swept.log)
    assert set(layers["layer"]) == {0, 1, 2, 3} and (layers["layer_ms"] > 0).all()
    # 4 layers and a head
    assert (samples[samples["phase"] == "load"].groupby("run_id").size() == 5).all()
    prefills = samples[samples["phase"] == "prefill"]
    assert (prefills["n_prompt"] == 4).all()
    assert prefills.groupby("run_id")["warmup"].sum().eq(1).all()


def test_a_run_that_is_made_again_for_its_validation_changes_no_time(
    swept, grid, tmp_path
):
    root = tmp_path / "log"
    shutil.copytree(swept.log, root)
    parsed = sweep.make_grid(grid)
    before = sweep.processes(parsed, root)
    assert len(before) == 2 and (before["value"] > 0).all()
    again = before.iloc[0]["run_id"]
    row = log.load("runs", root, {"run_id": again}).drop(columns="run_id")
    samples = log.load("samples", root, {"run_id": again}).drop(columns="run_id")
    log.append("samples", samples.assign(value=samples["value"] * 3), root, "9-again")
    log.append("runs", row, root, "9-again")
    after = sweep.processes(parsed, root)
    assert after[["run_id", "value"]].equals(before[["run_id", "value"]])


def test_a_run_says_how_it_came_about_and_claims_no_placement_off_a_mac(swept, runs):
    columns = ["placement", "placement_source", "compute_units", "ane_joules"]
    assert runs[[*columns, "ane_ops_share"]].isna().all(axis=None)
    loads = runs[["load_start", "load_end"]]
    assert (loads >= 0).all(axis=None)
    steal = runs["steal"]
    assert steal.between(0, 1).all() if sys.platform == "linux" else steal.isna().all()
    for config in runs["config"].map(json.loads):
        assert config["energy"].startswith("not measured: ")
        assert config["startup_s"] > 0


def test_a_crash_is_a_failed_row_and_runs_again_and_a_refused_unit_makes_an_invalid_one(
    grid, tmp_path, monkeypatch, run_sweep
):
    """tests/runtime/test_standin.py has every way to fail, in processes that crash."""
    changed = shorten_runs(grid, run={"depth": [2, 4]})
    lines = ("ANECCompile() FAILED",)
    crashed = process.Outcome(failure="killed by SIGSEGV", lines=lines)

    def call(function, cell, *args, **options):
        if function is cell_runs.measure_in_child and cell.run.T == 1:
            return crashed
        return replace(in_process.call(function, cell, *args), lines=lines)

    with monkeypatch.context() as patch:
        patch.setattr(process, "call", call)
        counts = run_sweep(changed)
    assert (counts["done"], counts["failed"], counts["invalid"]) == (2, 2, 2)
    reasons = ["failed: killed by SIGSEGV", "invalid: ANECCompile() FAILED"]
    assert sorted(counts["reasons"]) == reasons
    rows = log.load("runs", tmp_path / "log").sort_values("T")
    assert rows["status"].tolist() == ["failed"] * 2 + ["invalid"] * 2
    assert rows["setting"].notna().all()
    for config in rows["config"].map(json.loads):
        assert config["stderr"] == ["ANECCompile() FAILED"]
    retried = run_sweep(changed)
    assert (retried["resumed"], retried["done"], retried["failed"]) == (2, 2, 0)


def test_workers_say_what_is_done_and_what_auto_means_there(
    swept, grid, monkeypatch, run_sweep
):
    """The log of this machine has the two cells of `portable`, and workers, which resolve `auto` to
    `coreml`, measure those of both runtimes."""
    monkeypatch.setattr(cluster, "connect", bool)
    monkeypatch.setattr(cluster, "resolve_auto", lambda client, named: ["coreml"])
    measured_cells = []

    def run_cells(client, measure, cells):
        measured_cells.extend(cells)
        return [(cell, CellResult("ok", None)) for cell in cells]

    monkeypatch.setattr(cluster, "run_jobs", run_cells)
    changed = grid | {"run": grid["run"] | {"runtime": ["auto", "portable"]}}
    counts = run_sweep(changed, root=swept.log, scheduler="tcp://host:8786")
    assert (counts["done"], len(counts["settings"])) == (4, 4)
    runtimes = sorted(cell.run.runtime for cell in measured_cells)
    assert runtimes == ["coreml", "coreml", "portable", "portable"]


def test_a_cell_names_its_runtime_and_a_log_of_any_runtime_is_read(grid):
    parsed = sweep.make_grid(grid)
    assert parsed.run.runtime == ["auto"]
    assert {cell.run.runtime for cell in sweep.cells(parsed)} == {"portable"}
    stored = stored_cells(parsed)
    assert {cell.run.runtime for cell in stored} == set(RUNTIMES)
    assert len(stored) == len(RUNTIMES) * 2
    named = sweep.make_grid(grid | {"run": grid["run"] | {"runtime": ["coreml"]}})
    assert {cell.run.runtime for cell in stored_cells(named)} == {"coreml"}


def test_a_cell_is_cancelled_while_its_machine_cools_down(swept, grid, tmp_path):
    parsed = sweep.make_grid(shorten_runs(grid, run={"cool_down_s": 1e9}))
    folders = {"root": tmp_path, "bundles": swept.bundles}
    stop = threading.Event()
    stop.set()
    with pytest.raises(process.Cancelled):
        cell = next(sweep.cells(parsed))
        cell_runs.run_cell(cell, grid=parsed, stop=stop, **folders)


def test_a_run_s_own_verdict_stands_and_others_have_their_bundle_s_newest(tmp_path):
    bundle = {"values": "v", "bundle_hash": "b"}
    verdicts = ["RED", "GREEN", None]
    for number, (of_bundle, verdict) in enumerate(product(({}, bundle), verdicts)):
        row = {"status": "ok", "tokens_per_s": 1.0, "verdict": verdict} | of_bundle
        log.append("runs", row, tmp_path, str(number))
    results = log.plain(summary.summary(tmp_path))["verdict"].tolist()
    assert results == [*verdicts, "RED", "GREEN", "GREEN"]


@pytest.mark.slow("two processes import torch and are killed")
@pytest.mark.wide
def test_a_sweep_killed_at_any_moment_loses_and_doubles_nothing(
    swept, grid, tmp_path, run_sweep
):
    """Killed once in the middle of a cell, once as soon as a row is there; then resumed."""
    changed = shorten_runs(grid, validate_ids=grid["validate_ids"])
    root, bundles = str(tmp_path / "log"), str(swept.bundles)
    options = f"root={root!r}, bundles={bundles!r}, progress=False"
    code = "from workbench import sweep\n"
    code += f"sweep.sweep(sweep.make_grid({changed!r}), {options})"
    rows = tmp_path / "log" / "runs"
    for is_reached in (
        lambda child: child.children(recursive=True),
        lambda _: [*rows.glob("[!.]*.parquet")],
    ):
        killed = psutil.Popen([sys.executable, "-c", code])
        while not is_reached(killed):
            assert killed.poll() is None
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
    run_sweep(changed)
    results = log.load("runs", root)
    assert sorted(results["T"]) == [1, 2] and set(results["status"]) == {"ok"}
    for table in ("samples", "layers"):
        assert set(log.load(table, root)["run_id"]) == set(results["run_id"])
    assert log.load("fidelity", root)["run_id"].nunique() == 1


def test_parts_of_a_grid_fill_one_log_without_a_doubled_cell(grid, tmp_path, run_sweep):
    judged = {"validate_ids": grid["validate_ids"]}
    changed = shorten_runs(grid, run={"rounds": 2}, **judged)
    for part in ((1, 3), (2, 3), (3, 3), (1, 1)):
        counts = run_sweep(changed, part=part)
    assert (counts["cells"], counts["resumed"], counts["done"]) == (4, 4, 0)
    rows = log.load("runs", tmp_path / "log")
    assert len(rows) == 4 and not rows.duplicated(["setting", "round"]).any()
    lines = table_lines(summary.summary(tmp_path / "log"))
    assert any("slowest" in line for line in lines)  # of two runs each
    assert rows["setting"].nunique() == 2
    assert rows.loc[rows["verdict"].notna(), "round"].tolist() == [0]


def test_a_checkpoint_that_differs_on_the_machine_that_measures_is_refused(swept, grid):
    cell = next(sweep.cells(sweep.make_grid(grid)))
    other = replace(cell, source=replace(cell.source, contents_hash="0" * 64))
    bundle = cell_runs.export_bundle(cell, swept.bundles)
    with refused("copy the same to every worker"):
        cell_runs.measure_in_child(other, sweep.make_grid(grid), bundle)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exprot": {}}, "exprot.*one of the keys checkpoint, "),
        ({"export": {"compress": ["int3"]}}, "compress"),
        ({"export": {"max_seq_len": []}}, "export.max_seq_len"),
        ({"run": {"deep": [1]}}, "run.deep.*one of the keys .*depth"),
        ({"run": {"runtime": ["cuda"]}}, "run.runtime"),
        ({"run": {"hints": [{"reshapeFrequency": "Often"}]}}, "reshapeFrequency"),
        ({"max_kl": -0.1}, "max_kl"),
        ({"run": {"min_seconds": 60, "timeout_s": 60}}, "below timeout_s"),
        ({"run": {"timeout_s": float("inf")}}, "timeout_s"),
    ],
)
def test_unknown_keys_and_values_are_refused(change, words, grid, tmp_path):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid | change))
    with refused(words):
        sweep.load_grid(tmp_path / "grid.yaml")


def test_a_file_that_is_no_grid_is_one_message(tmp_path):
    for text, words in ((b"\xff\xfe", "a YAML file"), (b"T: [2\n", "line 2, column 1")):
        (tmp_path / "grid.yaml").write_bytes(text)
        with refused(words):
            sweep.load_grid(tmp_path / "grid.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"export": {"tokens": ["1-2", "1-3"]}, "run": {"T": [1, 3]}}, "T: found 3; "),
        (
            {"export": {"max_seq_len": [64, 16]}, "run": {"depth": [9], "n_gen": 6}},
            "9 . 8 tokens",
        ),
        ({"validate_ids": [1] * 17}, "17 tokens; needs at most max_seq_len = 16"),
        ({"validate_ids": [1, 256]}, "validate_ids of the grid: found 256"),
        pytest.param(
            {"run": {"runtime": ["coreml"]}}, "on such a machine", marks=NO_MAC
        ),
    ],
)
def test_a_cell_that_no_bundle_could_run_is_refused_before_any_is(
    change, words, grid, tmp_path, run_sweep
):
    with refused(words):
        run_sweep(grid | change)
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_refused_before_anything_runs(
    grid, tmp_path, monkeypatch, run_sweep
):
    monkeypatch.setattr(cell_runs, "run_cell", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "runs").touch()
    with refused("needs a folder that can be written"):
        run_sweep(grid, root=tmp_path)


@pytest.mark.parametrize(
    ("root", "project"),
    [("a/experiments/log", "a"), ("a/log", "a"), ("a/experiments/b", "a/experiments")],
)
def test_a_log_belongs_to_the_project_whose_log_it_is_or_to_its_folder(
    tmp_path, root, project
):
    assert log.project(tmp_path / root) == tmp_path / project
    (tmp_path / project / "model").mkdir(parents=True)
    assert locate("model", tmp_path / root) == tmp_path / project / "model"


def test_the_limit_on_kl_is_the_grid_s_and_changing_it_measures_nothing(
    swept, runs, grid, run_sweep
):
    root = swept.log
    (config,) = runs.dropna(subset="verdict")["config"]
    gates = {gate["name"]: gate["verdict"] for gate in json.loads(config)["gates"]}
    judged = ("weights", "program", "host", "budget")
    assert {gates[name] for name in judged} == {"GREEN"}
    assert gates["max_kl"] == "WITHIN"
    results = sweep.configurations(sweep.make_grid(grid), root)
    assert set(results["verdict"]) == {"GREEN"} and (results["kl_mean"] > 0).all()
    strict = grid | {"max_kl": float(results["kl_mean"].min()) / 2}
    results = sweep.configurations(sweep.make_grid(strict), root)
    assert set(results["verdict"]) == {"GREEN"} and set(results["quality"]) == {"OVER"}
    counts = run_sweep(strict, root=root)
    assert (counts["done"], counts["resumed"]) == (0, 2)
    assert len(log.load("runs", root)) == len(runs)
