"""Predicted against measured times."""

import numpy as np
import pandas as pd
from matplotlib.figure import FigureBase

from workbench.plots.styled import DASHED, add_legend, looks, returns_figure, set_height
from workbench.plots.text import describe_unplaced, group_by, label_log


@returns_figure
def predictions(
    rows: pd.DataFrame,
    figure: FigureBase,
    *,
    hue: str | None = None,
    factor: float | None = None,
    bars: str = "",
) -> None:
    """Predicted over measured ms on logarithmic axes, with the line on which both are
    equal; hollow marks are rows that no fit has seen.

    Args:
        rows: ms, predicted_ms, low_ms, high_ms, fitted (whether the row calibrates), and
            the column `hue`, which gives the colours and marks.
        factor: of an interval, whose ends are drawn as dashed lines.
        bars: the legend's words for the intervals of the rows.
    """
    placed = rows.dropna(subset=["ms", "predicted_ms"])
    set_height(figure, 4.5)
    ax = figure.subplots()
    for (name, group), (colour, marker) in zip(group_by(placed, hue), looks()):
        label = name  # of the first marks of a group; the legend has each group once
        for is_fitted, points in group.groupby("fitted", sort=False):
            lengths = [
                points["predicted_ms"] - points["low_ms"],
                points["high_ms"] - points["predicted_ms"],
            ]
            ax.errorbar(
                points["ms"],
                points["predicted_ms"],
                lengths,
                fmt=marker,
                color=colour,
                markerfacecolor=colour if is_fitted else "white",
                elinewidth=0.5,
                label=label,
            )
            label = "_nolegend_"
    times = placed[["ms", "low_ms", "high_ms"]].to_numpy()
    ends = np.array([np.nanmin(times) / 1.2, np.nanmax(times) * 1.2])
    ax.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    if factor:
        for ratio, label in ((factor, f"a factor of {factor:.2f}"), (1 / factor, "")):
            ax.plot(ends, ends * ratio, **DASHED, label=label or "_nolegend_")
    ax.grid()
    ax.set(xscale="log", yscale="log", xlabel="measured ms of a call")
    ax.set(ylabel="predicted ms of a call", xlim=ends, ylim=ends)
    label_log(ax.xaxis)
    label_log(ax.yaxis)
    notes = [bars] if bars else []
    if not placed["fitted"].all():
        notes.append("hollow: in no fit")
    notes += describe_unplaced(rows, ["ms", "predicted_ms"])
    add_legend(figure, ax.get_legend_handles_labels()[0], notes)
