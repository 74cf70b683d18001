"""What loading a large log costs, against pandas reading the same folder."""

from functools import partial
from pathlib import Path

import pandas as pd

from workbench.benchmarks.stopwatch import bench_row, in_turn, seconds
from workbench.log import cache
from workbench.log.machine import environment
from workbench.log.store import append, load


def rows(root: Path, runs: int, rounds: int) -> list[dict]:
    """Rows of `workbench bench log`: `runs` loaded for the first time, and again;
    pandas' own reader is the peer.

    The first time reads every file, as the peer does each time; a later load reads the
    gathered rows."""
    folder = root / "runs"
    row = environment() | {"status": "ok", "experiment": "bench", "command": "bench"}
    row["config"] = {"cell": "x" * 16}
    for i in range(len(list(folder.glob("*.parquet"))), runs):
        append("runs", row, root, f"run{i:06}")

    def load_log():
        assert len(load("runs", root)) == runs

    def load_peer():
        assert len(pd.read_parquet(folder)) == runs

    def first_load():
        (folder / cache.NAME).unlink(missing_ok=True)
        return seconds(load_log)

    samplers = {
        "log_load_first": first_load,
        "log_load": partial(seconds, load_log),
        "peer": partial(seconds, load_peer),
    }
    samples = in_turn(samplers, rounds)
    peer = "s", "pandas.read_parquet", samples.pop("peer")
    return [bench_row(name, values, *peer) for name, values in samples.items()]
