"""One measurement of a log at a time on a machine. Two at once would share its cores,
and would measure the same cells."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil

from workbench import process
from workbench.errors import InputError
from workbench.files import locked
from workbench.sweep.identity import digest

POLL_S = 0.2
_BUSY = InputError(
    "log", "another measurement into it", "one at a time", "wait until it ends"
)
_announced: set[Path] = set()
"""The locks for which this process has already said that it waits."""


@contextmanager
def measuring_alone(root: Path, stop: threading.Event | None = None) -> Iterator[None]:
    """Holds this machine's lock on the log at `root`. While another process or thread
    holds it, this one waits and says so in one line on stderr.

    The system frees the lock of a process that ends, however it ends. Every machine has
    a lock file of its own, since file systems differ in whether a lock holds on other
    machines; the file's name contains a hash of the machine's name.

    Raises:
        process.Cancelled: `stop` was set while it waited.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".measuring-{digest(socket.gethostname())}"
    stop = stop or threading.Event()
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(path, _BUSY))
                break
            except InputError as problem:
                if problem is not _BUSY:
                    raise
            if path not in _announced:
                _announced.add(path)
                print(_describe_waiting(path), file=sys.stderr, flush=True)
            if stop.wait(POLL_S):
                raise process.Cancelled
        path.write_text(json.dumps(_this_process()))
        yield


def _this_process() -> dict:
    started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    return {"pid": os.getpid(), "started": f"{started:%Y-%m-%d %H:%M:%S} UTC"}


def _describe_waiting(path: Path) -> str:
    """The line that names the process that holds the lock."""
    try:
        holder = json.loads(path.read_text())
        name = f"process {holder['pid']}, started {holder['started']},"
    except (OSError, ValueError, KeyError, TypeError):  # the holder is writing the file
        name = "another process"
    return (
        f"workbench: {name} measures into the same log {path.parent}; this process "
        "waits before each of its cells, and then measures those that the log lacks"
    )
