"""Kills exports at random moments, with SIGKILL, and runs each again: `python -m tests.exporter.kills
CHECKPOINT FOLDER 30` does that 30 times.

Every export is a forked child of this process, so that no time goes into imports. Fails unless every
export that is run again writes the bytes of an undisturbed one and leaves nothing beside them.
"""

import multiprocessing
import random
import shutil
import sys
import time
import warnings
from pathlib import Path

from workbench.bundle import Bundle
from workbench.exporter import export

OPTIONS = {"max_seq_len": 16, "compress": "int8-tensor"}


def start_export(source: Path, target: Path) -> multiprocessing.Process:
    """Starts a process that exports."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=export, args=(source, target), kwargs=OPTIONS)
    process.start()
    return process


def main(source: Path, folder: Path, kills: int) -> None:
    warnings.simplefilter("ignore")
    # an export in this process imports what its forks need
    expected = export(source, folder / "first", **OPTIONS).identity
    start = time.perf_counter()
    start_export(source, folder / "whole").join()
    seconds = time.perf_counter() - start
    for i in range(kills):
        target, after = folder / f"b{i}", random.uniform(0, seconds)
        process = start_export(source, target)
        time.sleep(after)
        process.kill()
        process.join()
        # the bundle may have been in place already when the process was killed
        if not target.exists():
            start_export(source, target).join()
        assert Bundle.open(target).identity == expected, f"killed after {after} s"
        assert not list(folder.glob(".*.partial"))
        shutil.rmtree(target)


if __name__ == "__main__":
    source, folder, kills = sys.argv[1:]
    main(Path(source), Path(folder), int(kills))
