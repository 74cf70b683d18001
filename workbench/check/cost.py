"""The cost of a bundle as a table: its KL from Hugging Face's logits, beside the part
that its weights cause and the part that no export in fp16 avoids."""

import math
from collections.abc import Mapping

import pandas as pd

KL = "KL (nats)"
BUNDLE = "bundle"
STORED = "stored weights"
ROUNDING = "fp16 rounding alone"
NOT_MEASURED = "not measured"
FIGURES = {"mean": "mean", "median": "median", "p99": "99th percentile", "max": "max"}
COLUMNS = (
    "The column of stored weights is Hugging Face's model with the weights that the "
    "bundle stores and its stream in fp16: the cost of compression. That of fp16 "
    "rounding alone is the same model with the checkpoint's own weights."
)
"""What the columns beside the bundle's are, in words."""
STORAGE_ALONE = "of storage alone, without the rounding of fp16 arithmetic"
"""What the KL of Hugging Face's model with the weights of a preset is, in words."""


def cost_table(cost: Mapping) -> pd.DataFrame:
    """The KL of the bundle, of Hugging Face's model with the stored weights, and of
    Hugging Face's model with its own weights, one row per figure.

    Args:
        cost: as in the JSON of `workbench validate`: `kl`, and `budget` and `rounding`,
            each with a `kl` or null. A column without figures says that it was not
            measured.
    """
    columns = {
        BUNDLE: cost["kl"],
        STORED: (cost.get("budget") or {}).get("kl"),
        ROUNDING: (cost.get("rounding") or {}).get("kl"),
    }
    table = pd.DataFrame({KL: FIGURES.values()})
    for name, kl in columns.items():
        # packages that output no logits have a KL that is null
        is_measured = kl is not None and not math.isnan(kl["mean"])
        table[name] = [kl[key] for key in FIGURES] if is_measured else NOT_MEASURED
    return table


def describe_cost(table: pd.DataFrame) -> str:
    """A sentence on the means of a `cost_table` whose columns were all measured."""
    mean = table.set_index(KL).loc["mean"]
    return (
        f"The bundle has a mean KL of {mean[BUNDLE]:.3g} nats, Hugging Face's model "
        f"{mean[STORED]:.3g} with the stored weights and {mean[ROUNDING]:.3g} with its "
        "own, its stream in fp16."
    )
