"""What the tests of clusters run on workers; light, since every worker that starts again imports
it."""

import json
import os
import signal
import sys
import time


def interval(job: dict) -> dict[str, bytes]:
    start = time.time()
    time.sleep(0.1)
    return {"answer": json.dumps([os.getpid(), start, time.time()]).encode()}


def dies(job: dict) -> dict[str, bytes]:
    """Kills its worker, the first job on its first `deaths` attempts."""
    if job["index"] == 0 and job["attempt"] <= job["deaths"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"answer": b"[]"}


def start_children_with(python: str) -> None:
    sys.executable = python
