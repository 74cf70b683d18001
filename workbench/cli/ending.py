"""The end of a command: every error is one message on stderr with its exit code, and with
`--json` a refusal is one JSON object on stdout as well.

0: what was asked holds; 1: a faulty export (RED); 2: bad input, or a system that refuses
(a full disk, no permission, no memory); 3: a run that crashed or was cut short (a
cell, a kernel, a unit's process, a fault of the workbench); 4: an export that is not RED
and costs more than the user's limit (OVER); 130: interrupted; 141: the reader of stdout
has closed it."""

import errno
import json
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

from workbench.errors import RUST_ERROR, CellError, InputError, one_line, visible
from workbench.progress import end_stage

RED, REFUSED, UNFINISHED, OVER = 1, 2, 3, 4
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE


class Remedy(NamedTuple):
    """The last two parts of an `InputError`."""

    needed: str
    step: str


class Ending(NamedTuple):
    """The end of a command that raised an error."""

    code: int
    message: str
    """For stderr; empty: nobody would read it."""


ROOM = Remedy("room on the disk", "free some, then repeat the command")
ALLOWED = Remedy("a file that this user may read and write", "name another one")
PROCESSES = Remedy("one more process", "end others, or raise the limit (ulimit -u)")
FILES = Remedy("one more open file", "raise the limit (ulimit -n)")
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EACCES: ALLOWED,
    errno.EPERM: ALLOWED,
    errno.EROFS: ALLOWED,
    errno.EAGAIN: PROCESSES,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENAMETOOLONG: Remedy("a shorter path", "name another one"),
    errno.ENOENT: Remedy("a file that is there", "correct the path"),
}
OTHER_REMEDY = Remedy("a file or device that works", "repair it, or name another one")
MEMORY = Remedy("more memory", "end other processes, or choose a smaller model")
# torch and the threading module have no type of their own for these
NO_MEMORY = re.compile("can't allocate memory|not enough memory")
NO_THREAD = re.compile("can't start new thread")
NESTED_READERS = re.compile(r"[/\\](json|yaml)[/\\]")


def end(command: Callable[[], None]) -> None:
    """Runs a command and ends the process with its exit code."""
    with _counted_interrupts() as interrupts:
        try:
            try:
                command()
            finally:  # a full disk or a closed pipe may show only here
                sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException as problem:
            # a library that is interrupted may raise an error of its own in place of it
            cause = KeyboardInterrupt() if interrupts else problem
            _end_with(cause, getattr(problem, "__notes__", ()))


def _end_with(problem: BaseException, notes: Iterable[str]) -> NoReturn:
    """Prints what a command says that raised `problem`, and ends the process."""
    end_stage()
    code, message = describe(problem)
    refusal = as_refusal(problem) if code == REFUSED else None
    if isinstance(refusal, InputError) and "--json" in sys.argv[1:]:
        with suppress(OSError):
            print(json.dumps({"error": refusal_json(refusal)}))
    _discard(sys.stdout)
    if message:
        with suppress(OSError):
            print(
                *(f"workbench: {visible(line)}" for line in (message, *notes)),
                sep="\n",
                file=sys.stderr,
            )
    _discard(sys.stderr)
    sys.exit(code)


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Context manager that gives a list, which has an entry for every Ctrl-C. Each still
    raises KeyboardInterrupt."""
    interrupts: list[int] = []

    def interrupt(number: int, frame) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    # a caller may ignore the signal, as `nohup` does, or handle it
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def refusal_json(refusal: InputError) -> dict[str, str]:
    """The four parts of a refusal, which its message has in one sentence, as JSON."""
    return {
        "subject": refusal.subject,
        "found": refusal.actual,
        "needed": refusal.needed,
        "next": refusal.next_step,
    }


def verdict_code(verdict: str | None, quality: str | None) -> int:
    """The exit code of a result with these words."""
    if verdict == "RED":
        return RED
    if verdict == "DIED":
        return UNFINISHED
    return OVER if quality == "OVER" else 0


def describe(problem: BaseException) -> Ending:
    """The end of a command that raised `problem`."""
    if isinstance(problem, KeyboardInterrupt):
        return Ending(INTERRUPTED, "interrupted")
    if isinstance(problem, CellError):
        return Ending(UNFINISHED, str(problem))
    if isinstance(problem, BrokenPipeError):
        return Ending(CLOSED_PIPE, "")
    if refusal := as_refusal(problem):
        return Ending(REFUSED, str(refusal))
    return Ending(UNFINISHED, _report_fault(problem))


def as_refusal(problem: BaseException) -> Exception | None:
    """The error as a refusal of an input or of the system; None for a fault of the
    workbench."""
    if isinstance(problem, InputError) or type(problem).__module__.startswith(
        "cyclopts"
    ):
        return problem
    text = one_line(problem)
    if isinstance(problem, MemoryError) or NO_MEMORY.search(text):
        return InputError("memory", text or "no more of it", *MEMORY)
    if NO_THREAD.search(text):
        return InputError("system", text, *PROCESSES)
    if isinstance(problem, RecursionError) and _reads_nested(problem):
        step = "correct the file or value"
        return InputError("input", "too many nested levels", "JSON or YAML", step)
    if rust := RUST_ERROR.search(text):
        problem = OSError(int(rust[1]), os.strerror(int(rust[1])))
    if isinstance(problem, OSError):
        subject = str(problem.filename or "file or output")
        if len(subject) > 200:
            subject = f"{subject[:80]}…{subject[-20:]}"
        actual = problem.strerror or text or type(problem).__name__
        return InputError(subject, actual, *REMEDIES.get(problem.errno, OTHER_REMEDY))
    return None


def _reads_nested(problem: RecursionError) -> bool:
    """Whether the reader of a file in JSON or YAML raised it."""
    *_, (frame, _) = traceback.walk_tb(problem.__traceback__)
    return bool(NESTED_READERS.search(frame.f_code.co_filename))


def _report_fault(problem: BaseException) -> str:
    """Writes the traceback into a file, and returns a message that names the file."""
    kind = type(problem).__name__
    message = f"a fault of the workbench: {kind}: {one_line(problem)}"
    text = "".join(traceback.format_exception(problem))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "workbench-fault-")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{sys.argv}\n{text}")
    except OSError as refusal:
        return f"{message} (its traceback could not be written: {refusal.strerror})"
    return f"{message} (traceback: {path})"


def _discard(stream) -> None:
    """Flushes a stream and, if that fails, drops what is left in it. Python would write the
    rest once more as it exits, fail again, and change the exit code to 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
