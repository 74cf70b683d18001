"""Rows of sweeps that never ran: the same cells on machines, checkpoints and settings that a test
chooses."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd

from workbench import export as exporting
from workbench import log, sweep
from workbench.log.runs import scalars

SLOW_NAME, FAST_NAME = (
    "Apple M1, MacBookAir10,1, 8 GiB, 8 cores",
    "Apple M1, Mac16,5, 64 GiB, 8 cores",
)
SLOW = {
    "machine": SLOW_NAME,
    "software": "24B83, coremltools 9.0, torch 2.13.0",
    "platform": "macOS-15.1-arm64",
    "versions": {"python": "3.11.7", "coremltools": "9.0", "torch": "2.13.0"},
}
FAST = SLOW | {"machine": FAST_NAME}
"""The same chip and system as SLOW in a machine of another model and another memory."""

START = datetime(2026, 1, 1, tzinfo=UTC)


def add(
    root: Path,
    grid: dict,
    machine: dict,
    call_ms,
    *,
    number: int,
    checkpoint_hash: str,
    runtime: str = "portable",
    cosine=lambda options: 0.99,
    status: str = "ok",
    **columns,
) -> list[str]:
    """Logs every cell of a grid, as a sweep on `machine` would; `call_ms` maps options and run of a
    cell to its time.

    `number` orders what is added: later numbers are newer.
    """
    made, ids = sweep.make_grid(grid), []
    for i, c in enumerate(sweep.cells(made, root)):
        run_id = f"{START + timedelta(hours=number, seconds=i):%Y%m%dT%H%M%S%fZ}-{number:08x}"
        how, ms = c.run, call_ms(c.options, c.run)
        name = c.source.name
        source = {"checkpoint_hash": checkpoint_hash, "contents": checkpoint_hash}
        c = replace(c, source=replace(c.source, **source))
        row = (
            c.columns(runtime)
            | machine
            | {
                "time": START + timedelta(hours=number, seconds=i),
                "status": status,
                "command": "sweep",
                "experiment": made.experiment,
                "checkpoint": name,
                "checkpoint_hash": checkpoint_hash,
                "family": "llama",
                "bundle": exporting.bundle_name(name, checkpoint_hash, c.options),
                "verdict": "GREEN" if c.judge_ids else None,
                "config": {"export": c.options.model_dump(), "run": how},
            }
            | columns
        )
        row["bundle_hash"] = row["bundle"]
        common = {
            "T": how["T"],
            "depth": how["depth"],
            "n_gen": how["n_gen"],
            "warmup": False,
        }
        samples = [
            common
            | {
                "repetition": r,
                "order": r,
                "phase": phase,
                "value": value,
                "unit": unit,
            }
            for r in range(3)
            for phase, value, unit in (
                ("call", ms, "ms"),
                ("tokens_per_s", 1e3 * how["T"] / ms, "tok/s"),
            )
        ]
        log.append("samples", samples, root, run_id)
        row |= scalars(pd.DataFrame(samples))
        log.append(
            "layers",
            [
                {
                    "layer": n,
                    "T": how["T"],
                    "depth": how["depth"],
                    "layer_ms": ms / 4,
                    "mad_ms": 0.0,
                    "n": 3,
                }
                for n in range(2)
            ],
            root,
            run_id,
        )
        if c.judge_ids:
            fidelity = [
                {
                    "layer": n,
                    "position": p,
                    "T": T,
                    "tensor": "update",
                    "mode": "isolated",
                    "runtime": runtime,
                    "precision": row["precision"],
                    "cosine": cosine(c.options),
                    "psnr_db": 60.0,
                    "max_abs": 0.01,
                    "finite": True,
                }
                for n in range(2)
                for p in range(len(c.judge_ids))
                for T in made.run.T
            ]
            log.append("fidelity", fidelity, root, run_id)
            row |= scalars(fidelity=pd.DataFrame(fidelity))
        log.append("runs", row, root, run_id)
        ids.append(run_id)
    return ids
