"""One function call in a fresh Python process: JSON in, JSON out, and a crash there is an answer here.

A child starts with nothing loaded, compiled or warmed up, takes no caller down with it, and ends when its caller does.
Knows nothing of what it runs.
"""

import importlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass

from workbench.errors import InputError, last_message

TAIL = 20  # last lines of a failed child's stderr that are kept
TELLING = re.compile(r"ANECCompile\(\) FAILED|MILCompilerForANE error|Error compiling model|Error Domain=com\.apple")


@dataclass(frozen=True)
class Outcome:
    """What came of a call: `value`, or the reason why there is none and the lines of stderr that tell most."""

    value: object = None
    failure: str | None = None
    lines: tuple[str, ...] = ()


def call(function: str, argument: dict, *, threads: int = 1, timeout_s: float | None = None) -> Outcome:
    """Calls `function` ("module:name") with `argument` in a process of its own.

    Args:
        threads: OpenMP threads of the child, whatever the caller's environment says.
        timeout_s: seconds after which the child is killed, which is a failure.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen([sys.executable, "-m", "workbench.sweep.process", function], env=environment, stderr=errors,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        late = threading.Event()
        clock = threading.Timer(timeout_s or threading.TIMEOUT_MAX, lambda: (late.set(), child.kill()))
        clock.daemon = True
        clock.start()
        try:
            answer = _ask(child, argument)
            code = child.wait()
        finally:  # on any way out: no child is left behind
            clock.cancel()
            child.kill()
            child.communicate()
        errors.seek(0)
        written = errors.read().decode(errors="replace").splitlines()
    telling = [line for line in written if TELLING.search(line)]
    if answer:
        found = json.loads(answer)
        return Outcome(
            found.get("value"),
            found.get("refused"),
            tuple(dict.fromkeys(telling)) if "refused" in found else (),
        )
    lines = dict.fromkeys([*telling, *written[-TAIL:]])
    return Outcome(None, f"no answer in {timeout_s} s" if late.is_set() else _death(code, written), tuple(lines))


def _ask(child: subprocess.Popen, argument: dict) -> bytes:
    """Sends the argument and waits for the answer; stdin stays open, since its end tells the child that we are gone."""
    try:
        child.stdin.write(json.dumps(argument).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:  # it died before it could read
        pass
    return child.stdout.read()


def compiler_errors() -> list[str]:
    """In a child: the telling lines on its stderr so far. Core ML reports a failed compilation there and goes on."""
    if not stat.S_ISREG(os.fstat(2).st_mode):
        return []
    written = os.pread(2, os.fstat(2).st_size, 0).decode(errors="replace")
    return [line for line in written.splitlines() if TELLING.search(line)]


def _death(code: int, written: list[str]) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {last_message(written)}"


def _serve(function: str) -> None:
    """The child: one argument from stdin, one answer to the stdout it was given; whatever else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    argument = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(3)), daemon=True).start()
    module, name = function.split(":")
    try:
        found = {"value": getattr(importlib.import_module(module), name)(argument)}
    except InputError as problem:
        found = {"refused": str(problem)}
    answers.write(json.dumps(found))
    answers.flush()
    os._exit(0)  # nothing that a library does at exit can turn a finished call into a failed one


if __name__ == "__main__":
    _serve(sys.argv[1])
