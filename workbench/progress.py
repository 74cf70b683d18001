"""Progress of long work: bars, and a line that names the running stage."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

STAGE_FILE_VARIABLE = "WORKBENCH_STAGE_FILE"
"""The environment variable with the path of a file that has the name of the running stage.
A kernel has it, whose notebook another process shows (see `kernel.execute`)."""
TICK_S = 5.0
"""Seconds from a plain line to the next one of `tick`."""
# when the last plain line was printed, on the clock of `time.monotonic`
_last_line_s = 0.0
# tqdm's line for the running stage, while one is shown
_stage_line = None
# whether a stage is a plain line where stderr is no terminal
_prints_plain_lines = False


def bar(*args, **options):
    """A bar of `tqdm.auto`, with the arguments of `tqdm`. It is shown in a notebook, which
    loses it at its end, and on a terminal, and nowhere else."""
    from tqdm.auto import tqdm

    # finished bars would stand between the results of a cell
    if _is_in_kernel():
        options.setdefault("leave", False)

    _give_each_process_its_lock()
    end_stage()
    # None: tqdm shows nothing where the output is no terminal. A kernel's output is none,
    # so that this rule alone would hide the bars of notebooks
    disable = False if _is_in_kernel() else None
    return tqdm(*args, disable=disable, **options)


def shows_bars() -> bool:
    """Whether a bar on stderr is shown, by the rule of `bar`, for the bars of other
    libraries."""
    if sys.stderr is None:  # closed by the shell
        return False
    return _is_in_kernel() or sys.stderr.isatty()


def _is_in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


@contextmanager
def plain_stage_lines() -> Iterator[None]:
    """Context manager in which `stage` prints a line where stderr is no terminal. Commands run
    in it, because a file or a CI job may keep their output; notebooks and scripts do not, and
    stay silent."""
    global _prints_plain_lines
    before, _prints_plain_lines = _prints_plain_lines, True
    try:
        yield
    finally:
        _prints_plain_lines = before


def stage(name: str) -> None:
    """Shows which stage begins, for work that cannot be counted. On a terminal the line is
    removed when the next stage or bar begins, or when a command prints its result;
    elsewhere it stays (see `plain_stage_lines`). The name is also written to the file of
    `STAGE_FILE_VARIABLE`, where there is one."""
    global _stage_line
    from tqdm import tqdm

    _give_each_process_its_lock()
    end_stage()
    if path := os.environ.get(STAGE_FILE_VARIABLE):
        with suppress(OSError):  # the run that shows it has ended
            Path(path).write_text(name, encoding="utf-8")
    if sys.stderr is None:  # closed by the shell; `print` would write on stdout
        return
    if not sys.stderr.isatty():
        plain_line(name)
        return
    _stage_line = tqdm(desc=name, bar_format="{desc} …", leave=False, disable=None)


def tick(name: str) -> bool:
    """Says how far counted work is, where its bar is not shown because stderr is no
    terminal: a plain line, at most one in `TICK_S` seconds (see `plain_stage_lines`).
    Returns whether it was printed."""
    if time.monotonic() - _last_line_s < TICK_S:
        return False
    return plain_line(name)


def plain_line(text: str) -> bool:
    """Prints a line that a log file keeps, such as the result of a cell, where stderr is no
    terminal (see `plain_stage_lines`). Returns whether it was printed."""
    global _last_line_s
    if not shows_plain_lines():
        return False
    _last_line_s = time.monotonic()
    print(text, file=sys.stderr, flush=True)
    return True


def announce(text: str) -> None:
    """Prints a line on stderr that stays, on a terminal too, before long work begins."""
    end_stage()
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def shows_plain_lines() -> bool:
    """Whether `plain_line` prints."""
    return _prints_plain_lines and sys.stderr is not None and not sys.stderr.isatty()


def end_stage() -> None:
    """Removes the line of the running stage."""
    global _stage_line
    line, _stage_line = _stage_line, None
    if line is not None:
        line.close()


@cache
def _give_each_process_its_lock() -> None:
    """Replaces the lock of tqdm's bars, which a process shares with those that it forks:
    if one of them is killed while it holds the lock, all the others wait for ever."""
    from tqdm import tqdm

    def make_lock() -> None:
        tqdm.set_lock(threading.RLock())

    make_lock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        # a thread may hold the lock while its process forks
        os.register_at_fork(after_in_child=make_lock)
