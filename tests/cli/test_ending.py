"""Every command ends with one message and its exit code: 1 is a faulty export and nothing else."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from cyclopts import CycloptsError
from in_process import cli
from safetensors import SafetensorError

from workbench import cli as commands
from workbench import log, sweep
from workbench.cli import ending
from workbench.errors import CellError, InputError
from workbench.log import anonymous

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/x.npy")


def end_with(capsys, problem: BaseException) -> tuple[int, str]:
    """Ends a command that raises `problem`. Returns its exit code and stderr."""

    def command():
        raise problem

    with pytest.raises(SystemExit) as end:
        ending.end(command)
    return end.value.code, capsys.readouterr().err


def deep_yaml_error() -> RecursionError:
    """What PyYAML raises for a file of 100,000 nested lists."""
    with pytest.raises(RecursionError) as raised:
        yaml.safe_load("[" * 100_000)
    return raised.value


def test_an_error_that_a_library_raises_when_interrupted_is_no_fault(capsys):
    """safetensors raises a ValueError where Ctrl-C reaches its code."""

    def command():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            ending.end(command)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capsys.readouterr().err == "workbench: interrupted\n"


# what NumPy raises for an array that memory does not hold; it has no public name
ARRAY_TOO_LARGE = np._core._exceptions._ArrayMemoryError((9,), np.dtype("f4"))


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [
        (InputError("x", "1", "2", "write 2"), 2, "x: found 1; needs 2"),
        (CycloptsError(msg="unknown"), 2, "unknown"),
        (FULL, 2, "/data/x.npy: found No space left on device; needs room on the disk"),
        (OSError(errno.EROFS, "Read-only file system", "/log"), 2, "/log: found Read-"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), 2, "a shorter"),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            2,
            "ulimit -u",
        ),
        (RuntimeError("can't start new thread"), 2, "ulimit -u"),
        (
            SafetensorError("I/O error: No space left (os error 28)"),
            2,
            "room on the disk",
        ),
        (MemoryError(), 2, "memory: found "),
        (ARRAY_TOO_LARGE, 2, "Unable to"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), 2, "memory"),
        (deep_yaml_error(), 2, "too many nested levels"),
        (CellError("05_toy: the kernel failed"), 3, "05_toy: the kernel failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    # the name of the exception's class, and pytest's own ids of the code and the words
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_is_one_message_with_its_exit_code(capsys, problem, code, words):
    exit_code, stderr = end_with(capsys, problem)
    (line,) = stderr.splitlines()
    assert exit_code == code and words in line and line.startswith("workbench: ")


def test_a_fault_of_the_workbench_names_the_file_of_its_traceback(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, stderr = end_with(capsys, ZeroDivisionError("division by zero"))
    (file,) = tmp_path.iterdir()
    assert code == 3 and len(stderr.splitlines()) == 1
    assert (
        f"a fault of the workbench: ZeroDivisionError: division by zero (traceback: {file})"
        in stderr
    )
    assert "in command" in file.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    code, stderr = end_with(capsys, ZeroDivisionError("division by zero"))
    assert code == 3 and len(stderr.splitlines()) == 1


def test_an_error_that_is_the_workbench_s_own_recursion_is_its_fault(capsys):
    def recur():
        recur()

    with pytest.raises(RecursionError) as raised:
        recur()
    assert end_with(capsys, raised.value)[0] == 3


COMMAND = [sys.executable, "-c", "from workbench.cli import main; main()"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A log of one run."""
    root = tmp_path_factory.mktemp("log")
    log.record({"command": "sweep"}, root)
    return root


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_full_output_is_refused(stored, output):
    arguments = ["log", "--rows", "--log", stored]
    if output == "stderr":
        arguments = ["log", "--sort", "nothing", "--log", stored]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            COMMAND + arguments, text=True, **streams | {output: full}
        )
    assert ended.returncode == 2
    if output == "stdout":
        stage, line = ended.stderr.splitlines()
        assert stage == "log: reading the runs"
        assert "No space left on device" in line


def test_a_closed_pipe_ends_without_a_message(stored):
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "log", "--rows", "--log", stored]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"log: reading the runs\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell closes the stream")
def test_a_closed_stderr_leaves_the_document_alone(stored):
    """Python then has no stderr, and `print` to none of them writes on stdout."""
    words = shlex.join([*COMMAND, "log", "--json", "--log", str(stored)])
    ended = subprocess.run(f"{words} 2>&-", shell=True, capture_output=True, text=True)
    assert (ended.returncode, json.loads(ended.stdout)) == (0, [])


def test_what_libraries_print_is_not_in_a_document(capsys, monkeypatch, stored):
    monkeypatch.setattr(
        sys, "argv", ["workbench", "log", "--json", "--log", str(stored)]
    )
    load = log.load

    def noisy(*arguments, **options):
        print("a dump of a library")
        return load(*arguments, **options)

    monkeypatch.setattr(log, "load", noisy)
    commands.main()
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 0 and "a dump of a library" in printed.err


def test_settings_of_tqdm_that_it_cannot_read_are_named(stored):
    environment = os.environ | {"TQDM_MININTERVAL": "x"}
    command = [*COMMAND, "log", "--log", stored]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "TQDM_MININTERVAL" in line


def test_help_has_its_texts_where_python_removes_docstrings():
    environment = os.environ | {"PYTHONOPTIMIZE": "2"}
    command = [*COMMAND, "log", "--help"]
    page = subprocess.check_output(command, env=environment, text=True)
    assert "Prints one row for each setting" in page and "Column to sort by" in page


@pytest.mark.parametrize(
    ("verdict", "quality", "failed", "code"),
    [
        ("RED", "not_run", 1, 1),
        (None, None, 1, 3),
        ("GREEN", "OVER", 1, 3),
        ("GREEN", "OVER", 0, 4),
        ("GREEN", "WITHIN", 0, 0),
    ],
)
def test_a_sweep_is_1_for_red_cells_3_for_failed_ones_and_4_for_cost(
    tmp_path, monkeypatch, verdict, quality, failed, code
):
    counts = dict.fromkeys(["cells", "done", "resumed", "invalid"], 1)
    counts |= {"failed": failed, "log": "", "reasons": [], "settings": {"s"}}
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: counts)
    monkeypatch.setattr(sweep, "load_grid", lambda _: SimpleNamespace(bundle=[]))
    rows = pd.DataFrame({"verdict": [verdict], "quality": [quality]})
    monkeypatch.setattr("workbench.sweep.summary.summary", lambda *_: rows)
    monkeypatch.setattr("workbench.sweep.table.table_lines", lambda rows: [])
    (tmp_path / "grid.yaml").touch()
    assert cli("sweep", tmp_path / "grid.yaml").exit_code == code


def test_a_user_without_a_name_and_a_home_has_no_identifiers(monkeypatch):
    def nobody(*_):
        raise KeyError("getpwuid(): uid not found: 4242")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert anonymous.identifiers() == set()


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from workbench import cli, log
from workbench.sweep import run
from workbench.sweep.grid import CellResult

# a shell starts what it runs in the background with interrupts ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def measure(cell, **_):
    if Path("measured").exists():
        Path("second").touch()
        time.sleep(60)
    Path("measured").touch()
    return CellResult("ok", None)
run.run_cell = measure
cli.main()
"""


@pytest.mark.usefixtures("forked")
def test_an_interrupted_sweep_says_what_it_kept_and_ends_at_once(tmp_path):
    checkpoint = Path(__file__).parents[2] / "data" / "tiny-llama"
    grid = {"checkpoint": str(checkpoint), "run": {"depth": [0, 1, 2, 3]}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    command = [sys.executable, "-c", INTERRUPTED, "sweep", "grid.yaml", "--log", "log"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "second").exists():
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130
    assert stderr.splitlines()[-1].startswith("workbench: 1 of 4 cells kept in ")
    assert stderr.splitlines()[-1].endswith("the same command resumes")


def test_a_command_ends_without_a_search_for_garbage():
    """The search took most of the time between the last output and the end."""
    program = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # runs last
sys.argv = ["workbench", "--help"]
from workbench.cli import main
main()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True"


def test_a_refusal_is_an_object_on_stdout_where_json_is_asked_for(capsys, monkeypatch):
    refusal = InputError("tokens", "0", "a number from 1", "write 4")
    for arguments, problem, parts in (
        (
            ["plan", "x", "--json"],
            refusal,
            ["tokens", "0", "a number from 1", "write 4"],
        ),
        (["plan", "x", "--json"], FULL, ["/data/x.npy", FULL.strerror, *ending.ROOM]),
        (["plan", "x"], refusal, None),
        (["plan", "x", "--json"], CellError("a cell failed"), None),
    ):
        monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
        with pytest.raises(SystemExit):
            ending.end(partial(raise_error, problem))
        stdout, stderr = capsys.readouterr()
        assert stderr.startswith("workbench: ")
        if parts is None:
            assert stdout == ""
        else:
            keys = "subject", "found", "needed", "next"
            assert json.loads(stdout) == {"error": dict(zip(keys, parts, strict=True))}


def raise_error(problem: BaseException) -> None:
    raise problem
