"""The error split of a checkpoint's bundle: measured in a child process, logged, read
back."""

import json
import threading
from pathlib import Path

import pandas as pd

from workbench import log, process
from workbench.bundle import Options
from workbench.check import gates
from workbench.errors import InputError
from workbench.explain import error
from workbench.export import bundle_for
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import identity


def measure_split(
    checkpoint: Checkpoint,
    options: Options,
    ids: list[int],
    experiment: str,
    root: Path,
    stop: threading.Event | None = None,
) -> None:
    """Splits the error over a prompt in a child process and logs it (see
    `explain.error`). Raises:
        InputError: the child failed.
    """
    about = checkpoint.path.resolve(), options, ids, experiment, root.resolve()
    outcome = process.call(log_split, *about, stop=stop)
    if outcome.failure:
        needed, step = "a measurement", "see the reason"
        raise InputError("error split", outcome.failure, needed, step)


def log_split(
    path: Path, options: Options, ids: list[int], experiment: str, root: Path
) -> None:
    """In the child: exports the bundle if it is missing, splits its error and logs one
    run."""
    checkpoint = Checkpoint(path)
    bundle = bundle_for(checkpoint, options, log.project(root) / "data" / "bundles")
    splits = error.split_error(checkpoint, bundle, ids)
    results = error.error_gates(splits)
    parts = {mode: gates.records(split.layers()) for mode, split in splits.items()}
    row = identity.describe(bundle) | {
        "experiment": experiment,
        "command": "error",
        "runtime": "portable",
        "verdict": gates.verdict(results),
        "config": {"parts": parts, "gates": [g.json() for g in results]},
    }
    log.record(row, root)


def stored_split(
    checkpoint: Checkpoint, options: Options, root: Path
) -> pd.DataFrame | None:
    """Parts of every layer's isolated update (see `explain.error.Split.layers`), with
    run_id; None if the log has none."""
    where = {"checkpoint_hash": checkpoint.sha256, "command": "error"}
    runs = log.load("runs", root, where | identity.exported(options))
    for run in runs.iloc[::-1].itertuples():
        if parts := json.loads(run.config).get("parts"):
            return pd.DataFrame(parts["isolated"]).assign(run_id=run.run_id)
    return None
