"""First light: stages that keep their rows, shards that every machine makes again, and a file that
names nobody."""

import io
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import in_process
import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from workbench import log
from workbench.cli.app import app
from workbench.errors import InputError
from workbench.firstlight import archive, binding, ladder, measure, rungs, stages, times
from workbench.firstlight.job import Job, _identifiers, write_line
from workbench.log import scrub
from workbench.log.machine import with_machines
from workbench.runtime import COMPUTE_UNITS
from workbench.sweep import runs

pytestmark = [
    pytest.mark.shim,
    pytest.mark.filterwarnings("ignore:states of width"),
    pytest.mark.usefixtures("forked"),
]
RUN = {"rung": "state", "units": "CPU_AND_NE", "ask": "run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bundles of rungs, each made once for this file."""
    return tmp_path_factory.mktemp("rungs")


@pytest.fixture
def job(folder):
    """The job of a fault of the stand-in; "": none."""

    def of(fault: str = "") -> Job:
        return Job(f"stand-in:{fault}" if fault else "stand-in", folder)

    yield of
    binding._state_shard.cache_clear()


# --- the ladder -----------------------------------------------------------------------------------


def test_every_rung_stands_over_an_earlier_one_and_has_shipped_results():
    ladder, earlier = rungs.ladder(), set()
    for rung in ladder.values():
        assert rung.over is None if not earlier else rung.over in earlier
        earlier.add(rung.name)
    assert set(rungs.shipped_digests()) == set(ladder)
    assert all(
        np.isfinite(r.output).all() for n in ladder for r in rungs.shipped_results(n)
    )
    shipped = sum(path.stat().st_size for path in rungs.DATA.iterdir())
    assert shipped < 1 << 20


def test_every_case_asks_something_else_and_the_stages_take_at_most_15_minutes():
    for stage in stages.STAGES.values():
        cases = [json.dumps(case, sort_keys=True) for case in stage.cases()]
        assert len(set(cases)) == len(cases)
    assert sum(stage.timeout_s for stage in stages.STAGES.values()) <= 15 * 60
    assert {case["units"] for case in ladder.ladder_cases()} == set(COMPUTE_UNITS)


def test_noise_is_the_same_bits_everywhere():
    values = rungs.Noise(0)((2, 3)).numpy()
    assert (values * 1024 / 1.75).tolist() == [[-869, -796, -412], [-268, 434, 168]]
    assert rungs.Noise(1)((10_000,)).std() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    "name", ["no-state-range", "functions", "lut4", "four-states-range"]
)
def test_a_rung_is_made_again_byte_for_byte_and_computes_what_was_shipped(name, job):
    row = ladder.measure_rung(RUN | {"rung": name}, job())
    assert row["as_shipped"] and row["verdict"] == "GREEN" and row["nan_comes_out"]
    assert max(row["ratio_t1"] or 0, row["ratio_t"] or 0) < 1
    assert row["compile_ms"] > 0 and row["cold_load_ms"] > 0 and row["warm_load_ms"] > 0


def test_another_digest_is_a_row_and_not_the_end(job, monkeypatch):
    monkeypatch.setattr(rungs, "shipped_digests", lambda: {"state": "0" * 64})
    row = ladder.measure_rung(RUN, job())
    assert row["as_shipped"] is False and len(row["sha256"]) == 64
    assert row["verdict"] == "GREEN" and row["finite"]


def test_another_output_is_red(job, monkeypatch):
    results = rungs.shipped_results("state")
    off = [
        rungs.Expected(r.output + 8 * np.float32(r.distance), r.distance)
        for r in results
    ]
    monkeypatch.setattr(rungs, "shipped_results", lambda name: off)
    row = ladder.measure_rung(RUN, job())
    assert row["verdict"] == "RED" and row["ratio_t1"] == pytest.approx(8, rel=0.05)


def test_a_shard_that_core_ml_refuses_says_so_in_its_row(job):
    row = ladder.measure_rung(RUN, job("load14-ne"))
    assert (
        row["status"] == "refused"
        and "error code: -14" in row["reason"]
        and row["as_shipped"]
    )
    assert (
        ladder.measure_rung(RUN | {"units": "CPU_ONLY"}, job("load14-ne"))["verdict"]
        == "GREEN"
    )


def test_a_nan_that_is_hidden_is_noticed(job):
    row = ladder.measure_rung(RUN, job("nan-hidden"))
    assert row["nan_comes_out"] is False and row["verdict"] == "GREEN"


def test_the_plan_of_a_simulated_mac_keeps_flexible_shapes_off_the_engine(job):
    plan = RUN | {"ask": "plan"}
    fixed, flexible = (
        ladder.measure_rung(plan | {"rung": name}, job("mac"))
        for name in ("state-t4", "range")
    )
    assert (fixed["ane"], flexible["ane"]) == (fixed["ops"], 0)
    assert {fixed["source"], flexible["source"]} == {"simulated"}


def test_durations_of_a_simulated_mac_are_its_own(job):
    row = ladder.measure_rung(RUN, job("mac"))
    assert (
        row["native_ms"] == pytest.approx(2.0, abs=0.1)
        and row["wall_ms"] >= row["native_ms"]
    )


def test_times_are_logged_as_a_run_with_their_samples_and_their_place(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(times, "CALLS", 3)
    job = Job("stand-in:mac", tmp_path)
    row = times.measure_timing({"units": "CPU_AND_NE", "layers": 1, "T": 4}, job)
    assert (row["calls"], row["ane_ops_share"], row["invalid"]) == (3, 1.0, None)
    (run,) = log.load("runs", tmp_path / "log").to_dict("records")
    assert (run["run_id"], run["placement_source"]) == (row["run_id"], "simulated")
    assert (run["T"], run["layers_per_shard"], run["compute_units"]) == (
        4,
        1,
        "CPU_AND_NE",
    )
    samples = log.load("samples", tmp_path / "log")
    assert samples["phase"].tolist() == ["call"] * 3
    for column, name in (
        ("value", "wall_ms"),
        ("native_ms", "native_ms"),
        ("cpu_ms", "cpu_ms"),
    ):
        assert samples[column].median() == row[name] > 0
    assert (samples["native_ms"] <= samples["value"]).all()
    assert (
        samples["elapsed_s"].is_monotonic_increasing
        and (samples["elapsed_s"] > 0).all()
    )


def test_times_have_the_machine_s_state_before_them_and_the_engine_s_energy(
    tmp_path, monkeypatch
):
    @contextmanager
    def metered():
        reading = {"ane_joules": None, "ane_active_ms": None, "reason": "not read yet"}
        yield reading
        reading.update(ane_joules=0.5, ane_active_ms=12.0, reason=None)

    monkeypatch.setattr(times, "SOAK_CALLS", 3)
    monkeypatch.setattr(
        rungs, "ladder", lambda: {"large-lut4": rungs.Rung("s", "", {})}
    )
    case, job = times.soak_cases()[0], Job("stand-in", tmp_path)
    silent = times.measure_soak(case, job)
    assert (
        silent["ane_joules"] is None
        and silent["energy_reason"] == "no macOS, so no IOReport"
    )
    monkeypatch.setattr(times.ioreport, "metered", metered)
    monkeypatch.setattr(
        runs, "state_before", lambda: {"thermal_pressure_before": "heavy"}
    )
    row = times.measure_soak(case, job)
    assert (row["ane_joules"], row["ane_active_ms"], row["energy_reason"]) == (
        0.5,
        12.0,
        None,
    )
    first, second = log.load("runs", tmp_path / "log").to_dict("records")
    assert (
        json.loads(first["config"])["energy"]
        == "not measured: no macOS, so no IOReport"
    )
    assert (
        first["swap_bytes_before"] >= 0 and second["thermal_pressure_before"] == "heavy"
    )
    assert second["ane_joules"] == 0.5 and "energy" not in json.loads(second["config"])


# --- the binding ----------------------------------------------------------------------------------


def test_the_binding_takes_what_its_sources_say(job):
    rows = [
        case | binding.measure_binding(case, job()) for case in binding.binding_cases()
    ]
    told = [row for row in rows if row.get("expected") is not None]
    assert len(told) > 25 and all(row["accepted"] == row["expected"] for row in told)
    assert next(row for row in rows if row["case"] == "output")["dtype"] == "float32"


def test_flushed_subnormals_and_messages_on_stdout_are_seen(job):
    accepted = {
        case["value"]: binding.measure_binding(case, job("flush"))["accepted"]
        for case in binding.binding_cases()
        if "value" in case
    }
    assert not accepted["subnormal"] and not accepted["largest subnormal"]
    assert accepted["smallest normal"] and accepted["65504"]
    case = {"case": "stdout of compile"}
    assert binding.measure_binding(case, job("chatter"))["bytes_on_stdout"] > 20


# --- stages that end otherwise --------------------------------------------------------------------


def test_a_stage_that_is_killed_and_runs_out_of_time_keeps_its_rows(
    tmp_path, monkeypatch
):
    clock = iter([0, 0, 0, 3001, 3001])  # the time is up after two processes
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = measure.run_stage(
        "binding", "stand-in:kill", tmp_path, 3000, tmp_path / "rows"
    )
    rows = found["rows"]
    assert found["status"] == "failed" and "killed by SIGKILL" in found["reason"]
    assert "cases not reached in 3000 s" in found["reason"]
    assert [row["status"] for row in rows[:12]] == ["ok"] * 11 + ["failed"]
    assert len(rows) > 12 and rows[-1]["reason"] == "killed by SIGKILL"
    assert (
        rows[11]["case"] == "input float32"
        and rows[11]["reason"] == "killed by SIGKILL"
    )


def test_a_case_after_which_core_ml_says_it_failed_is_invalid_and_the_next_one_is_not(
    tmp_path, monkeypatch, capfd
):
    def measure_one(case: dict, job: Job) -> dict:
        if case["case"] == 1:
            os.write(2, b"E5RT: ANECCompile() FAILED\nnothing of Core ML\n")
        return {"value": case["case"]}

    cases = [{"case": n} for n in range(3)]
    stage = stages.Stage("three cases", lambda: cases, measure_one, 1)
    monkeypatch.setitem(stages.STAGES, "three", stage)
    lines = tmp_path / "lines"
    job = {"stage": "three", "runtime": "stand-in", "folder": str(tmp_path), "skip": 0}
    stages.stage_main(job | {"lines": str(lines)})
    rows = measure.read_lines(lines, "three")
    assert [row["status"] for row in rows] == ["ok", "invalid", "ok"]
    assert rows[1]["messages"] == [rows[1]["reason"]] == ["E5RT: ANECCompile() FAILED"]
    assert "messages" not in rows[2]
    stages.stage_main(job | {"lines": str(lines), "skip": 2})
    assert [row["case"] for row in measure.read_lines(lines, "three")] == [0, 1, 2, 2]


@pytest.mark.parametrize("runtime", ["coreml", "stand-in"])
def test_the_engine_gets_a_pause_after_a_failure_on_core_ml_alone(
    runtime, tmp_path, monkeypatch
):
    """A case on the CPU neither waits nor makes another one wait; the pauses of a stage end."""
    units = (
        "CPU_AND_NE",
        "CPU_ONLY",
        "CPU_AND_NE",
        "CPU_ONLY",
        "ALL",
        "CPU_AND_NE",
        "CPU_AND_NE",
    )
    now, failing = [100.0], {0, 1, 2, 4, 5}

    def sleep(seconds):
        now[0] += seconds

    def measure_one(case: dict, job: Job) -> dict:
        now[0] += 1
        return {"status": "refused" if case["n"] in failing else "ok", "reason": "-14"}

    cases = [{"n": n, "units": unit} for n, unit in enumerate(units)]
    monkeypatch.setitem(
        stages.STAGES,
        "three",
        stages.Stage("seven cases", lambda: cases, measure_one, 1),
    )
    clock = SimpleNamespace(
        sleep=sleep, monotonic=lambda: now[0], perf_counter=lambda: now[0]
    )
    monkeypatch.setattr(stages, "time", clock)
    monkeypatch.setattr(stages.Pause, "PAUSES_S", 40.0)
    lines = tmp_path / "lines"
    job = {
        "stage": "three",
        "runtime": runtime,
        "folder": str(tmp_path),
        "lines": str(lines),
    }
    stages.stage_main(job | {"skip": 0})
    paused = [row.get("paused_s", 0) for row in measure.read_lines(lines, "three")]
    assert paused == ([0, 0, 14, 0, 14, 12, 0] if runtime == "coreml" else [0] * 7)
    lines.unlink()
    stages.stage_main(job | {"skip": 5})  # the process that ran case 4 died of it
    paused = [row.get("paused_s", 0) for row in measure.read_lines(lines, "three")]
    assert paused == ([15, 15] if runtime == "coreml" else [0, 0])


def test_a_line_that_was_cut_off_is_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_line(path, {"stage": "soak", "case": 1, "worst": np.float64("inf"), "n": 3})
    path.write_text(path.read_text() + '{"case": 2, "wo')
    assert measure.read_lines(path, "soak") == [{"case": 1, "worst": "inf", "n": 3}]
    write_line(path, {"stage": "soak", "case": 2})
    write_line(path, {"stage": "facts", "case": 3})
    assert [row["case"] for row in measure.read_lines(path, "soak")] == [1, 2]
    assert measure.read_lines(tmp_path / "none.jsonl", "soak") == []


def test_without_core_ml_nothing_is_called_measured(tmp_path):
    result = measure.first_light(tmp_path, stages={"facts": stages.STAGES["facts"]})
    (stage,) = result["stages"]
    assert stage["status"] == "stand-in" and result["runtime"] == "stand-in"
    assert stage["status"] in measure.LOGGED
    assert [row["status"] for row in stage["rows"]] == ["ok", "not_measured"]
    assert {m["what"] for m in result["not_measured"]} == {"facts"}
    assert (
        result["machine"]["cores"] and result["schema"] == 1 and not result["simulated"]
    )


def test_a_mac_too_old_for_states_is_not_measured_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    result = measure.first_light(tmp_path, stages={"ladder": stages.STAGES["ladder"]})
    (stage,) = result["stages"]
    assert (result["runtime"], stage["status"], stage["rows"]) == (
        "coreml",
        "not_measured",
        [],
    )
    assert (
        "macOS 15" in stage["reason"] and result["not_measured"][0]["what"] == "ladder"
    )
    assert log.load("runs", tmp_path / "log")["status"].tolist() == ["skipped"]


# --- the file -------------------------------------------------------------------------------------

SECRETS = (
    "janedoe",
    "janes-macbook",
    "/Users/janedoe",
    "C02XY1234567",
    "0DEADBEE-0000-4000",
    "5A5A5A5A-1111",
)


@pytest.fixture
def a_mac(tmp_path, monkeypatch):
    """A machine with a user, a host, a home, and an ioreg that says serial number and UUID."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "ioreg"
    tool.write_text(
        '#!/bin/sh\necho \'"IOPlatformSerialNumber" = "C02XY1234567"\'\n'
        'echo \'"IOPlatformUUID" = "0DEADBEE-0000-4000-8000-00000000CAFE"\'\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "janedoe")
    monkeypatch.setenv("HOME", "/Users/janedoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-macbook.local")


def made(
    folder: Path, chip: str = "Apple M9", model: str = "Mac99,1"
) -> tuple[dict, Path]:
    """A result and the folder it was made in, every text in them naming the machine and its
    user."""
    told = (
        "JaneDoe on janes-macbook (C02XY1234567, 0DEADBEE-0000-4000-8000-00000000CAFE): "
        "/Users/janedoe/private/model.mil, owner=janedoe, "
        "volume 5a5a5a5a-1111-2222-3333-444455556666"
    )
    row = {
        "command": "first-light ladder",
        "chip": chip,
        "model": model,
        "runtime": "stand-in",
    }
    row |= {"memory_bytes": 16 << 30, "cores": 10, "reason": told, "checkpoint": told}
    row |= {"config": {"first_light": {"rows": [{"reason": told, told: 1}]}}}
    sample = {
        "phase": "call",
        "shard": told,
        "repetition": 0,
        "value": 1.0,
        "unit": "ms",
    }
    run_id = runs.record_run(
        "36", row, root=folder / "log", samples=[sample | {"order": 0, "warmup": False}]
    )
    (folder / "ladder.stderr").write_text(f"ANECCompile() FAILED for {told}\n")
    machine = {
        "chip": chip,
        "model": model,
        "memory_bytes": 16 << 30,
        "cores": 10,
        "user": told,
    }
    stage = {"stage": "ladder", "rows": [{"status": "failed", "reason": told}]}
    result = {
        "schema": 1,
        "runtime": "stand-in:mac",
        "simulated": True,
        "machine": machine,
    }
    return result | {"stages": [stage], "run_ids": [run_id]}, folder


def texts(contents: dict[str, bytes]) -> str:
    """Every text of every member, tables decoded, JSON in them too."""
    parts = list(contents)
    for name, data in contents.items():
        if name.endswith(".parquet"):
            table = pq.read_table(io.BytesIO(data))
            parts += [str(value) for row in table.to_pylist() for value in row.values()]
            parts.append(str(table.schema.metadata))
        else:
            parts.append(data.decode())
    return "\n".join(json.dumps(part, ensure_ascii=False) for part in parts)


def secrets_in(contents: dict[str, bytes]) -> set[str]:
    return {
        secret
        for secret in SECRETS
        if re.search(re.escape(secret), texts(contents), re.I)
    }


def test_no_member_says_user_host_home_serial_number_or_uuid(
    a_mac, tmp_path, monkeypatch
):
    result, folder = made(tmp_path)
    contents = archive.members(result, folder)
    names = {name.partition("/")[0] for name in contents}
    assert names == {"result.json", "log", "stderr"} and len(contents) == 4
    assert secrets_in(contents) == set()
    assert "ANECCompile() FAILED" in contents["stderr/ladder.txt"].decode()
    monkeypatch.setattr(archive, "anonymous", lambda value, names: value)
    assert secrets_in(archive.members(result, folder)) == set(SECRETS)


def test_rows_name_nobody_as_soon_as_they_are_written(a_mac, tmp_path):
    _identifiers.cache_clear()
    write_line(
        tmp_path / "rows", {"stage": "ladder", "reason": "janedoe, C02XY1234567"}
    )
    _identifiers.cache_clear()
    assert json.loads((tmp_path / "rows").read_text())["reason"] == "…, …"


def test_names_are_words_and_short_ones_stay(a_mac):
    names = scrub.identifiers()
    assert {"janedoe", "janes-macbook", "C02XY1234567"} <= names
    text = "janedoes JANEDOE janes-macbook.local x-janedoe"
    assert scrub.anonymous({"a": [text, 1, None]}, names) == {
        "a": ["janedoes … … x-…", 1, None]
    }


@pytest.fixture
def zipped(a_mac, tmp_path):
    result, folder = made(tmp_path)
    path = tmp_path / "light.zip"
    archive.write(archive.members(result, folder), path)
    return path


def test_a_zip_goes_into_a_log_once_however_often_it_is_imported(zipped, tmp_path):
    root = tmp_path / "mine"
    first, second = (archive.import_zip(zipped, root) for _ in range(2))
    assert (first["imported"], second["imported"]) == (1, 0) and first[
        "runs"
    ] == second["runs"]
    assert (
        first["machine"] == "Apple M9, Mac99,1, 16 GiB, 10 cores" and first["simulated"]
    )
    (row,) = log.load("runs", root).to_dict("records")
    assert (row["run_id"], row["experiment"]) == (first["runs"][0], "36")
    assert len(log.load("samples", root)) == 1
    assert json.loads(row["config"])["first_light"]["rows"]


def test_two_macs_are_two_machines(a_mac, tmp_path):
    root = tmp_path / "mine"
    for model in ("Mac99,1", "Mac99,2"):
        (tmp_path / model).mkdir()
        result, folder = made(tmp_path / model, model=model)
        archive.write(archive.members(result, folder), tmp_path / f"{model}.zip")
        archive.import_zip(tmp_path / f"{model}.zip", root)
    assert with_machines(log.load("runs", root))["machine"].nunique() == 2


def damaged(path: Path, change) -> Path:
    """A zip whose members went through a function of name → contents."""
    with zipfile.ZipFile(path) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    archive.write(change(contents), path)
    return path


def torn(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def flipped(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)
    return path


DAMAGE = {
    "torn": (torn, "BadZipFile"),
    "a flipped byte": (flipped, "Bad CRC-32|Error"),
    "no result": (
        lambda p: damaged(
            p, lambda c: {n: d for n, d in c.items() if n != "result.json"}
        ),
        "result.json",
    ),
    "another schema": (
        lambda p: damaged(p, lambda c: c | {"result.json": b'{"schema": 9}'}),
        "9",
    ),
    "half a result": (
        lambda p: damaged(
            p, lambda c: c | {"result.json": b'{"schema": 1, "stages": []}'}
        ),
        "machine, runtime, simulated",
    ),
    "no object": (
        lambda p: damaged(p, lambda c: c | {"result.json": b"[]"}),
        "TypeError",
    ),
    "a foreign member": (lambda p: damaged(p, lambda c: c | {"../x": b""}), "'../x'"),
    "a torn table": (
        lambda p: damaged(
            p, lambda c: {n: d[:99] if "runs" in n else d for n, d in c.items()}
        ),
        "table runs",
    ),
    "a run without its row": (
        lambda p: damaged(
            p, lambda c: {n: d for n, d in c.items() if "/runs/" not in n}
        ),
        "0 rows in runs for 1 runs",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_zip_is_refused_by_name_and_changes_nothing(name, zipped, tmp_path):
    damage, reason = DAMAGE[name]
    with pytest.raises(InputError, match=reason) as refused:
        archive.import_zip(damage(zipped), tmp_path / "mine")
    assert "light.zip" in str(refused.value) and not (tmp_path / "mine").exists()


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "runtime"), [("stand-in", "stand-in"), ("simulated-mac", "stand-in:mac")]
)
def test_what_is_shipped_is_whole_says_what_it_is_and_names_nobody(
    name, runtime, tmp_path
):
    path = ROOT / "data" / "first-light" / f"{name}.zip"
    result, files = archive.read(path)
    assert (result["runtime"], result["simulated"]) == (runtime, ":" in runtime)
    statuses = {stage["stage"]: stage["status"] for stage in result["stages"]}
    assert statuses == dict.fromkeys(stages.STAGES, "stand-in")
    cases = {stage["stage"]: len(stage["rows"]) for stage in result["stages"]}
    assert cases == {
        stage: len(about.cases()) for stage, about in stages.STAGES.items()
    }
    assert sum(stage["seconds"] for stage in result["stages"]) < 15 * 60
    with zipfile.ZipFile(path) as packed:
        said = texts({member: packed.read(member) for member in packed.namelist()})
    assert not re.search(
        r"(?<![\w.…~])/(?:home|Users|root|tmp|work|private|var)/", said
    )
    assert not [
        name
        for name in scrub.identifiers()
        if re.search(rf"\b{re.escape(name)}\b", said)
    ]
    imported = archive.import_zip(path, tmp_path)
    assert (
        imported["imported"] == len({Path(file).stem for file in files}) == 6 + 12 + 1
    )
    rows = log.load("runs", tmp_path)
    assert set(rows["runtime"]) == {"stand-in"}
    assert set(rows["placement_source"].dropna()) == (
        {"simulated"} if ":" in runtime else set()
    )


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_what_it_writes_and_the_log_takes_it(tmp_path, monkeypatch):
    chosen = {name: stages.STAGES[name] for name in ("facts", "golden")}
    monkeypatch.setattr(measure, "STAGES", chosen)
    monkeypatch.setattr(measure.process, "call", in_process.call)
    out = tmp_path / "out" / "light.zip"
    ran = CliRunner().invoke(app, ["first-light", "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert {"schema", "commit", "machine", "stages"} <= result.keys()
    assert [stage["status"] for stage in result["stages"]] == ["stand-in", "stand-in"]
    golden = {row["units"]: row["verdict"] for row in result["stages"][1]["rows"]}
    assert golden == dict.fromkeys(COMPUTE_UNITS, "GREEN")
    with zipfile.ZipFile(out) as packed:
        assert packed.namelist() == list(result["members"])
        assert all(name in ran.stderr for name in packed.namelist())
    assert list(out.parent.iterdir()) == [out]
    monkeypatch.chdir(tmp_path)  # with a log of its own
    taken = CliRunner().invoke(app, ["log", "import", str(out), "--json"])
    assert taken.exit_code == 0 and json.loads(taken.stdout)["imported"] == 2
    rows = log.load("runs", tmp_path / "experiments" / "log")
    assert set(rows["command"]) == {"first-light facts", "first-light golden"}
    assert set(rows["runtime"]) == {"stand-in"}


def test_a_command_that_is_killed_leaves_its_rows_beside_the_zip(tmp_path):
    out, stderr = tmp_path / "light.zip", tmp_path / "stderr"
    command = [sys.executable, "-m", "workbench.cli", "first-light", "--out", str(out)]
    with stderr.open("w") as errors:
        child = subprocess.Popen(
            command, stderr=errors, env=os.environ | {"TMPDIR": str(tmp_path)}
        )
    try:
        for _ in range(600):
            lines = list(tmp_path.glob("light-*.jsonl"))
            if lines and lines[0].read_text().count("\n") > 3:
                break
            time.sleep(0.1)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    (path,) = lines
    assert f"Rows are in {path} until" in stderr.read_text() and not out.exists()
    stages_so_far = [
        row["stage"] for row in map(json.loads, path.read_text().splitlines())
    ]
    assert stages_so_far[:3] == ["facts", "facts", "binding"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["log", "import"], "no file"),
        (["log", "import", "none.zip"], "no such file"),
        (["first-light", "--runtime", "portable"], "coreml or stand-in"),
        (["first-light", "--runtime", "stand-in:unheard"], "unheard"),
        (["first-light", "--runtime", "coreml"], "macOS 15"),
    ],
)
def test_bad_input_is_one_message(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not list(tmp_path.iterdir())
