"""One measurement of a log at a time on a machine, and what a full disk leaves."""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from workbench import log, process, sweep
from workbench.errors import InputError
from workbench.sweep import run as cell_runs
from workbench.sweep.lock import measuring_alone

HOLDER = """
import sys, time
from pathlib import Path
from workbench.sweep.lock import measuring_alone
with measuring_alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that measures into the log."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        yield other
        other.kill()


def test_a_measurement_waits_for_another_process_and_names_it_once(
    holder, tmp_path, capsys
):
    """And goes on once that process was killed, however it ends."""
    root, entered = tmp_path / "log", threading.Event()

    def measure() -> None:
        for _ in range(2):
            with measuring_alone(root):
                entered.set()

    waiting = threading.Thread(target=measure)
    waiting.start()
    assert not entered.wait(0.6)
    holder.send_signal(signal.SIGKILL)
    waiting.join(30)
    assert entered.is_set()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"process {holder.pid}, started 20" in line and str(root) in line


def test_a_measurement_that_waits_can_be_cancelled(holder, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(process.Cancelled), measuring_alone(tmp_path / "log", stop):
        pass


def test_the_lock_s_file_names_the_process_and_not_the_machine(tmp_path):
    with measuring_alone(tmp_path):
        (path,) = tmp_path.iterdir()
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert psutil.Process().name() not in path.name


@pytest.fixture
def short_sweep(swept, grid, tmp_path, calls_here):
    """A function that sweeps a grid of four short cells into `tmp_path`/log and returns the counts."""
    run = grid["run"] | {"n_gen": 2, "repetitions": 1, "rounds": 2}
    parsed = sweep.make_grid(grid | {"run": run, "validate_ids": []})
    options = {"root": tmp_path / "log", "bundles": swept.bundles, "progress": False}
    return lambda: sweep.sweep(parsed, **options)


def test_two_sweeps_of_a_log_at_once_measure_every_cell_once_and_never_together(
    short_sweep, tmp_path, monkeypatch
):
    running, most_running = 0, 0
    measure_and_log = cell_runs.CellMeasurement.measure_and_log

    def count_running(measurement):
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        try:
            return measure_and_log(measurement)
        finally:
            running -= 1

    patched = cell_runs.CellMeasurement
    monkeypatch.setattr(patched, "measure_and_log", count_running)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(short_sweep())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows = log.load("runs", tmp_path / "log")
    assert len(rows) == 4 and not rows.duplicated(["setting", "round"]).any()
    assert most_running == 1
    assert [result["failed"] for result in results] == [0, 0]


def test_a_disk_that_fills_in_the_middle_is_one_message_and_the_sweep_resumes(
    short_sweep, tmp_path, monkeypatch
):
    """The row of the second cell is not written: none of its tables stays."""
    replace, calls = os.replace, iter(range(1000))

    def fail_at_second_row(source, target):
        if "runs" in str(target) and next(calls):
            raise OSError(28, "No space left on device", str(target))
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_at_second_row)
        with pytest.raises(OSError, match="No space left on device") as caught:
            short_sweep()
    assert "1 of 4 cells kept" in caught.value.__notes__[0]
    root = tmp_path / "log"
    (row,) = log.load("runs", root)["run_id"]
    for table in ("samples", "layers"):
        assert {path.stem for path in (root / table).iterdir()} == {row}
    counts = short_sweep()
    assert (counts["done"], counts["resumed"], counts["failed"]) == (3, 1, 0)


def test_an_export_without_room_ends_the_sweep_and_is_no_failed_row(
    short_sweep, tmp_path, monkeypatch
):
    measure, calls = cell_runs.measure_in_child, iter(range(1000))
    full = InputError("bundle", "9 bytes free", "10 bytes", "choose another disk")

    def fail_at_third_cell(*arguments):
        if next(calls) == 2:
            raise full from OSError(28, "No space left on device")
        return measure(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cell_runs, "measure_in_child", fail_at_third_cell)
        with pytest.raises(InputError, match="9 bytes free") as caught:
            short_sweep()
    (note,) = caught.value.__notes__
    root = tmp_path / "log"
    assert note == f"2 of 4 cells kept in {root}; the same command resumes"
    assert log.load("runs", root)["status"].tolist() == ["ok", "ok"]
    counts = short_sweep()
    assert (counts["done"], counts["resumed"], counts["failed"]) == (2, 2, 0)
