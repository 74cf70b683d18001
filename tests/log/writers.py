"""Sixteen processes that write runs until each is killed at a moment of its own: `python writers.py
LOG RUNS SEED`.

Every writer notes each run in its own file after writing it. Forked from one process, before Arrow
starts any thread.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from workbench import log

WRITERS, ROWS = 16, 64


def write(root: Path, notes: Path, runs: int) -> None:
    with notes.open("w") as file:
        for i in range(runs):
            run = log.new_run_id()
            log.append("layers", [{"layer": n, "n": i} for n in range(ROWS)], root, run)
            file.write(f"{run}\n")
            file.flush()


def main(root: Path, runs: int, seed: int) -> None:
    rng, goals = random.Random(seed), {}
    for i in range(WRITERS):
        notes = root.parent / f"notes-{i}"
        pid = os.fork()
        if pid == 0:
            write(root, notes, runs)
            os._exit(0)
        goals[pid] = notes, rng.randrange(1, runs)
    killed = 0
    while goals:
        for pid, (notes, goal) in list(goals.items()):
            if notes.exists() and notes.read_text().count("\n") >= goal:
                time.sleep(rng.random() * 0.003)
                os.kill(pid, signal.SIGKILL)
                killed += (
                    os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
                )
                del goals[pid]
        time.sleep(0.002)
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
