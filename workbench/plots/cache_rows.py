"""The rows of a cache that the calls of a program wrote."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from workbench.plots.styled import PALETTE, add_legend, panels_in, returns_figure
from workbench.plots.text import format_count, group_by, label_of

CACHE_ROWS = 24
"""The number of cache rows that are drawn."""
MARK_STYLES = {
    "written": {"color": PALETTE[0], "marker": "s", "label": "written as addressed"},
    "missed": {
        "color": PALETTE[5],
        "marker": "s",
        "label": "missed",
        "fillstyle": "none",
    },
    "stray": {"color": PALETTE[5], "marker": "x", "label": "stray"},
}
"""Marks of cache rows, by the fields of `Writes`."""


@dataclass
class Writes:
    """The cache rows of one call."""

    written: set[int]
    missed: set[int]
    stray: set[int]


@returns_figure
def cache_rows(
    calls: pd.DataFrame, figure: FigureBase, *, by: str | None = None
) -> None:
    """Call × cache row, of the first `CACHE_ROWS`: a filled mark for a row written as
    addressed, a hollow mark for a missed row, a cross for a stray one.

    Args:
        calls: columns T, pos, expected and changed (lists of row numbers). A call may
            have several rows of the frame, such as one for each layer: a fault in any
            of them shows.
        by: a column with a panel for each of its values.
    """
    calls = calls.reset_index(drop=True)
    panels = group_by(calls, by)
    numbers = calls.groupby(["T", "pos"], sort=False, dropna=False).ngroup()
    names = list(calls[["T", "pos"]].drop_duplicates().itertuples(index=False))
    axes = panels_in(figure, len(panels), 0.1 + 0.15 * len(names))
    keys, outside = {}, 0
    for ax, (title, panel) in zip(axes, panels):
        for y in range(len(names)):
            writes = _writes(panel[numbers[panel.index] == y])
            for kind, style in MARK_STYLES.items():
                rows = sorted(getattr(writes, kind))
                ax.plot(rows, [y] * len(rows), linestyle="", **style)
                hidden = sum(row >= CACHE_ROWS for row in rows)
                outside += hidden
                if hidden < len(rows):
                    keys[kind] = Line2D([], [], linestyle="", **style)
        ax.set(title=title, xlabel="cache row", xlim=(-0.7, CACHE_ROWS - 0.3))
        ax.grid()
        labels = [f"{label_of('T', T)}, {label_of('pos', pos)}" for T, pos in names]
        labels = [label.replace("pos = ", "pos ") for label in labels]
        ax.set_yticks(range(len(names)), labels)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.label_outer()
    notes = []
    if outside:
        marks = format_count(outside, "mark")
        notes.append(f"not drawn: {marks} from cache row {CACHE_ROWS} on")
    add_legend(figure, [keys[kind] for kind in MARK_STYLES if kind in keys], notes)


def _writes(call: pd.DataFrame) -> Writes:
    """The rows that one call wrote, in any of its layers."""
    addressed = set().union(*call["expected"])
    missed, stray = set(), set()
    for expected, changed in zip(call["expected"], call["changed"]):
        missed |= set(expected) - set(changed)
        stray |= set(changed) - set(expected)
    return Writes(addressed - missed, missed, stray)
