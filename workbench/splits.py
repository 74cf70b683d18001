"""The error split of one bundle, made and logged once, so that widgets show it at once afterwards."""

import json
from pathlib import Path

import pandas as pd

from workbench import log, runs, sweep
from workbench.bundle import Options
from workbench.eval import error, gates
from workbench.models.checkpoint import Checkpoint


def make(checkpoint: Checkpoint, options: Options, ids: list[int], experiment: str, root: Path, bundles: Path) -> str:
    """Splits the error over `ids` (see `workbench.eval.error`) and logs it; returns the run id."""
    plain, bundle = (sweep.bundle_for(checkpoint, options.model_copy(update={"compress": c}), bundles)
                     for c in ("fp16", options.compress))  # fmt: skip
    found = error.measure(checkpoint, bundle, plain, ids)
    judged = error.judge(found)
    parts = {mode: gates.records(split.layers()) for mode, split in found.items()}
    config = {"parts": parts, "gates": [g.json() for g in judged]}
    row = {"command": "error", "runtime": "portable", "verdict": gates.verdict(judged), "config": config}
    return runs.record(experiment, runs.describe(bundle) | row, root=root)


def stored(checkpoint: Checkpoint, options: Options, root: Path) -> pd.DataFrame | None:
    """Parts of every layer's isolated update (see `workbench.eval.error.Split.layers`), with run_id; None: never measured."""
    wanted = {"checkpoint_hash": checkpoint.sha256, "status": "ok"} | runs.exported(options)
    for _, run in log.load("runs", root=root, where=wanted).sort_values("run_id", ascending=False).iterrows():
        config = json.loads(run["config"]) if isinstance(run["config"], str) else {}
        if "parts" in config:
            return pd.DataFrame(config["parts"]["isolated"]).assign(run_id=run["run_id"])
    return None
