"""The error split of a checkpoint's bundle: measured in a child process, logged, read
back."""

import json
from pathlib import Path

import pandas as pd

from workbench import log
from workbench.bundle import Options
from workbench.check import gates
from workbench.errors import InputError
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import process, runs
from workbench.sweep.cell import bundle_for


def measure_split(
    checkpoint: Checkpoint,
    options: Options,
    ids: list[int],
    experiment: str,
    root: Path,
) -> None:
    """Splits the error over a prompt in a child process and logs it (see
    `explain.error`). Raises:
        InputError: the child failed.
    """
    argument = {
        "checkpoint": str(checkpoint.path.resolve()),
        "options": options.model_dump(),
        "ids": ids,
        "experiment": experiment,
        "root": str(root.resolve()),
    }
    outcome = process.call("workbench.sweep.error_split:split_main", argument)
    if outcome.failure:
        raise InputError(
            "error split", outcome.failure, "a measurement", "see the reason"
        )


def split_main(argument: dict) -> None:
    """In the child: exports the bundle if it is missing, splits its error and logs one
    run."""
    checkpoint = Checkpoint(argument["checkpoint"])
    root = Path(argument["root"])
    bundles = log.project(root) / "data" / "bundles"
    bundle = bundle_for(checkpoint, Options(**argument["options"]), bundles)
    splits = error.split_error(checkpoint, bundle, argument["ids"])
    results = error.error_gates(splits)
    parts = {mode: gates.records(split.layers()) for mode, split in splits.items()}
    row = runs.describe(bundle) | {
        "command": "error",
        "runtime": "portable",
        "verdict": gates.verdict(results),
        "config": {"parts": parts, "gates": [g.json() for g in results]},
    }
    runs.record_run(argument["experiment"], row, root=root)


def stored_split(
    checkpoint: Checkpoint, options: Options, root: Path
) -> pd.DataFrame | None:
    """Parts of every layer's isolated update (see `explain.error.Split.layers`), with
    run_id; None if the log has none."""
    where = {"checkpoint_hash": checkpoint.sha256, "status": "ok"}
    where |= runs.exported(options)
    logged = log.load("runs", root, where).dropna(subset="config")
    for run in logged.sort_values("run_id", ascending=False).itertuples():
        if parts := json.loads(run.config).get("parts"):
            return pd.DataFrame(parts["isolated"]).assign(run_id=run.run_id)
    return None
