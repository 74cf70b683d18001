"""A call in a process of its own: its answer, its refusal, and every way of dying, none of which
the caller shares."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import called
import psutil
import pytest

from workbench import process
from workbench.errors import InputError, last_message

ENDS_S = 10


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children import called.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.mark.slow("imports what cells need, once and once more")
@pytest.mark.skipif(not process.CAN_FORK, reason="a Mac's frameworks survive no fork")
def test_children_are_forks_of_one_idle_process_that_survives_them():
    servers = {process.call(os.getppid).value}
    assert process.call(called.crash, "SIGKILL").failure
    servers.add(process.call(os.getppid).value)
    (server,) = map(psutil.Process, servers)
    assert not server.children()
    threads = Path(f"/proc/{server.pid}/task").glob("*/comm")
    # pyarrow's allocator stops its own thread around a fork
    assert len([t for t in threads if "jemalloc" not in t.read_text()]) == 1
    server.kill()
    assert process.call(os.getppid).value != server.pid


def test_a_child_has_the_environment_and_the_folder_of_its_caller(
    tmp_path, monkeypatch
):
    for value in ("a", "b"):
        monkeypatch.setenv("COLOUR", value)
        assert process.call(os.getenv, "COLOUR").value == value
    monkeypatch.chdir(tmp_path)
    assert process.call(os.getcwd).value == str(tmp_path)


@pytest.mark.slow("a new process imports what cells need")
def test_a_child_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    for name in ("random", "queue", "token", "workbench"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # another one needs another server
    monkeypatch.syspath_prepend(Path(__file__).parent / "nowhere")
    outcome = process.call(called.answer, 1)
    assert outcome.failure is None
    assert str(tmp_path) not in process.call(called.get_search_path).value


@pytest.mark.usefixtures("forked")
def test_a_child_imports_what_its_caller_does(tmp_path, monkeypatch):
    (tmp_path / "beside_the_script.py").write_text("def double(x): return 2 * x")
    monkeypatch.syspath_prepend(tmp_path)
    double = __import__("beside_the_script").double
    assert process.call(double, 21).value == 42


def test_a_server_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(process, "SERVE", "{path!r}; raise SystemExit('no such disk')")
    assert process.call(os.getpid).failure == "exit code 1: no such disk"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("kind", "words"),
    [("OSError", "/data/x"), ("InputError", "9 bytes free"), ("Rust's", "No space")],
)
def test_a_full_disk_of_a_child_is_an_error_of_the_caller(kind, words):
    with pytest.raises((OSError, InputError), match=words):
        process.call(called.fill_disk, kind)


def test_another_error_of_the_system_is_the_failure_of_the_call():
    assert "/nowhere/file" in process.call(called.open_missing_file).failure


@pytest.mark.usefixtures("forked")
def test_answers_come_from_another_process_whatever_it_prints():
    outcome = process.call(called.answer, {"a": [1, None]}, threads=3)
    assert outcome.failure is None and outcome.value["got"] == {"a": [1, None]}
    assert outcome.lines == (called.CORE_ML,)
    assert outcome.value["pid"] != os.getpid() and outcome.value["threads"] == "3"


@pytest.mark.usefixtures("forked")
def test_a_crash_is_named_and_keeps_the_lines_that_tell():
    outcome = process.call(called.crash, "SIGSEGV")
    assert outcome.failure == "killed by SIGSEGV"
    assert outcome.lines[0] == called.CORE_ML and "a line" in outcome.lines


@pytest.mark.usefixtures("forked")
def test_an_exception_is_its_last_line_and_a_refusal_its_message():
    outcome = process.call(called.raise_error)
    assert outcome.failure == "exit code 1: RuntimeError: Error compiling model: no"
    assert any("Traceback" in line for line in outcome.lines)
    outcome = process.call(called.refuse_after_core_ml_complained)
    assert outcome.failure == "x: found 1; needs 2. Next: write 2."
    assert outcome.lines == (called.CORE_ML,)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("", "no message"),
        ("log\n{\n    a = 14;\n}", "a = 14"),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: a\n\nWhile that was handled:\n\n"
            'Traceback (most recent call last):\n  File z\nE: {\n    NSLocalizedDescription = "3 \\U00d7 4";\n    Code = 14;\n}',
            'E: NSLocalizedDescription = "3 × 4"; Code = 14',
        ),
    ],
)
def test_the_last_message_is_one_line(written, text):
    assert last_message(written.splitlines()) == text


def wait_for_pid(pid_file: Path) -> int:
    """Waits until `called.sleep` or `called.hang` has written the id of its process."""
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.02)
    return int(pid_file.read_text())


def ends_in_time(pid: int) -> bool:
    """Whether a process ends within `ENDS_S`."""
    deadline = time.monotonic() + ENDS_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def test_what_takes_too_long_is_ended(tmp_path, monkeypatch):
    """The time to start does not count here: the clock shows 0 s until the child sleeps, and 5 s
    from then on."""
    pid_file = tmp_path / "pid"

    def clock():
        is_sleeping = pid_file.exists() and bool(pid_file.read_text())
        return 5 if is_sleeping else 0

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=clock))
    outcome = process.call(called.hang, pid_file, timeout_s=4)
    assert outcome.failure == "no answer in 4 s"
    assert ends_in_time(int(pid_file.read_text()))


def test_a_call_is_cancelled_from_another_thread(tmp_path):
    stop, pid_file = threading.Event(), tmp_path / "pid"

    def stop_once_it_sleeps():
        wait_for_pid(pid_file)
        stop.set()

    threading.Thread(target=stop_once_it_sleeps).start()
    started = time.monotonic()
    with pytest.raises(process.Cancelled):
        process.call(called.hang, pid_file, stop=stop)
    assert time.monotonic() - started < 60  # of 600
    assert ends_in_time(int(pid_file.read_text()))


def test_a_child_ends_when_its_caller_is_killed(tmp_path):
    code = "import called, pathlib; from workbench import process\n"
    code += "process.call(called.sleep, pathlib.Path('pid'))"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    orphan = wait_for_pid(tmp_path / "pid")
    caller.send_signal(signal.SIGKILL)
    caller.wait(10)
    assert ends_in_time(orphan)


@pytest.mark.skipif(not process.CAN_FORK, reason="on a Mac the child is the server")
def test_a_server_that_is_killed_keeps_no_caller_waiting_for_its_child():
    outcome = process.call(called.kill_server, timeout_s=60)
    assert outcome.failure == "killed by SIGKILL"


def test_a_mac_is_kept_awake_and_no_longer_than_needed(tmp_path, monkeypatch):
    arguments, caffeinate = tmp_path / "arguments", tmp_path / "caffeinate"
    caffeinate.write_text(
        f'#!/bin/sh\necho "$@" $$ > {arguments}.new\n'
        f"mv {arguments}.new {arguments}\nexec sleep 60\n"
    )
    caffeinate.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with process.awake():
        while not arguments.exists():
            time.sleep(0.01)
        *options, pid = arguments.read_text().split()
        assert options == ["-i", "-w", str(os.getpid())]
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
