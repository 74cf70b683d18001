"""Figures of fp16's limits: headroom in bits, and weights that masks fail to block."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from workbench.plots.figure import (
    ON_LINES,
    PAGE,
    axes,
    grid_cells,
    heading,
    pivot_in_order,
    style,
    write_cells,
)


@style()
def headroom(
    rows: pd.DataFrame,
    *,
    x: str,
    lines: str,
    xlabel: str | None = None,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Headroom in bits over the column `x`, one line per value of the column `lines`;
    at 0 and below, fp16 overflows.

    `rows`: ``headroom_bits``, `x` and `lines`; of several rows for one point, the least
    headroom is drawn. On a log scale zero has a place of its own, left of all others.
    """
    ax = axes(ax, PAGE, 2.8)
    at = sorted(rows[x].unique())
    if log and at[0] == 0:
        places = rows[x].astype(float).replace(0, at[1] / 2)
        rows = rows.assign(**{x: places})
    for name, line in rows.groupby(lines, sort=False):
        least = line.groupby(x)["headroom_bits"].min()
        ax.plot(least.index, least, label=str(name))
    low = min(ax.get_ylim()[0], -1.0)
    ax.axhspan(
        low, 0, facecolor="0.92", edgecolor="0.6", hatch="////", linewidth=0, zorder=0
    )
    ax.text(
        0.01,
        0.02,
        "beyond 65504: inf",
        transform=ax.transAxes,
        va="bottom",
        bbox=ON_LINES,
    )
    ax.set(
        xlabel=xlabel or x, ylabel="headroom (bits)", xscale="log" if log else "linear"
    )
    if log:  # at the values that were measured, not at powers of ten
        labels = [f"{value:g}" for value in at]
        ax.set_xticks(sorted(rows[x].unique()), labels=labels)
        ax.xaxis.minorticks_off()
    ax.set_ylim(bottom=low)
    ax.grid(axis="y")
    return heading(ax, "distance from the largest fp16 value")


@style()
def mask_leaks(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Attention weight on blocked positions, mask × case, as numbers on colour; NaN is
    hatched and labelled.

    `table`: ``mask``, ``case`` and ``leak`` (nan where the weights are no numbers), in
    the order to be drawn."""
    grid = pivot_in_order(table, "mask", "case", "leak")
    ax = axes(ax, PAGE * 0.8, 0.9 + 0.35 * len(grid))
    mesh = grid_cells(
        ax, grid.clip(upper=1), Normalize(0, 1), matplotlib.colormaps["cividis"]
    )
    write_cells(mesh, grid.map(lambda leak: f"{leak:.2f}", na_action="ignore"))
    for y, x in np.argwhere(grid.isna().to_numpy()):
        text = ax.text(
            x + 0.5, y + 0.5, "NaN ×", ha="center", va="center", weight="bold"
        )
        text.set_bbox(ON_LINES)
    ax.set(xlabel="", ylabel="")
    return heading(ax, "weight on positions that the mask blocks")
