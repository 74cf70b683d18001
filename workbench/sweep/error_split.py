"""The error split of a checkpoint's bundle: measured in a child process, logged, and
read from the log; and the operation that computes a cell of a heatmap wrongly."""

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
from workbench.sweep.run import export_bundle


def measure_split(
    checkpoint: Checkpoint,
    options: Options,
    grid: Grid,
    root: Path,
    stop: threading.Event | None = None,
) -> None:
    """Splits the error over the prompt of a grid in a child process and logs the result
    (see `explain.error`).

    Args:
        options: of the bundle's export.

    Raises:
        InputError: the child failed.
        process.Cancelled: `stop` was set.
    """
    arguments = checkpoint.path.resolve(), options, grid, root.resolve()
    # it would disturb the times of a cell that is measured meanwhile
    with measuring_alone(root, stop):
        outcome = process.call(log_split, *arguments, stop=stop)
    if outcome.failure:
        needed, step = "a measurement", "see the reason"
        raise InputError("error split", outcome.failure, needed, step)


def log_split(path: Path, options: Options, grid: Grid, root: Path) -> None:
    """In the child: exports the bundle if it is missing, splits its error and logs one
    run."""
    checkpoint, folder = Checkpoint(path), log.project(root) / "data" / "bundles"
    bundle = bundle_for(checkpoint, options, folder)
    split = error.split_error(checkpoint, bundle, grid.validate_ids)["isolated"]
    row = identity.bundle_columns(bundle) | {
        "experiment": grid.experiment,
        "command": "error",
        "runtime": "portable",
        "prompt": identity.prompt_hash(grid.validate_ids),
        "config": {
            "parts": {"isolated": records(split.layers())},
            "signed_shares": {"isolated": records(split.signed_shares())},
        },
    }
    log.record(row, root)


def stored_split(
    checkpoint: Checkpoint, options: Options, grid: Grid, root: Path
) -> pd.DataFrame | None:
    """The parts of the error of every layer's isolated update over the prompt of a grid
    (see `explain.error.Split.layers`) from the newest logged split, with its run_id, and
    a column for the signed share of each part, named by `signed_share` (see
    `explain.error.Split.signed_shares`; null in older logs). None if the log has none."""
    where = identity.export_columns(options) | {
        "checkpoint_hash": checkpoint.sha256,
        "command": "error",
        "prompt": identity.prompt_hash(grid.validate_ids),
        "status": "ok",
    }
    runs = log.load("runs", root, where)
    if runs.empty:
        return None
    # the log is sorted by run ids, which begin with their time
    newest = runs.iloc[-1]
    config = json.loads(newest["config"])
    parts = pd.DataFrame(config["parts"]["isolated"]).set_index("layer")
    logged = config.get("signed_shares", {}).get("isolated", [])
    shares = pd.DataFrame(logged, columns=["layer", *error.PARTS]).set_index("layer")
    split = parts.join(shares.rename(columns=signed_share)).reset_index()
    return split.assign(run_id=newest["run_id"])


def signed_share(part: str) -> str:
    """The column of `stored_split` with the signed share of a part."""
    return f"{part}, signed share"


def find_operation(
    cell: Cell,
    grid: Grid,
    root: Path,
    layer: int | None,
    position: int,
    stop: threading.Event | None = None,
) -> str:
    """The summary in which `explain.operation.find` names the operation that is wrong at
    the setting of a cell.

    Args:
        layer: None: all layers.

    Raises:
        process.Cancelled: `stop` was set.
    """
    path = export_bundle(cell, log.project(root) / "data" / "bundles")
    result = operation.find(
        Bundle.open(path),
        grid.validate_ids,
        runtime=cell.run.runtime,
        compute_units=cell.run.compute_units,
        T=cell.run.T,
        layer=layer,
        position=position,
        stop=stop,
    )
    return result.summary
