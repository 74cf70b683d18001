"""The error split of a checkpoint's bundle: measured in a child process, logged, read
back; and the operation that is wrong in a cell of a heatmap."""

import json
import threading
from pathlib import Path

import pandas as pd

from workbench import log, process
from workbench.bundle import Bundle, Options
from workbench.check.gates import records
from workbench.errors import InputError
from workbench.explain import error, operation
from workbench.exporter import bundle_for
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import identity
from workbench.sweep.grid import Cell, Grid
from workbench.sweep.lock import measuring_alone
from workbench.sweep.run import prepare


def measure_split(
    checkpoint: Checkpoint,
    options: Options,
    grid: Grid,
    root: Path,
    stop: threading.Event | None = None,
) -> None:
    """Splits the error over the prompt of a grid in a child process and logs it (see
    `explain.error`).

    Raises:
        InputError: the child failed.
    """
    about = checkpoint.path.resolve(), options, grid, root.resolve()
    with measuring_alone(root, stop):
        outcome = process.call(log_split, *about, stop=stop)
    if outcome.failure:
        needed, step = "a measurement", "see the reason"
        raise InputError("error split", outcome.failure, needed, step)


def log_split(path: Path, options: Options, grid: Grid, root: Path) -> None:
    """In the child: exports the bundle if it is missing, splits its error and logs one
    run."""
    checkpoint, folder = Checkpoint(path), log.project(root) / "data" / "bundles"
    bundle = bundle_for(checkpoint, options, folder)
    split = error.split_error(checkpoint, bundle, grid.validate_ids)["isolated"]
    row = {"experiment": grid.experiment, "command": "error", "runtime": "portable"}
    row["prompt"] = identity.prompt(grid.validate_ids)
    row["config"] = {"parts": {"isolated": records(split.layers())}}
    log.record(identity.describe(bundle) | row, root)


def stored_split(
    checkpoint: Checkpoint, options: Options, grid: Grid, root: Path
) -> pd.DataFrame | None:
    """Parts of every layer's isolated update over the prompt of a grid (see
    `explain.error.Split.layers`), with run_id; None if the log has none."""
    where = {"checkpoint_hash": checkpoint.sha256, "command": "error"}
    where["prompt"] = identity.prompt(grid.validate_ids)
    where |= identity.exported(options) | {"status": "ok"}
    for run in log.load("runs", root, where)[::-1].itertuples():
        parts = json.loads(run.config)["parts"]["isolated"]
        return pd.DataFrame(parts).assign(run_id=run.run_id)
    return None


def find_operation(
    cell: Cell,
    grid: Grid,
    root: Path,
    place: tuple[int, int],
    stop: threading.Event | None = None,
) -> str:
    """What `explain.operation.find` says of a layer (below 0: all of them) and a
    position at the setting of a cell."""
    path = prepare(cell, log.project(root) / "data" / "bundles")
    how = {name: cell.run[name] for name in ("runtime", "compute_units", "T")}
    layer, how["position"] = place
    how["layer"] = None if layer < 0 else layer
    return operation.find(Bundle.open(path), grid.validate_ids, **how, stop=stop).words
