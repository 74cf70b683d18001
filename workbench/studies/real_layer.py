"""One decoder layer of real dimensions on the Neural Engine: the small checkpoints' shards are too
small for it, so that their speed on a Mac says nothing about it."""

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
COLUMNS = ["name", "runtime", "tokens_per_s", "call_ms", "n", "ane_ops_share", "ane_cost_share"]


def measure_real_layer(
    runtime: str, changes: Mapping, folder: Path, *, experiment: str, **run
) -> pd.DataFrame:
    """One row: a layer of random weights and Qwen2.5-0.5B's dimensions with `changes`
    (transformers' names), measured on CPU_AND_NE by a sweep with the options `run`, with the Neural
    Engine's shares and the `result` in words. Nothing is measured on the portable runtime.

    Args:
        folder: where the checkpoint is written.
    """
    name, _ = named(resolve(runtime))
    if name == "portable":
        result = "not measured: there is no Core ML here"
        return pd.DataFrame([{"name": NAME, "runtime": name, "result": result}])
    source = random(folder / NAME, "qwen2", **LAYER | changes)
    grid = sweep.make_grid(
        {
            "checkpoint": str(source),
            "experiment": experiment,
            "export": {"max_seq_len": [512], "compress": ["int8-tensor"]},
            "run": run | {"runtime": [runtime], "compute_units": ["CPU_AND_NE"]},
        }
    )
    sweep.sweep(grid, progress=False)
    rows = sweep.configurations(grid)
    if rows.empty:
        reason = "failed: see workbench log --where \"status == 'failed'\""
        return pd.DataFrame([{"name": NAME, "runtime": name, "result": reason}])
    if name == "coreml":
        text = "measured"
    else:
        text = "stand-in: nothing is measured"
    results = [reason if isinstance(reason, str) else text for reason in rows["invalid"]]
    return rows[COLUMNS].assign(name=NAME, result=results)
