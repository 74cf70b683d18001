"""Measures one decoder layer of real dimensions on the Neural Engine, for which the
shards of the small checkpoints are too small."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from workbench import sweep
from workbench.models.checkpoint import random
from workbench.runtime import named, resolve

NAME = "random-qwen2-layer"
LAYER = {  # of Qwen2.5-0.5B; no head is timed
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
}
COLUMNS = [
    "name",
    "runtime",
    "tokens_per_s",
    "call_ms",
    "n",
    "ane_ops_share",
    "ane_cost_share",
]


def measure_real_layer(
    runtime: str, changes: Mapping, folder: Path, *, experiment: str, **run
) -> pd.DataFrame:
    """Sweeps a layer of random weights with Qwen2.5-0.5B's dimensions on CPU_AND_NE;
    the portable runtime is not measured.

    Args:
        changes: of the dimensions, by transformers' names.
        folder: for the checkpoint.
        run: run options of the sweep.

    Returns:
        One row with the columns `COLUMNS` and the `result` in words.
    """
    name, _ = named(resolve(runtime))
    if name == "portable":
        result = "not measured: there is no Core ML here"
        return pd.DataFrame([{"name": NAME, "runtime": name, "result": result}])
    source = random(folder / NAME, "qwen2", **LAYER | changes)
    options = {
        "checkpoint": str(source),
        "experiment": experiment,
        "export": {"max_seq_len": [512], "compress": ["int8-tensor"]},
        "run": run | {"runtime": [runtime], "compute_units": ["CPU_AND_NE"]},
    }
    grid = sweep.make_grid(options)
    sweep.sweep(grid, progress=False)
    rows = sweep.configurations(grid)
    if rows.empty:
        reason = "failed: see workbench log --where \"status == 'failed'\""
        return pd.DataFrame([{"name": NAME, "runtime": name, "result": reason}])
    text = "measured" if name == "coreml" else "stand-in: nothing is measured"
    results = rows["invalid"].astype(object).fillna(text)
    return rows[COLUMNS].assign(name=NAME, result=results)
