"""Bars show in notebooks and on terminals."""

import contextlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from workbench import progress
from workbench.cli.app import run
from workbench.progress import bar, end_stage, plain_stage_lines, stage, tick


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_bar_shows_in_a_kernel_and_not_in_a_file(monkeypatch, tmp_path, in_kernel):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # to import it starts no kernel
    shell = SimpleNamespace(kernel=None) if in_kernel else None
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with (tmp_path / "said").open("w") as file:
        shown = bar([1], file=file)
        assert shown.disable is not in_kernel
        assert shown.leave is not in_kernel


KILLED_WITH_THE_LOCK = """
import multiprocessing, threading
from tqdm import tqdm
from workbench.progress import bar

bar([1])

def hold(is_held):
    tqdm.get_lock().acquire()
    is_held.set()
    threading.Event().wait()

fork = multiprocessing.get_context("fork")
is_held = fork.Event()
child = fork.Process(target=hold, args=(is_held,))
child.start()
assert is_held.wait(30)
child.kill()
child.join()
drawing = threading.Thread(target=bar, args=([1],), daemon=True)
drawing.start()
drawing.join(10)
print("waits" if drawing.is_alive() else "drawn")
"""


def test_a_process_that_is_killed_while_it_draws_a_bar_stops_no_other():
    command = [sys.executable, "-c", KILLED_WITH_THE_LOCK]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "drawn\n", ended.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stage_is_one_line_on_a_terminal_until_the_next_one(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("reading", "comparing"):
        stage(name)
        assert terminal.getvalue().endswith(f"\r{name} …")
    end_stage()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().rsplit("…", 1)[1].strip() == ""


class File(io.StringIO):
    """Notes what had been written when it was last flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_a_stage_of_a_command_is_a_plain_line_in_a_file(monkeypatch):
    file = File()
    monkeypatch.setattr(sys, "stderr", file)
    stage("a notebook's")
    with plain_stage_lines():
        stage("reading")
        assert file.flushed == "reading\n"
        assert bar([1]).disable
        stage("comparing")
        end_stage()
    stage("a notebook's")
    assert file.flushed == file.getvalue() == "reading\ncomparing\n"


def test_a_command_that_ended_in_a_process_prints_no_further_stages_there(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["workbench", "--version"])
    with contextlib.suppress(SystemExit):
        run()
    file = File()
    monkeypatch.setattr(sys, "stderr", file)
    stage("a notebook's")
    assert not file.getvalue()


@pytest.mark.usefixtures("forked")
def test_a_command_names_its_stages_on_stderr_beside_the_json(llama_bundle):
    command = [sys.executable, "-m", "workbench.cli"]
    command += ["validate", str(llama_bundle.root), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(ended.stdout)["gates"], ended.stderr
    assert ended.stderr.splitlines()[0] == "validate: opening the bundle"
    assert "\r" not in ended.stderr and "\x1b" not in ended.stderr


def test_a_count_is_a_plain_line_now_and_then_where_no_bar_is_shown(
    capsys, monkeypatch
):
    now = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(progress, "time", now)
    tick("in a script")
    with plain_stage_lines():
        stage("evaluate: scoring windows")
        tick("at once")
        now.monotonic = lambda: 100.0 + progress.TICK_S
        tick("1 of 9")
        tick("2 of 9")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        now.monotonic = lambda: 900.0
        tick("beside a bar")
    assert capsys.readouterr().err == "evaluate: scoring windows\n1 of 9\n"
