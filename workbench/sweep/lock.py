"""One measurement of a log at a time on a machine: two at once would share its cores,
and both would measure the same cells."""

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
_BUSY = InputError("log", "another measurement", "none", "wait for it")
_announced: set[Path] = set()
"""Locks of which this process has said that it waits for them."""


@contextmanager
def measuring_alone(root: Path, stop: threading.Event | None = None) -> Iterator[None]:
    """Holds the lock of this machine on the log at `root`; waits for another process,
    or another thread, that holds it, and says so in one line on stderr.

    The system frees the lock of a process that ends, however it ends. The file has a
    name of its own for every machine, since file systems differ in whether a lock holds
    on other machines; the name does not tell the machine's.

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
                print(_waiting(path), file=sys.stderr, flush=True)
            if stop.wait(POLL_S):
                raise process.Cancelled
        path.write_text(json.dumps(_this_process()))
        yield


def _this_process() -> dict:
    started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    return {"pid": os.getpid(), "started": f"{started:%Y-%m-%d %H:%M:%S} UTC"}


def _waiting(path: Path) -> str:
    """The line that names the process that holds a lock."""
    try:
        holder = json.loads(path.read_text())
        who = f"process {holder['pid']}, started {holder['started']},"
    except (OSError, ValueError, KeyError, TypeError):  # it is writing the file
        who = "another process"
    return (
        f"workbench: {who} measures into the same log {path.parent}; this one waits for "
        "each of its cells, and measures those that the log then lacks"
    )
