"""Calls one function in a fresh Python process; a crash is a reason in words.

A child starts with nothing loaded, compiled or warmed up, and ends when its caller
does."""

import math
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from miltorch.quiet import uncollected
from workbench.errors import InputError, last_message

TAIL = 20  # lines from the end of a failed child's stderr in an `Outcome`
# Core ML writes these lines on stderr while a call goes on. All of them are logged; a
# run in which a model was not compiled, or not run, for the named unit is invalid.
# (whisper.cpp #3702, CT#2247, CT#2688)
CORE_ML_MESSAGE = re.compile(
    r"E5RT|E5 bundle|\bANE|ForANE|Espresso|MPSGraph|Error plan build|Error compiling model"
    r"|Error Domain=com\.apple"
)
INVALIDATING = re.compile(
    r"ANECCompile\(\) FAILED|MILCompilerForANE error|Error compiling model|Error Domain=com\.apple"
    r"|ANE inference operation failed|E5RT encountered an STL exception|Error plan build"
    r"|MPSGraph.* failed"
)
MESSAGES = 100  # of Core ML in an `Outcome` and a row


class Cancelled(BaseException):
    """The event `stop` of a call was set, and its child was killed."""


def _kill_at(stop: threading.Event, deadline: float, child: subprocess.Popen) -> None:
    """Kills the child when `stop` is set or the monotonic clock has reached
    `deadline`."""
    while child.returncode is None:
        if stop.wait(0.2) or time.monotonic() >= deadline:
            child.kill()
            return


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its `value`, or `failure`, the reason why there is none;
    `lines` are Core ML's messages and, of a failure, the end of stderr."""

    value: object = None
    failure: str | None = None
    lines: tuple[str, ...] = ()


def call(
    function: Callable,
    *args,
    threads: int = 1,
    timeout_s: float | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Calls `function(*args)` of an importable module in a process of its own, started
    fresh.

    Args:
        threads: OpenMP threads of the child; the caller's environment is overridden.
        timeout_s: seconds after which the child is killed, which counts as a failure.
        stop: an event; once it is set, the child is killed within 0.2 s.

    Raises:
        Cancelled: `stop` was set.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + (timeout_s or math.inf)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "workbench.process"],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stderr=errors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(
            target=_kill_at, args=(stop, deadline, child), daemon=True
        ).start()
        try:
            with suppress(BrokenPipeError):  # it died before it could read
                child.stdin.write(pickle.dumps((function, args)))
                child.stdin.flush()  # it stays open, since closing it ends the child
            reply = child.stdout.read()
            code = child.wait()
        finally:  # on any way out: no child is left behind
            child.kill()
            child.communicate()
        if stop.is_set():
            raise Cancelled
        late = time.monotonic() >= deadline
        errors.seek(0)
        lines = _lines(errors.read())
    if reply:
        outcome = pickle.loads(reply)
        notes = _messages(lines) if "failure" in outcome else []
        return Outcome(**outcome, lines=tuple(notes))
    failure = f"exit code {code}: {last_message(lines)}"
    if late:
        failure = f"no answer in {timeout_s} s"
    elif code < 0:
        failure = f"killed by {signal.Signals(-code).name}"
    notes = dict.fromkeys([*_messages(lines), *lines[-TAIL:]])
    return Outcome(failure=failure, lines=tuple(notes))


@contextmanager
def awake() -> Iterator[None]:
    """Keeps a Mac from falling asleep within the block, and no longer than this process
    lives."""
    caffeinate = None
    with suppress(OSError):  # another system, or no such command
        command = ["caffeinate", "-i", "-w", str(os.getpid())]
        caffeinate = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        if caffeinate:
            caffeinate.terminate()
            caffeinate.wait()


def core_ml_messages() -> list[str]:
    """In a child: Core ML's lines on stderr so far, each once.

    Core ML reports a failed compilation there and goes on; see `invalidating`.
    """
    about, written = os.fstat(2), b""
    if stat.S_ISREG(about.st_mode):
        written = os.pread(2, about.st_size, 0)
    return _messages(_lines(written))


def invalidating(messages: list[str]) -> list[str]:
    """The messages after which a run did not use the compute unit that it names."""
    return [line for line in messages if INVALIDATING.search(line)]


def _messages(lines: list[str]) -> list[str]:
    """Core ML's lines, each once, at most `MESSAGES`; those that invalidate a run come
    first."""
    messages = list(dict.fromkeys(filter(CORE_ML_MESSAGE.search, lines)))
    messages.sort(key=lambda line: INVALIDATING.search(line) is None)
    return messages[:MESSAGES]


def _lines(stderr: bytes) -> list[str]:
    return stderr.decode(errors="replace").splitlines()


def _serve() -> None:
    """The child: reads one job from stdin and writes one reply to the original stdout;
    other prints go to stderr. It ends with its caller, which holds stdin open."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        with uncollected():
            function, args = pickle.load(sys.stdin.buffer)
            threading.Thread(
                target=lambda: (os.read(0, 1), os._exit(3)), daemon=True
            ).start()
            outcome = {"value": function(*args)}
    except InputError as problem:
        outcome = {"failure": str(problem)}
    replies.write(pickle.dumps(outcome))
    replies.flush()
    os._exit(0)  # skips exit handlers of libraries, which could fail a finished call


if __name__ == "__main__":
    _serve()
