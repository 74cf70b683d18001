"""The errors of several runtimes, beside the error of rounding alone."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workbench.plots.figure import PAGE, style

PANELS = {
    "exact": "fp32 programs: re-authoring",
    "declared": "fp16 programs: arithmetic",
}
DODGE = 0.13  # of the distance between two points on x: lines that coincide stay apart


@style()
def witness_lines(errors: pd.DataFrame, *, x: str = "layer") -> Figure:
    """Relative RMS error of updates over `x` (layer or position) in a panel for each
    precision: one line per pair of witnesses, and the error budget as a dashed line.

    A point is the RMS of its rows, its bar reaches from the smallest of them above zero
    to the largest: of two runtimes rows may be equal bit for bit. `errors`: ``pair``,
    ``precision``, ``tensor``, ``error``, ``budget`` and `x`."""
    rows = errors[errors["tensor"] == "update"]
    precisions = [name for name in PANELS if (rows["precision"] == name).any()]
    figure, panels = plt.subplots(
        1, len(precisions), figsize=(PAGE, 2.9), sharey=True, squeeze=False
    )
    for ax, precision in zip(panels[0], precisions):
        _panel(ax, rows[rows["precision"] == precision], x)
        ax.set(xlabel=x, title=PANELS[precision])
    panels[0, 0].set(ylabel="relative RMS error", yscale="log")
    lines, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(f"update by {x}, three witnesses", x=0.01, ha="left")
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, x: str) -> None:
    pairs = rows.groupby("pair", sort=False)
    for number, (pair, own) in enumerate(pairs):
        points = own["error"].astype(float).groupby(own[x])
        mean = _rms(points)
        high = points.max()
        low = points.agg(lambda values: values[values > 0].min())
        shift = number - (len(pairs) - 1) / 2
        bars = np.maximum(0.0, [mean - low, high - mean])
        ax.errorbar(
            mean.index + DODGE * shift,
            mean,
            np.nan_to_num(bars),
            elinewidth=0.6,
            linewidth=0.9,
            markersize=3.5,
            label=str(pair),
        )
    budget = rows.dropna(subset="budget")
    if len(budget):
        points = budget["budget"].astype(float).groupby(budget[x])
        mean = _rms(points)
        ax.plot(mean.index, mean, "--", color="0.3", marker="", label="error budget")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y")


def _rms(groups) -> pd.Series:
    return groups.apply(lambda values: np.sqrt((values**2).mean()))
