"""The errors of several runtimes, beside the error of rounding alone."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.plots.figure import PAGE, axes, heading, style


@style()
def witness_lines(
    errors: pd.DataFrame, *, tensor: str = "update", x: str = "layer", ax: Axes | None = None
) -> Axes:
    """Relative RMS error over `x` (layer or position), one line per pair of witnesses, and the
    error budget as a dashed line.

    `errors`: ``pair``, ``tensor``, ``error``, ``budget`` and `x`; of several rows for one point,
    the RMS is drawn.
    """

    def line(values: pd.Series, rows: pd.DataFrame) -> pd.Series:
        return np.sqrt((values.astype(float) ** 2).groupby(rows[x]).mean())

    rows = errors[errors["tensor"] == tensor]
    ax = axes(ax, PAGE, 2.8)
    for marker, (pair, own) in zip("osv^D", rows.groupby("pair", sort=False)):
        mean = line(own["error"], own)
        ax.plot(mean.index, mean, marker=marker, markersize=4, label=str(pair))
    budget = rows.dropna(subset="budget")
    if len(budget):
        mean = line(budget["budget"], budget)
        ax.plot(mean.index, mean, color="0.3", linestyle="--", label="error budget")
    ax.set(xlabel=x, ylabel="relative RMS error", yscale="log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y")
    return heading(ax, f"{tensor} by {x}")
