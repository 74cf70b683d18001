"""Forks and their server end with the test process that started them, even where it is killed."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TESTS = str(Path(__file__).parent)
ASKING = """
import subprocess, sys
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.run([sys.argv[1], "-c", code])
"""
STARTING = """
import sys, time
sys.path.insert(0, sys.argv[1])
import forks, psutil
with forks.start():
    (server,) = psutil.Process().children()
    print(server.pid, flush=True)
    time.sleep(600)
"""

IMPORTING = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import forks, psutil
with forks.start() as command:
    (server,) = psutil.Process().children()
    subprocess.Popen([command, "-c", ""])  # has the server import, which takes seconds
    print(server.pid, flush=True)
    server.wait()
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a Mac's frameworks survive no fork"
)


def kill_after_first_line(code: str, argument: str) -> list[psutil.Process]:
    """Runs code, and kills its process once that has printed the id of another process. Returns the
    other process, and the children that the killed one had."""
    command = [sys.executable, "-c", code, argument]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        printed = psutil.Process(int(killed.stdout.readline()))
        orphans = [printed, *psutil.Process(killed.pid).children(recursive=True)]
        killed.kill()
        killed.wait()
        killed.stdout.close()
    return orphans


def end_soon(processes: list[psutil.Process]) -> bool:
    """Whether all processes end within 10 s; those that do not are killed."""
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != "zombie" for p in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            return False
        time.sleep(0.05)
    return True


def test_a_fork_ends_with_the_process_that_asked_for_it(forking_python):
    orphans = kill_after_first_line(ASKING, forking_python)
    assert len(orphans) == 2 and end_soon(orphans)


@pytest.mark.parametrize("code", [STARTING, IMPORTING])
def test_the_process_that_forks_ends_with_the_one_that_started_it(code):
    assert end_soon(kill_after_first_line(code, TESTS))
