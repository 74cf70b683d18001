"""The error split of one bundle, made and logged once, so that widgets show it at once afterwards."""

import json
from pathlib import Path

import pandas as pd

from workbench import log, sweep
from workbench.bundle import Options
from workbench.check import gates
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import runs


def make_split(checkpoint: Checkpoint, options: Options, ids: list[int], experiment: str, root: Path, bundles: Path) -> str:
    """Splits the error over `ids` (see `workbench.explain.error`) and logs it; returns the run id."""
    plain, bundle = (sweep.bundle_for(checkpoint, options.model_copy(update={"compress": c}), bundles)
                     for c in ("fp16", options.compress))  # fmt: skip
    found = error.split_error(checkpoint, bundle, plain, ids)
    judged = error.error_gates(found)
    parts = {mode: gates.records(split.layers()) for mode, split in found.items()}
    config = {"parts": parts, "gates": [g.json() for g in judged]}
    row = {"command": "error", "runtime": "portable", "verdict": gates.verdict(judged), "config": config}
    return runs.record_run(experiment, runs.describe(bundle) | row, root=root)


def stored_split(checkpoint: Checkpoint, options: Options, root: Path) -> pd.DataFrame | None:
    """Parts of every layer's isolated update (see `workbench.explain.error.Split.layers`), with run_id; None: never measured."""
    wanted = {"checkpoint_hash": checkpoint.sha256, "status": "ok"} | runs.exported(options)
    for _, run in log.load("runs", root=root, where=wanted).sort_values("run_id", ascending=False).iterrows():
        config = json.loads(run["config"]) if isinstance(run["config"], str) else {}
        if "parts" in config:
            return pd.DataFrame(config["parts"]["isolated"]).assign(run_id=run["run_id"])
    return None
