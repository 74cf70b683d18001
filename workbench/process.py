"""Calls one function in a process of its own; a crash is a reason in words.

A child starts with modules imported and nothing loaded, compiled or warmed up, and ends
when its caller does. Imports take seconds, so a server of this module makes them once
and is forked for every call. It runs no call itself, and no threads, and waits for the
next call as long as its caller lives. macOS' frameworks do not survive a fork; there a
server becomes the child of its only call.
"""

import atexit
import errno
import importlib
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from miltorch.quiet import coremltools, uncollected
from workbench.errors import InputError, is_full_disk, last_message

FORKS = sys.platform != "darwin"
# what most calls import late; a server imports them for its second call
LATE = "pandas", "transformers.modeling_utils"
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
NO_FORK = (
    1000  # and the errno of a fork that the system refused: the answer of a server
)
FILES = "job", "reply", "stderr"  # in the folder of a call
# a child imports what its caller would and nothing more: `python -m` would put the
# working folder first, whose random.py would stand for Python's own
SERVE = (
    "import sys; sys.path[:] = {path!r}; from workbench import process; process.serve()"
)
# servers that wait for a call, each with its code and environment
_idle: list[tuple[tuple[str, dict[str, str]], subprocess.Popen]] = []


@atexit.register
def _end_idle() -> None:
    for _, server in _idle:
        server.communicate()  # the end of its stdin ends it


class Cancelled(BaseException):
    """The event `stop` of a call was set, and its child was killed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its `value`, or `failure`, the reason why there is none;
    `lines` are Core ML's messages and, of a child that died, the end of stderr."""

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
    """Calls `function(*args)` of an importable module in a process of its own.

    Args:
        threads: OpenMP threads of the child; the caller's environment is overridden.
        timeout_s: seconds after which the child is killed, which counts as a failure.
        stop: an event; once it is set, the child is killed within 0.2 s.

    Raises:
        Cancelled: `stop` was set.
        OSError: the system refused a process.
        InputError, OSError: a disk is full: the child's own error, since no later call
            would find room either.
    """
    stop, over = stop or threading.Event(), threading.Event()
    deadline = time.monotonic() + (timeout_s or math.inf)

    def kill_in_time() -> None:
        while not over.wait(0.2):
            if stop.is_set() or time.monotonic() >= deadline:
                return _kill(server)

    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PWD": os.getcwd()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        job, reply, errors = (Path(folder, name) for name in FILES)
        job.write_bytes(pickle.dumps((function, args)))
        server = stack.enter_context(_server(environment, errors))
        threading.Thread(target=kill_in_time, daemon=True).start()
        try:
            with suppress(BrokenPipeError):  # the server has ended
                print(folder, file=server.stdin, flush=True)
            # no answer: the server has ended, which on a Mac is the child
            code = int(server.stdout.readline() or server.wait())
        finally:
            over.set()
        if stop.is_set():
            raise Cancelled
        if code >= NO_FORK:
            raise OSError(code - NO_FORK, os.strerror(code - NO_FORK))
        if late := time.monotonic() >= deadline:
            _kill(server)
            server.wait()
        lines = _lines(errors.read_bytes() if errors.exists() else b"")
        if code == 0:
            outcome = pickle.loads(reply.read_bytes())
            if problem := outcome.get("full_disk"):
                raise problem
            return Outcome(**outcome, lines=tuple(_messages(lines)))
    failure = f"exit code {code}: {last_message(lines)}"
    if late:
        failure = f"no answer in {timeout_s} s"
    elif code < 0:
        failure = f"killed by {signal.Signals(-code).name}"
    notes = dict.fromkeys([*_messages(lines), *lines[-TAIL:]])
    return Outcome(failure=failure, lines=tuple(notes))


def _kill(server: subprocess.Popen) -> None:
    """Kills a server and its child, which are one group of processes."""
    with suppress(ProcessLookupError, PermissionError):  # they have ended
        os.killpg(server.pid, signal.SIGKILL)


@contextmanager
def _server(environment: dict[str, str], errors: Path) -> Iterator[subprocess.Popen]:
    """A server of the environment that waits for a call, or a new one, which writes to
    the file `errors` before it reads a call; it is killed with its child if the block
    raises."""
    server = None
    setting = (
        SERVE.format(path=[p for p in sys.path if isinstance(p, str)]),
        environment,
    )
    while _idle and server is None:
        its_setting, server = _idle.pop()
        if its_setting != setting or server.poll() is not None:
            server.communicate()
            server = None
    if server is None:
        with errors.open("ab") as file:
            server = subprocess.Popen(
                [sys.executable, "-c", setting[0]],
                env=environment,
                process_group=0,  # an interrupt is the caller's, which ends its children
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
    waits = False
    try:
        yield server
        waits = server.poll() is None
    finally:
        if waits:
            _idle.append((setting, server))
        else:
            _kill(server)
            server.communicate()


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


def invalidating(outcome: Outcome) -> str | None:
    """The first message of a call after which it did not use the compute unit that it
    names: Core ML reports a failed compilation and goes on."""
    return next(filter(INVALIDATING.search, outcome.lines), None)


def _messages(lines: list[str]) -> list[str]:
    """Core ML's lines, each once, at most `MESSAGES`; those that invalidate a run come
    first."""
    messages = list(dict.fromkeys(filter(CORE_ML_MESSAGE.search, lines)))
    messages.sort(key=lambda line: INVALIDATING.search(line) is None)
    return messages[:MESSAGES]


def _lines(stderr: bytes) -> list[str]:
    return stderr.decode(errors="replace").splitlines()


def serve() -> None:
    """The server: reads folders of calls from stdin, forks a child for each, and writes
    its exit code to the original stdout. Other prints go to stderr, which is the call's
    file."""
    answers = os.fdopen(os.dup(1), "w")
    for count, line in enumerate(sys.stdin):
        folder = Path(line.rstrip("\n"))
        job, reply, errors = (folder / name for name in FILES)
        with errors.open("a+b") as file:
            os.dup2(file.fileno(), 2)
        os.dup2(2, 1)
        with uncollected():
            pickle.loads(job.read_bytes())  # imports what it names
        if FORKS and count:
            _import_late()
        try:
            child = os.fork() if FORKS else 0
        except OSError as problem:
            print(NO_FORK + problem.errno, file=answers, flush=True)
            continue
        if not child:
            answers.close()  # the caller reads until the last holder has ended
            _run(job, reply)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


@uncollected()
def _import_late() -> None:
    coremltools()
    for name in LATE:
        importlib.import_module(name)


@uncollected()
def _run(job: Path, reply: Path) -> None:
    """The child: writes what a call returns, why it was refused, or the error of a full
    disk, and ends. Another error ends it with a traceback on stderr. It ends
    with its caller, too, which holds stdin open."""
    function, args = pickle.loads(job.read_bytes())
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(3)), daemon=True).start()
    try:
        outcome = {"value": function(*args)}
    except Exception as problem:
        if is_full_disk(problem):
            outcome = {"full_disk": _sendable(problem)}
        elif isinstance(problem, InputError):
            outcome = {"failure": str(problem)}
        else:
            raise
    reply.write_bytes(pickle.dumps(outcome))
    os._exit(0)  # skips exit handlers of libraries, which could fail a finished call


def _sendable(problem: Exception) -> Exception:
    """The error of a full disk as one that can be pickled: a library's own type may have
    other arguments than its message."""
    if isinstance(problem, InputError) or type(problem) is OSError:
        return problem
    return OSError(errno.ENOSPC, str(problem))
