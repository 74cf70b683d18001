"""What loading a large log costs, against pandas reading the same folder; raw seconds, nothing judged."""

import time
from pathlib import Path
from statistics import median

import pandas as pd

from workbench.log import cache
from workbench.log.machine import environment
from workbench.log.store import append, load


def rows(root: Path, runs: int, rounds: int) -> list[dict]:
    """Rows of `workbench bench log`: `runs` loaded for the first time, and again; pandas' own reader is the peer.

    The first time reads every file, as the peer does each time; a later load reads the gathered rows.
    """
    here = environment() | {"status": "ok", "experiment": "bench", "command": "bench", "config": {"cell": "x" * 16}}
    for i in range(len(list((root / "runs").glob("*.parquet"))), runs):
        append("runs", here, root, f"run{i:06}")
    first, again, peer = [], [], []
    for _ in range(rounds):
        (root / "runs" / cache.NAME).unlink(missing_ok=True)
        first.append(_seconds(lambda: len(load("runs", root)) == runs))
        again.append(_seconds(lambda: len(load("runs", root)) == runs))
        peer.append(_seconds(lambda: len(pd.read_parquet(root / "runs")) == runs))
    return [_log_row(name, values, peer) for name, values in (("log_load_first", first), ("log_load", again))]


def _seconds(whole) -> float:
    start = time.perf_counter()
    assert whole()
    return time.perf_counter() - start


def _log_row(name: str, values: list[float], peer: list[float]) -> dict:
    return {"name": name, "value": median(values), "unit": "s", "peer": "pandas.read_parquet", "peer_value": median(peer),
            "ratio": median(peer) / median(values), "n": len(values), "samples": values, "peer_samples": peer}  # fmt: skip
