"""Calls one function in a process of its own; a crash is a reason in words.

A child starts with modules imported and nothing loaded, compiled or warmed up. It ends
when its caller does, at the latest. Imports take seconds, so a server, which is another
process, makes them once and forks for every call. It runs no call itself and no threads,
and waits for the next call as long as its caller lives. macOS' frameworks do not survive
a fork; there a server becomes the child of its only call.

How a call goes: `call` pickles the function and its arguments into a folder, takes a
server that waits or starts one (`_server`), and prints the folder to its stdin. The
server (`serve`) forks, and the child (`_run`) pickles the result into the same folder.
When the child has ended, the server prints one line, `Exited` or `ForkRefused`, which
`call` reads.

multiprocessing's fork server is not used. It imports the caller's main module into each
child, so that a script without a guard would run again; it has one environment for
all children, though OpenMP reads its number of threads there; and nothing ends its
children when their caller is killed.
"""

import atexit
import errno
import importlib
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from miltorch.coremltools_import import coremltools, without_gc
from workbench.core_ml_log import is_invalidating, select_messages
from workbench.errors import InputError, is_full_disk, last_message

CAN_FORK = sys.platform != "darwin"
# Modules that most calls import when they need them. A server imports them before its second
# call, for this call and all later ones; a server of a single call may need none.
LATE_IMPORTS = "pandas", "transformers.modeling_utils"
STDERR_LINES = 20  # from the end of a failed child's stderr, in an `Outcome`
CALLER_ENDED = 3  # exit code of a server or a child whose caller ended before it
# A child imports what its caller would and nothing more. It is not started by `python
# -m`, which puts the working folder first on sys.path: a random.py there would replace
# Python's.
SERVE = (
    "import sys; sys.path[:] = {path!r}; from workbench import process; process.serve()"
)
POLL_S = 0.2
"""Seconds between two looks whether a call is late or cancelled."""


class Files(NamedTuple):
    """The files of one call."""

    job: Path
    """The pickled function and its arguments."""
    reply: Path
    """The pickled `Outcome`, without `lines`, or the error of a full disk; absent where the
    child died."""
    stderr: Path

    @classmethod
    def of(cls, folder: Path) -> "Files":
        return cls(*(folder / name for name in cls._fields))


@dataclass(frozen=True)
class Exited:
    """A server's answer: its child ended with an exit code, which is negative where a
    signal killed it."""

    code: int


@dataclass(frozen=True)
class ForkRefused:
    """A server's answer: the system refused a child."""

    errno: int


@dataclass(frozen=True)
class Server:
    """A process that waits for calls, with the code and the environment that it was
    started with; children of other ones need another server."""

    code: str
    environment: dict[str, str]
    process: subprocess.Popen

    def run(self, folder: str) -> Exited | ForkRefused:
        """Runs the call whose files are in a folder, and waits for its end."""
        with suppress(BrokenPipeError):  # the server has ended
            print(folder, file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return _parse_answer(answer)
        # A server that has ended gives no answer. On a Mac it was the child itself, and
        # its own exit code counts.
        return Exited(self.process.wait())

    def end(self) -> None:
        """Closes the server's stdin, at which it ends, and waits for it."""
        self.process.communicate()

    def kill(self) -> None:
        """Kills the server and its child, which are one group of processes."""
        with suppress(ProcessLookupError, PermissionError):  # they have ended
            os.killpg(self.process.pid, signal.SIGKILL)


def _format_answer(answer: Exited | ForkRefused) -> str:
    """The line of an answer: `exited 0` or `refused 11`."""
    match answer:
        case Exited(code):
            return f"exited {code}"
        case ForkRefused(number):
            return f"refused {number}"


def _parse_answer(line: str) -> Exited | ForkRefused:
    """The reverse of `_format_answer`."""
    word, number = line.split()
    return {"exited": Exited, "refused": ForkRefused}[word](int(number))


_idle: list[Server] = []


@atexit.register
def _end_idle() -> None:
    for server in _idle:
        server.end()


class Cancelled(BaseException):
    """The event `stop` of a call was set, and its child was killed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    value: object = None
    failure: str | None = None
    """The reason why there is no value."""
    lines: tuple[str, ...] = ()
    """Core ML's messages and, for a child that died, the end of stderr."""

    @property
    def invalid_reason(self) -> str | None:
        """Core ML's first message which says that the named compute unit was not used;
        None without one."""
        return next(filter(is_invalidating, self.lines), None)


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
        stop: an event; once it is set, the child is killed within `POLL_S`.

    Raises:
        Cancelled: `stop` was set.
        OSError: the system refused a process.
        InputError, OSError: a disk is full: the child's own error, since no later call
            would find room either.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + (timeout_s or math.inf)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PWD": os.getcwd()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        files = Files.of(Path(folder))
        files.job.write_bytes(pickle.dumps((function, args)))
        server = stack.enter_context(_server(environment, files.stderr))
        answer = _run_until(deadline, stop, server, folder)
        if stop.is_set():
            raise Cancelled
        if isinstance(answer, ForkRefused):
            raise OSError(answer.errno, os.strerror(answer.errno))
        is_late = time.monotonic() >= deadline
        if is_late:
            server.kill()
            server.process.wait()
        written = files.stderr.read_bytes() if files.stderr.exists() else b""
        stderr = written.decode(errors="replace").splitlines()
        if answer.code == 0:
            reply: Outcome | Exception = pickle.loads(files.reply.read_bytes())
            if isinstance(reply, Exception):
                raise reply
            return replace(reply, lines=tuple(select_messages(stderr)))
    if is_late:
        failure = f"no answer in {timeout_s} s"
    else:
        failure = _failure(answer.code, stderr)
    lines = dict.fromkeys([*select_messages(stderr), *stderr[-STDERR_LINES:]])
    return Outcome(failure=failure, lines=tuple(lines))


def _failure(code: int, stderr: list[str]) -> str:
    """Why a child ended with an exit code other than 0, in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}: {last_message(stderr)}"


def _run_until(
    deadline: float, stop: threading.Event, server: Server, folder: str
) -> Exited | ForkRefused:
    """`server.run(folder)`, and a thread beside it that kills the server when `stop` is set or
    the deadline is over."""
    has_ended = threading.Event()
    arguments = server, stop, deadline, has_ended
    threading.Thread(target=_kill_in_time, args=arguments, daemon=True).start()
    try:
        return server.run(folder)
    finally:
        has_ended.set()


def _kill_in_time(
    server: Server, stop: threading.Event, deadline: float, has_ended: threading.Event
) -> None:
    """Kills a server that has not ended when `stop` is set or the deadline is over.
    Returns when it is killed or has ended."""
    while not has_ended.wait(POLL_S):
        if stop.is_set() or time.monotonic() >= deadline:
            server.kill()
            return


@contextmanager
def _server(environment: dict[str, str], stderr: Path) -> Iterator[Server]:
    """A server with an environment: one that waits, or a new one, which writes to the
    file `stderr` until it reads its first call. It is killed with its child if the
    block raises."""
    code = SERVE.format(path=[p for p in sys.path if isinstance(p, str)])
    server = None
    while _idle and server is None:
        server = _idle.pop()
        fits = server.code == code and server.environment == environment
        if not fits or server.process.poll() is not None:
            server.end()
            server = None
    if server is None:
        server = _start_server(code, environment, stderr)
    is_reusable = False
    try:
        yield server
        # it waits for its next call
        is_reusable = server.process.poll() is None
    finally:
        if is_reusable:
            _idle.append(server)
        else:
            server.kill()
            server.end()


def _start_server(code: str, environment: dict[str, str], stderr: Path) -> Server:
    with stderr.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            # an interrupt reaches the caller alone, which ends its children
            process_group=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    return Server(code, environment, process)


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


# in a server


def serve() -> None:
    """Reads folders of calls from stdin and answers each on the original stdout.
    Everything else that is printed goes to stderr, which is a file of the call."""
    answers = os.fdopen(os.dup(1), "w")
    if CAN_FORK:
        _serve_by_fork(answers)
    else:
        _serve_once(answers)


def _serve_by_fork(answers: TextIO) -> None:
    """Runs each call in a child."""
    for count, files in enumerate(_calls()):
        # the first call may be the only one, and need none of these modules
        if count:
            _import_late()
        try:
            child = os.fork()
        except OSError as problem:
            answer = ForkRefused(problem.errno)
        else:
            if not child:
                answers.close()  # the caller reads until the last holder has ended
                _run(files)
            answer = Exited(os.waitstatus_to_exitcode(_wait(child)))
        print(_format_answer(answer), file=answers, flush=True)


def _serve_once(answers: TextIO) -> None:
    """Becomes the child of the first call, whose exit code is the answer."""
    for files in _calls():
        answers.close()
        _run(files)


def _calls() -> Iterator[Files]:
    """The files of each call that the caller names on stdin, after the modules that its
    job names are imported. Output goes to the call's stderr from then on."""
    for line in sys.stdin:
        files = Files.of(Path(line.rstrip("\n")))
        with files.stderr.open("a+b") as file:
            os.dup2(file.fileno(), 2)
        os.dup2(2, 1)
        with without_gc():
            pickle.loads(files.job.read_bytes())
        yield files


def _wait(child: int) -> int:
    """The status of a child that has ended. If the caller ends first, which holds stdin
    open, the child is killed and this server ends: a native call may hold the thread of
    the child that would notice the caller's end (see `_end_with_caller`)."""
    try:
        descriptor = os.pidfd_open(child)
    except OSError:  # Linux before 5.3, or a sandbox without it
        return os.waitpid(child, 0)[1]
    try:
        ready, _, _ = select.select([0, descriptor], [], [])
        if descriptor not in ready:
            os.kill(child, signal.SIGKILL)
            os._exit(CALLER_ENDED)
    finally:
        os.close(descriptor)
    return os.waitpid(child, 0)[1]


@without_gc()
def _import_late() -> None:
    coremltools()
    for name in LATE_IMPORTS:
        importlib.import_module(name)


@without_gc()
def _run(files: Files) -> NoReturn:
    """Runs a call and ends this process, the child: writes the call's value, the message of
    its InputError, or the error of a full disk. Any other error ends the child with a
    traceback on stderr."""
    function, args = pickle.loads(files.job.read_bytes())
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        reply = Outcome(function(*args))
    except Exception as problem:
        if is_full_disk(problem):
            reply = _sendable(problem)
        elif isinstance(problem, InputError):
            reply = Outcome(failure=str(problem))
        else:
            raise
    files.reply.write_bytes(pickle.dumps(reply))
    os._exit(0)  # skips exit handlers of libraries, which could fail a finished call


def _end_with_caller() -> None:
    """Ends this process once stdin ends, which the caller holds open."""
    os.read(0, 1)
    os._exit(CALLER_ENDED)


def _sendable(problem: Exception) -> Exception:
    """The error of a full disk as one that can be pickled: a library's own type may have
    other arguments than its message."""
    if isinstance(problem, InputError) or type(problem) is OSError:
        return problem
    return OSError(errno.ENOSPC, str(problem))
