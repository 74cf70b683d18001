"""Sweeps: every cell logged once, resumed without loss, refused before anything runs when the grid
is wrong."""

import importlib
import json
import os
import signal
import sys
import time

import in_process
import pandas as pd
import psutil
import pytest
import yaml

from workbench import log, process, sweep
from workbench.errors import InputError
from workbench.sweep import run
from workbench.sweep.grid import find


def test_every_cell_is_logged_with_raw_samples(swept):
    folder, counts = swept
    assert (counts["cells"], counts["done"], counts["failed"]) == (2, 2, 0)
    runs = log.load("runs", root=folder / "log")
    assert sorted(zip(runs["max_seq_len"], runs["T"], strict=True)) == [
        (16, 1),
        (16, 2),
    ]
    samples = log.load("samples", root=folder / "log")
    timed = samples[(samples["phase"] == "call") & ~samples["warmup"]]
    assert sorted(timed.groupby("run_id").size()) == [4, 8]
    layers = log.load("layers", root=folder / "log")
    assert set(layers["layer"]) == {0, 1, 2, 3} and (layers["layer_ms"] > 0).all()


def test_each_bundle_is_validated_once(swept):
    folder, _ = swept
    runs = log.load("runs", root=folder / "log")
    assert runs["verdict"].dropna().tolist() == ["GREEN"]


def test_nothing_claims_placement_off_a_mac(swept):
    runs = log.load("runs", root=swept[0] / "log")
    assert (
        runs["placement"].isna().all()
        and runs["placement_source"].isna().all()
        and runs["compute_units"].isna().all()
    )


def test_a_run_says_how_it_came_about(swept):
    runs = log.load("runs", root=swept[0] / "log")
    configs = [json.loads(text) for text in runs["config"]]
    assert all(c["energy"].startswith("not measured: ") for c in configs)
    assert all(
        "loading" in c["not_timed"] and isinstance(c["flags"], list) for c in configs
    )
    samples = log.load("samples", root=swept[0] / "log")
    # one after the other: none begins before the row of the one before is written
    seconds = pd.to_timedelta(samples.groupby("run_id")["elapsed_s"].max(), "s")
    ended = runs.set_index("run_id")["time"].sort_values()
    assert ((ended - seconds) > ended.shift()).iloc[1:].all()
    # 4 layers and a head
    assert (samples[samples["phase"] == "load"].groupby("run_id").size() == 5).all()
    prefills = samples[samples["phase"] == "prefill"]
    assert (prefills["n_prompt"] == 4).all() and prefills.groupby("run_id")[
        "warmup"
    ].sum().eq(1).all()


def test_a_second_run_resumes_everything(swept, grid):
    folder, _ = swept
    counts = sweep.sweep(
        sweep.make_grid(grid),
        root=folder / "log",
        bundles=folder / "bundles",
        progress=False,
    )
    assert (counts["done"], counts["resumed"]) == (0, 2)
    assert len(log.load("runs", root=folder / "log")) == 2


def test_cells_of_another_machine_are_run_again(swept, grid, monkeypatch):
    root = swept[0] / "log"
    assert sweep.missing(sweep.make_grid(grid), root) == []
    elsewhere = log.environment() | {"machine": "another"}
    monkeypatch.setattr(log, "environment", lambda: elsewhere)
    assert len(sweep.missing(sweep.make_grid(grid), root)) == 2


def test_a_cell_that_cannot_run_and_one_that_crashes_are_failed_rows(
    swept, grid, tmp_path, monkeypatch, forked
):
    (tmp_path / "crashing.py").write_text(
        "import os, signal, sys\nfrom workbench.sweep import run\nmeasured = run.measure\n\n"
        "def measure(cell, *how):\n    if cell.run['T'] == 1:\n        print('ANECCompile() FAILED', file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n    cell.run['n_gen'] = 99\n    return measured(cell, *how)\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    crashing = importlib.import_module("crashing")
    small = sweep.make_grid(grid)
    monkeypatch.setattr(run, "measure", crashing.measure)
    counts = sweep.sweep(
        small, root=tmp_path / "log", bundles=swept[0] / "bundles", progress=False
    )
    assert (counts["done"], counts["failed"]) == (0, 2)
    failed = log.load(
        "runs", root=tmp_path / "log", where={"status": "failed"}
    ).set_index("T")
    assert failed.loc[1, "reason"] == "killed by SIGSEGV"
    assert "max_seq_len = 16" in failed.loc[2, "reason"]
    assert set(counts["reasons"]) == set("failed: " + failed["reason"])
    assert json.loads(failed.loc[1, "config"])["stderr"][0] == "ANECCompile() FAILED"
    assert failed["setting"].notna().all() and (failed["max_seq_len"] == 16).all()
    monkeypatch.setattr(run, "measure", crashing.measured)
    monkeypatch.setattr(process, "call", in_process.call)
    retried = sweep.sweep(
        small, root=tmp_path / "log", bundles=swept[0] / "bundles", progress=False
    )
    assert (retried["resumed"], retried["done"], retried["failed"]) == (0, 2, 0)
    assert retried["reasons"] == []


def test_a_sweep_killed_at_any_moment_loses_and_doubles_nothing(
    swept, grid, tmp_path, monkeypatch
):
    """Killed once in the middle of a cell, once as soon as a row is there; then resumed."""
    changed = grid | {"run": grid["run"] | {"n_gen": 2, "repetitions": 1}}
    code = (
        f"from workbench import sweep\nfrom pathlib import Path\nsweep.sweep(sweep.make_grid({changed!r}), "
        f"root={str(tmp_path / 'log')!r}, bundles=Path({str(swept[0] / 'bundles')!r}), progress=False)"
    )
    runs = lambda: sorted((tmp_path / "log" / "runs").glob("[!.]*.parquet"))  # noqa: E731
    for enough in (lambda p: p.children(recursive=True), lambda p: runs()):
        killed = psutil.Popen([sys.executable, "-c", code])
        while not enough(killed):
            assert killed.poll() is None
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
    monkeypatch.setattr(process, "call", in_process.call)
    sweep.sweep(
        sweep.make_grid(changed),
        root=tmp_path / "log",
        bundles=swept[0] / "bundles",
        progress=False,
    )
    found = log.load("runs", root=tmp_path / "log")
    assert sorted(found["T"]) == [1, 2] and set(found["status"]) == {"ok"}
    for table in ("samples", "layers"):
        assert set(log.load(table, root=tmp_path / "log")["run_id"]) == set(
            found["run_id"]
        )
    assert len(log.load("fidelity", root=tmp_path / "log")["run_id"].unique()) == 1


def test_parts_of_a_grid_fill_one_log_without_a_doubled_cell(
    swept, grid, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    run = grid["run"] | {"n_gen": 2, "repetitions": 1, "rounds": 2}
    made = sweep.make_grid(grid | {"run": run, "validate_ids": []})
    where = {"root": tmp_path / "log", "bundles": swept[0] / "bundles"}
    for part in ((1, 3), (2, 3), (3, 3), (1, 1)):
        counts = sweep.sweep(made, part=part, progress=False, **where)
    assert (counts["cells"], counts["resumed"], counts["done"]) == (4, 4, 0)
    rows = log.load("runs", tmp_path / "log")
    assert len(rows) == 4 and not rows.duplicated(["setting", "round"]).any()


def test_configurations_join_speed_and_the_verdict_of_the_same_bundle(swept, grid):
    found = sweep.configurations(sweep.make_grid(grid), root=swept[0] / "log")
    assert sorted(found["name"]) == ["T 1", "T 2"]
    assert set(found["run_id"]) == set(log.load("runs", swept[0] / "log")["run_id"])
    assert (
        found["tokens_per_s"].is_monotonic_decreasing
        and (found["n"] == 1).all()
        and set(found["verdict"]) == {"GREEN"}
    )
    fidelity = log.load("fidelity", root=swept[0] / "log").query(
        "mode == 'isolated' and tensor == 'update'"
    )
    assert set(found["worst_cosine"]) == set(fidelity.groupby("run_id")["cosine"].min())
    rates = (
        log.load("samples", root=swept[0] / "log")
        .query("phase == 'tokens_per_s'")
        .groupby("run_id")["value"]
        .median()
    )
    assert sorted(found["tokens_per_s"]) == pytest.approx(sorted(rates))


def test_rounds_measure_every_cell_again_in_an_order_of_their_own(grid):
    made = sweep.make_grid(grid | {"run": {"T": [1, 2], "rounds": 3}})
    found = list(sweep.cells(made))
    assert (
        len(found) == 6
        and len({run._key(c) for c in found}) == 6
        and len({c.columns()["setting"] for c in found}) == 2
    )
    assert sum(bool(c.judge_ids) for c in found) == 1 and all(
        c.round == 0 for c in found if c.judge_ids
    )


def test_a_checkpoint_that_differs_on_the_machine_that_measures_is_refused(
    grid, tmp_path
):
    made = sweep.make_grid(grid)
    cell = next(sweep.cells(made))
    vars(cell.source)["checkpoint_hash"] = "0" * 64
    with pytest.raises(InputError, match="copy the same checkpoint"):
        run.prepare(cell, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exprot": {}}, "exprot.*one of the keys checkpoint, "),
        ({"export": {"max_sequence": [1]}}, "max_sequence"),
        ({"export": {"compress": ["int3"]}}, "compress"),
        ({"run": {"T": []}}, "run.T"),
        ({"run": {"deep": [1]}}, "run.deep.*one of the keys .*depth"),
        ({"run": {"runtime": ["cuda"]}}, "run.runtime"),
        ({"run": {"hints": [{"reshapeFrequency": "Often"}]}}, "reshapeFrequency"),
        ({"run": {"rounds": 0}}, "run.rounds"),
        ({"run": {"runtime": []}}, "run.runtime"),
        ({"run": {"precision": []}}, "run.precision"),
        ({"run": {"compute_units": []}}, "run.compute_units"),
        ({"export": {"max_seq_len": []}}, "export.max_seq_len"),
    ],
)
def test_unknown_keys_and_values_are_refused(change, words, grid, tmp_path):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid | change))
    with pytest.raises(InputError, match=words):
        sweep.load_grid(tmp_path / "grid.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"export": {"tokens": ["1-2", "1-3"]}, "run": {"T": [1, 3]}},
            "T: found 3; needs 1 to t_max = 2",
        ),
        (
            {"export": {"max_seq_len": [64, 16]}, "run": {"depth": [9], "n_gen": 6}},
            "9 . 8 tokens",
        ),
        ({"validate_ids": [1] * 17}, "17 tokens; needs at most max_seq_len = 16"),
    ],
)
def test_a_cell_that_no_bundle_could_run_is_refused_before_any_is(
    change, words, grid, tmp_path
):
    with pytest.raises(InputError, match=words):
        sweep.sweep(
            sweep.make_grid(grid | change), root=tmp_path / "log", progress=False
        )
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_text_is_no_grid(tmp_path):
    (tmp_path / "grid.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="a YAML file"):
        sweep.load_grid(tmp_path / "grid.yaml")
    (tmp_path / "grid.yaml").write_text("export: {t_max: [2]\n")
    with pytest.raises(InputError, match="line 2, column 1"):
        sweep.load_grid(tmp_path / "grid.yaml")


def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(grid, tmp_path):
    with pytest.raises(
        InputError,
        match=r"validate_ids of the grid: found 256; needs ids from 0 to 255",
    ):
        sweep.sweep(
            sweep.make_grid(grid | {"validate_ids": [1, 256]}),
            root=tmp_path / "log",
            progress=False,
        )
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_refused_before_anything_runs(
    grid, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "run_cell", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="needs a folder that can be written"):
        sweep.sweep(
            sweep.make_grid(grid), root=tmp_path / "file" / "log", progress=False
        )


@pytest.mark.parametrize(
    ("root", "project"),
    [
        ("a/experiments/log", "a"),
        ("a/log", "a"),
        ("a/experiments/other", "a/experiments"),
    ],
)
def test_a_log_belongs_to_the_project_whose_log_it_is_or_to_its_folder(
    tmp_path, root, project
):
    assert log.project(tmp_path / root) == tmp_path / project
    (tmp_path / project / "model").mkdir(parents=True)
    assert find("model", tmp_path / root) == tmp_path / project / "model"


def test_the_limit_on_kl_is_the_grid_s_and_changing_it_measures_nothing(swept, grid):
    folder, _ = swept
    (logged,) = (
        log.load("runs", root=folder / "log")
        .dropna(subset="verdict")
        .to_dict("records")
    )
    gates = {g["name"]: g["verdict"] for g in json.loads(logged["config"])["gates"]}
    assert {
        gates[name] for name in ("weights", "program", "host", "max_kl", "budget")
    } == {"GREEN"}
    found = sweep.configurations(sweep.make_grid(grid), folder / "log")
    assert set(found["verdict"]) == {"GREEN"} and (found["kl_mean"] > 0).all()
    strict = grid | {"max_kl": float(found["kl_mean"].min()) / 2}
    assert set(
        sweep.configurations(sweep.make_grid(strict), folder / "log")["verdict"]
    ) == {"RED"}
    counts = sweep.sweep(
        sweep.make_grid(strict),
        root=folder / "log",
        bundles=folder / "bundles",
        progress=False,
    )
    assert (counts["done"], counts["resumed"]) == (0, 2)


def test_a_limit_below_zero_is_refused(grid):
    with pytest.raises(InputError, match="max_kl"):
        sweep.make_grid(grid | {"max_kl": -0.1})


def test_the_bar_of_a_sweep_has_the_name_that_is_given(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "_checked", lambda *_: [])
    for given, shown in ((True, "sweep:"), ("growth", "growth:"), (False, "")):
        sweep.sweep(None, root=tmp_path, bundles=tmp_path, progress=given)
        said = capsys.readouterr().err
        assert shown in said and bool(said) == bool(given)
