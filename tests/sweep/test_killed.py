"""Whoever is killed while it measures leaves no process: a call, a sweep, a validation of units, and a
run of pytest on two workers. The signal reaches one process alone, as a user or a scheduler would send it."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny import ROOT

from workbench import process

# the longest that a process may take to end and to start. A worker of pytest ends only after its
# imports, which take long on a busy machine
ENDS_S = 60
STARTS_S = 120
HERE = Path(__file__).parent
SIGNALS = pytest.mark.parametrize(
    "end_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name
)

# programs that are killed; the test fills in what is in braces
CALL = """
import called, pathlib
from workbench import process
process.call(called.hang, pathlib.Path("started"))
"""
SWEEP = """
from workbench import sweep
sweep.sweep(sweep.make_grid({grid!r}), root="log", bundles={bundles!r}, progress=False)
"""
UNITS = """
import sys
from workbench.cli import main
sys.argv = ["workbench", "validate", "units", {bundle!r}, "--checkpoint", {checkpoint!r}]
main()
"""
TESTS = """
import pathlib, subprocess
import called
from workbench import process

def test_one():
    process.call(called.sleep, pathlib.Path("one"))

def test_other(forking_python):
    code = "import pathlib, time; pathlib.Path('forked').touch(); time.sleep(600)"
    subprocess.Popen([forking_python, "-c", code])
    process.call(called.hang, pathlib.Path("other"))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts Python in `tmp_path`; processes that still live at the end are
    killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    started = []

    def run(*arguments: str) -> psutil.Popen:
        # a process inherits ignored signals: nohup ignores SIGHUP
        previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        started.append(psutil.Popen([sys.executable, *arguments]))
        signal.signal(signal.SIGHUP, previous)
        return started[-1]

    yield run
    for root in started:
        if root.is_running():
            for member in (*root.children(recursive=True), root):
                member.kill()
            root.wait()


def wait_for(condition, running: psutil.Popen) -> None:
    deadline = time.monotonic() + STARTS_S
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def end_and_find_survivors(
    running: psutil.Popen, end_signal: signal.Signals
) -> list[psutil.Process]:
    """Sends a process a signal that ends it, waits, and returns the descendants that did not end
    within `ENDS_S`; they are killed."""
    descendants = running.children(recursive=True)
    assert descendants
    running.send_signal(end_signal)
    assert running.wait(ENDS_S) == -end_signal
    _, alive = psutil.wait_procs(descendants, timeout=ENDS_S)
    # an orphan without a parent that waits for it stays a zombie
    alive = [p for p in alive if p.is_running() and p.status() != "zombie"]
    for survivor in alive:
        survivor.kill()
    return alive


@pytest.mark.skipif(not process.CAN_FORK, reason="on a Mac the child is the server")
@SIGNALS
def test_a_call_leaves_no_process_though_no_thread_of_its_child_can_run(
    start, end_signal
):
    running = start("-c", CALL)
    wait_for(lambda: Path("started").exists(), running)
    assert end_and_find_survivors(running, end_signal) == []


@pytest.mark.slow("a process imports what cells need, and so does its child")
@pytest.mark.wide
@SIGNALS
def test_a_sweep_leaves_no_process(start, swept, grid, end_signal):
    bundles = str(swept.bundles)
    run = grid["run"] | {"T": [1], "min_seconds": 600}
    changed = grid | {"run": run, "validate_ids": []}
    running = start("-c", SWEEP.format(grid=changed, bundles=bundles))
    # a server and the child that measures
    wait_for(lambda: len(running.children(recursive=True)) > 1, running)
    assert end_and_find_survivors(running, end_signal) == []


@pytest.mark.slow("a command imports what validations need, and so does its child")
@pytest.mark.wide
@SIGNALS
def test_a_validation_of_units_leaves_no_process(start, swept, grid, end_signal):
    manifest = next((swept.bundles).glob("*/bundle.json"))
    names = {"bundle": str(manifest.parent), "checkpoint": str(grid["checkpoint"])}
    running = start("-c", UNITS.format(**names))
    # a server and the child that validates on the first unit
    wait_for(lambda: len(running.children(recursive=True)) > 1, running)
    assert end_and_find_survivors(running, end_signal) == []


@pytest.mark.slow("pytest and two workers start, and each of them a child")
@pytest.mark.wide
@SIGNALS
def test_a_run_of_pytest_leaves_no_process(start, tmp_path, monkeypatch, end_signal):
    (tmp_path / "test_both.py").write_text(TESTS)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("WORKBENCH_TEST_FORKS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent), prepend=os.pathsep)
    settings = ["-c", ROOT / "pyproject.toml", "-o", "addopts=", "--rootdir", tmp_path]
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-n", "2", "test_both.py"]
    running = start("-m", "pytest", *map(str, settings), *options)
    names = ("one", "other", "forked")
    wait_for(lambda: all(Path(name).exists() for name in names), running)
    assert end_and_find_survivors(running, end_signal) == []
