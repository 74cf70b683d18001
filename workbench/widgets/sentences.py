"""The Explorer's sentences and tables, as HTML or as text without HTML."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench import escape, plots
from workbench.experiment.tables import html_table, printed, with_powers
from workbench.sweep.error_split import signed_share
from workbench.sweep.summary import with_kl_p99

SPEED, LAYER = "tokens per second", "ms per layer"
EXCESS_LABEL = f"error ÷ {plots.BUDGET_FORMULA}"
"""Ranks the cells and layers of one bundle. It does not rank settings: it contains the
rounding of a setting's own weights."""
SAME_RATIO = 0.01
"""Two ratios of a cell that differ by a smaller share are stated once."""
FED = {
    "isolated": "each layer fed Hugging Face's input",
    "chained": "each layer fed the one before",
}
"""Mode of a comparison → what its layers are fed."""
RMS, SHARE = "relative RMS", "share of the squared error, signed"
"""The rows of an error split."""
PARTS = {
    "storage": "storage",
    "quantization": "quantization",
    "reauthoring": "re-authoring",
    "precision": "precision",
    "runtime": "runtime",
    "total": "total",
}
"""The columns of an error split → their names in a table."""


def error_over_budget(rows: pd.DataFrame | pd.Series) -> pd.Series | float:
    """The error of rows or of one row over the rounding budget, whose formula is
    `plots.BUDGET_FORMULA`, as in the gate `budget`."""
    return rows["error"] / np.hypot(rows["budget"], plots.HALF_ULP)


def layer_name(layer: int | None) -> str:
    """A layer in words. The logits have no layer in a `Place`, and the negative number
    `log.schema.LOGITS` in rows of the log."""
    return "logits" if layer is None or layer < 0 else f"layer {layer}"


def describe_cell(row: pd.Series, place, token: str | None) -> str:
    """A cell of a heatmap and its values, as text."""
    words = f"{layer_name(place.layer)}, position {place.position}"
    if token is not None:
        words += f" “{token}”"
    words += (
        f", T = {row['T']:.0f}: 1 − cosine {_three_digits(max(0, 1 - row['cosine']))}"
    )
    if row["budget"] > 0:
        # the column `budget` alone, without half a unit of fp16
        over_rounding, excess = row["error"] / row["budget"], error_over_budget(row)
        words += f", relative error {_three_digits(row['error'])}, "
        words += f"{_three_digits(over_rounding)} × the rounding budget, "
        # half a unit of fp16 changes small budgets alone
        if over_rounding > (1 + SAME_RATIO) * excess:
            words += f"{EXCESS_LABEL} {_three_digits(excess)}, "
        words += f"tolerance {plots.TOLERANCE_FACTOR:g}"
    return words


def _three_digits(value: float) -> str:
    """A number of a sentence with three significant digits, zeros included: 1.00 is a
    number whose next digits are known. Powers of ten are written as in the tables."""
    if value == 0 or not math.isfinite(value):
        return printed(value)
    return with_powers(f"{value:#.3g}".removesuffix("."))


def describe_no_rounding(tensor: str) -> str:
    """Says why a heatmap of a tensor shows another metric than the selected one."""
    wanted, shown = (plots.METRICS[name].label for name in ("error", "cosine"))
    return f"No {wanted} for {tensor}: its rounding budget is not measured; {shown} is shown."


def describe_heatmap(tensor: str, metric: str) -> str:
    """The title of a heatmap. Its panels name their T."""
    of_tensor = "the logits" if tensor == "logits" else f"each layer's {tensor}"
    if metric == "error":
        return f"Error of {of_tensor} over what rounding causes"
    return f"{plots.METRICS[metric].label} of {of_tensor} from Hugging Face's"


def describe_gaps(tensor: str, validated_ts: Sequence[int]) -> str:
    """Says why a panel of a tensor lacks positions; "" where it has all of them.

    Args:
        validated_ts: the T at which a validation measures errors.
    """
    if tensor != "logits" or len(validated_ts) == 1:
        return ""
    *others, last = map(str, validated_ts)
    return (
        "logits are compared in one pass over the prompt, in which calls of "
        f"T = {', '.join(others)} and {last} take turns; a panel has the positions of the "
        "calls of its T alone"
    )


def describe_scale(is_shared: bool) -> str:
    """Says of which settings a heatmap's colours span the values."""
    if is_shared:
        return "one colour scale for all measured settings"
    return "the colour scale of this setting alone"


def describe_ranks(rows: pd.DataFrame) -> str:
    """The cells and layers of a bundle with the largest errors over the rounding
    budget, as text; "" where no row has both."""
    rows = rows[rows["finite"].ne(False)].dropna(subset=["error", "budget"])
    if rows.empty:
        return ""
    rows = rows.assign(ratio=error_over_budget(rows))
    cells = rows.groupby(["layer", "position"])["ratio"].max().nlargest(3)
    cell_words = [
        f"{layer_name(layer)}, position {position}: {_three_digits(value)}"
        for (layer, position), value in cells.items()
    ]
    squares = (rows["ratio"] ** 2).groupby([rows["layer"], rows["T"]]).mean()
    layers = (squares**0.5).groupby("layer").max().nlargest(3)
    layer_words = [
        f"{layer_name(layer)}: {_three_digits(value)}"
        for layer, value in layers.items()
    ]
    return (
        f"Largest {EXCESS_LABEL} (tolerance {plots.TOLERANCE_FACTOR:g}): "
        f"{'; '.join(cell_words)}. RMS over positions: {'; '.join(layer_words)}."
    )


def costs_table(runs: pd.DataFrame, axes: Sequence[str]) -> str:
    """A table, as HTML, of the mean and the 99% quantile of the KL in each of the
    validated runs, the lowest mean first; "" where nothing tells the runs apart."""
    if runs.empty:
        return ""
    names = {"kl_mean": "mean KL", "kl_p99": "99% KL"}
    runs = with_kl_p99(runs).rename(columns=names).dropna(subset=["mean KL"])
    runs = runs.sort_values("mean KL", kind="stable")
    varied = [
        name for name in axes if name in runs and runs[name].nunique(dropna=False) > 1
    ]
    if runs.empty or not varied:
        return ""
    table = _rounded(runs[[*varied, "mean KL", "99% KL"]], 3)
    return f"KL from Hugging Face's model in nats, by setting:{html_table(table)}"


def split_table(parts: pd.DataFrame, layer: int | None) -> str:
    """The error split of a layer's update, as HTML; "" for the logits, of which there is
    none."""
    if layer is None:
        return ""
    row = parts[parts["layer"] == layer]
    sizes = row[[*PARTS]].set_axis([RMS])
    shares = row.reindex(columns=map(signed_share, PARTS)).set_axis([*PARTS], axis=1)
    shares = shares.assign(total=1.0).set_axis([SHARE])
    # older logs have no shares
    has_shares = shares.drop(columns="total").notna().any(axis=None)
    table = pd.concat([sizes, shares] if has_shares else [sizes]).astype(float)
    table = _rounded(table.rename(columns=PARTS), 3).rename_axis("").reset_index()
    return (
        f"{layer_name(layer).capitalize()}, its update at all positions together: the error "
        "that each step adds. These errors are vectors: their shares add up to 1, their "
        f"relative RMS do not add up to the total's.{html_table(table)}"
    )


def _rounded(table: pd.DataFrame, digits: int) -> pd.DataFrame:
    """A table whose fractions have this number of significant digits."""
    fractions = table.select_dtypes("float").columns
    rounded = table[fractions].map(lambda x: float(f"{x:.{digits}g}"))
    return table.assign(**{name: rounded[name] for name in fractions})


def describe_times(rows: pd.DataFrame, summary: pd.DataFrame) -> str:
    """The times of a setting, its machine, and why they say little, as HTML.

    Args:
        rows: one for each process and quantity (column `quantity`).
        summary: `log.summarize` of the rows by `quantity`.
    """
    medians = summary["median"]
    words = f"{medians[SPEED]:.4g} {SPEED}, {medians[LAYER]:.3g} {LAYER}"
    count = summary["n"].max()
    processes = f"median of {count} processes" if count > 1 else "one process"
    words = f"<b>{words}</b> ({processes}) on {escape.html(rows['machine'].iloc[0])}"
    if reasons := rows["disturbed"].dropna().unique().tolist():
        words += f"; disturbed: {escape.html(reasons[0])}"
    for reason in rows["invalid"].dropna().unique():
        words += f"; invalid: {escape.html(reason)}"
    return words
