"""The rows of a cache that the calls of a program wrote."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from workbench.plots.styled import PALETTE, add_legend, panels_in, returns_figure
from workbench.plots.text import format_count, group_by, label_of

MAX_CACHE_ROWS = 24
"""Only the first rows of a cache are drawn, this many."""
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
"""A field of `Writes` → the mark of its cache rows."""


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
    """Call × cache row, of the first `MAX_CACHE_ROWS`: a filled mark for a row written as
    addressed, a hollow mark for a missed row, a cross for a stray one.

    Args:
        calls: columns T, pos, expected and changed (lists of row numbers). A call may
            have several rows of the frame, such as one for each layer: a fault in any
            of them shows.
        by: a column with a panel for each of its values.
    """
    calls = calls.reset_index(drop=True)
    panels = group_by(calls, by)
    # a call is known by its T and pos; `call_numbers` has one entry per row of the frame
    call_numbers = calls.groupby(["T", "pos"], sort=False, dropna=False).ngroup()
    unique_calls = calls[["T", "pos"]].drop_duplicates()
    labels = [_call_label(T, pos) for T, pos in unique_calls.itertuples(index=False)]
    axes = panels_in(figure, len(panels), 0.1 + 0.15 * len(labels))
    keys, outside = {}, 0
    for ax, (title, panel) in zip(axes, panels):
        for y in range(len(labels)):
            writes = _writes(panel[call_numbers[panel.index] == y])
            for kind, style in MARK_STYLES.items():
                rows = sorted(getattr(writes, kind))
                ax.plot(rows, [y] * len(rows), linestyle="", **style)
                hidden = sum(row >= MAX_CACHE_ROWS for row in rows)
                outside += hidden
                if hidden < len(rows):
                    keys[kind] = Line2D([], [], linestyle="", **style)
        ax.set(title=title, xlabel="cache row", xlim=(-0.7, MAX_CACHE_ROWS - 0.3))
        ax.grid()
        ax.set_yticks(range(len(labels)), labels)
        ax.set_ylim(len(labels) - 0.5, -0.5)
        ax.label_outer()
    notes = []
    if outside:
        marks = format_count(outside, "mark")
        notes.append(f"not drawn: {marks} from cache row {MAX_CACHE_ROWS} on")
    add_legend(figure, [keys[kind] for kind in MARK_STYLES if kind in keys], notes)


def _call_label(T, pos) -> str:
    """A call in words, such as ``T = 4, pos 12``."""
    label = f"{label_of('T', T)}, {label_of('pos', pos)}"
    return label.replace("pos = ", "pos ")


def _writes(call: pd.DataFrame) -> Writes:
    """The cache rows that one call wrote, missed, or wrote astray in any of its layers.

    Args:
        call: its rows of the frame, one for each layer.
    """
    addressed = set().union(*call["expected"])
    missed, stray = set(), set()
    for expected, changed in zip(call["expected"], call["changed"]):
        missed |= set(expected) - set(changed)
        stray |= set(changed) - set(expected)
    return Writes(addressed - missed, missed, stray)
