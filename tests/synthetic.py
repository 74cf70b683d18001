"""Log rows of sweeps that never ran, for machines, checkpoints and settings that a test chooses."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pandas as pd

from workbench import exporter, log, sweep

SLOW_NAME, FAST_NAME = (
    "Apple M1, MacBookAir10,1, 8 GiB, 8 cores",
    "Apple M1, Mac16,5, 64 GiB, 8 cores",
)
SLOW = {"machine": SLOW_NAME, "software": "24B83, coremltools 9.0, torch 2.13.0"}
FAST = SLOW | {"machine": FAST_NAME}
"""A machine with the chip and the software of SLOW, but of another model and memory."""
LAYER_SHARE = 0.25
"""The logged time of each of the two layers, as a share of the time of a call."""


def add(
    root: Path,
    grid: dict,
    machine: dict,
    call_ms,
    checkpoint_hash: str,
    runtime: str = "portable",
    **columns,
) -> None:
    """Logs every cell of a grid, as a sweep on a machine would. Rows that a later call of `add` logs
    are newer.

    Args:
        machine: the columns that say where a run was, such as SLOW.
        call_ms: function of a cell's options and run that gives the time of a call in ms.
        columns: further columns of every row of `runs`.
    """
    plan = sweep.make_grid(grid)
    for cell in sweep.cells(plan, root, [runtime]):
        hashes = dict.fromkeys(("checkpoint_hash", "contents_hash"), checkpoint_hash)
        cell = replace(cell, source=replace(cell.source, **hashes))
        ms, T = call_ms(cell.options, cell.run), cell.run.T
        sizes = {name: getattr(cell.run, name) for name in ("T", "depth", "n_gen")}
        times = pd.DataFrame(
            [("call", ms, "ms"), ("tokens_per_s", 1e3 * T / ms, "tok/s")],
            columns=["phase", "value", "unit"],
        )
        layer_ms = ms * LAYER_SHARE
        layers = pd.DataFrame({"layer": [0, 1], "layer_ms": layer_ms, "n": 3, "T": T})
        places = product(range(2), range(len(cell.validate_ids)), plan.run.T)
        fidelity = pd.DataFrame(places, columns=["layer", "position", "T"])
        values = {"tensor": "update", "mode": "isolated", "runtime": runtime}
        values |= {"cosine": 0.99, "psnr_db": 60.0, "max_abs": 0.01, "finite": True}
        name = cell.source.name
        bundle = exporter.bundle_name(name, checkpoint_hash, cell.options)
        row = cell.columns() | {
            "checkpoint": name,
            "checkpoint_hash": checkpoint_hash,
            "bundle": bundle,
            "bundle_hash": bundle,
            "verdict": "GREEN" if cell.validate_ids else None,
        }
        with mock.patch("workbench.log.runs.environment", lambda: machine):
            log.record(
                row | columns,
                root,
                samples=times.assign(warmup=False, repetition=0, order=0, **sizes),
                layers=layers.assign(depth=cell.run.depth),
                fidelity=fidelity.assign(**values, precision=row["precision"]),
            )
