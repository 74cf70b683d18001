"""The errors of several runtimes, beside the error of rounding alone."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PANELS = {
    "exact": "fp32 programs: re-authoring",
    "declared": "fp16 programs: arithmetic",
}


def witness_lines(errors: pd.DataFrame, *, x: str = "layer") -> Figure:
    """Relative RMS error of updates over `x` (layer or position) in a panel for each
    precision: one line per pair of witnesses, the error budget dashed. A point is the
    RMS of its rows.

    `errors`: `Crosscheck.errors`."""
    updates = errors[errors["tensor"] == "update"]
    figure, panels = plt.subplots(
        1, len(PANELS), figsize=(7, 2.9), sharey=True, layout="constrained"
    )
    for ax, (precision, title) in zip(panels, PANELS.items()):
        rows = updates[updates["precision"] == precision]
        for pair, own in rows.groupby("pair", sort=False):
            _line(ax, own, x, "error", "o-", str(pair))
        _line(ax, rows.dropna(subset="budget"), x, "budget", "k--", "error budget")
        ax.set(xlabel=x, title=title, yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis="y")
    panels[0].set_ylabel("relative RMS error")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(f"update by {x}, three witnesses", x=0.01, ha="left")
    return figure


def _line(
    ax: Axes, rows: pd.DataFrame, x: str, column: str, style: str, label: str
) -> None:
    squares = rows[column].astype(float) ** 2
    mean = np.sqrt(squares.groupby(rows[x]).mean())
    ax.plot(mean.index, mean, style, markersize=3.5, linewidth=0.9, label=label)
