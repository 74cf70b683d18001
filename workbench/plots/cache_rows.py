"""The rows of a cache that the calls of a program changed, and those they should."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from workbench.plots.styled import PALETTE, add_legend, panels_in, returns_figure
from workbench.plots.text import format_count, group_by, label_of

MAX_CACHE_ROWS = 24
"""Only the first rows of a cache are drawn, this many."""
MARK_STYLES = {
    "as_addressed": {
        "color": PALETTE[0],
        "marker": "s",
        "label": "changed as addressed",
    },
    "unchanged": {
        "color": PALETTE[5],
        "marker": "s",
        "label": "addressed and unchanged",
        "fillstyle": "none",
    },
    "unaddressed": {
        "color": PALETTE[5],
        "marker": "x",
        "label": "changed and not addressed",
    },
}
"""A field of `ChangedRows` → the mark of its cache rows. The marks differ in shape, so that
print without colours has them too."""
VALUES_NOTE = (
    "Only whether a row changed was tested: a row changed as addressed may hold the values "
    "of another token of the call."
)
"""A note in the legend. A write that is one row late shifts the rows of all later tokens,
so that a call of three tokens changes the rows of two of them."""


@dataclass
class ChangedRows:
    """The cache rows that one call changed or should have changed.

    Attributes:
        as_addressed: changed and addressed, whichever token's values they hold.
        unchanged: addressed, and not changed in one layer or several.
        unaddressed: changed in one layer or several, and not addressed.
    """

    as_addressed: set[int]
    unchanged: set[int]
    unaddressed: set[int]


@returns_figure
def cache_rows(
    calls: pd.DataFrame, figure: FigureBase, *, by: str | None = None
) -> None:
    """Call × cache row, of the first `MAX_CACHE_ROWS`: a filled mark for a row that is
    changed as addressed, a hollow mark for an addressed row that is unchanged, a cross for
    a changed row that is not addressed.

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
            changed_rows = _changed_rows(panel[call_numbers[panel.index] == y])
            for kind, style in MARK_STYLES.items():
                rows = sorted(getattr(changed_rows, kind))
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
    notes = [VALUES_NOTE] if "as_addressed" in keys else []
    if outside:
        marks = format_count(outside, "mark")
        notes.append(f"not drawn: {marks} from cache row {MAX_CACHE_ROWS} on")
    add_legend(figure, [keys[kind] for kind in MARK_STYLES if kind in keys], notes)


def _call_label(T, pos) -> str:
    """A call in words, such as ``T = 4, pos 12``."""
    label = f"{label_of('T', T)}, {label_of('pos', pos)}"
    return label.replace("pos = ", "pos ")


def _changed_rows(call: pd.DataFrame) -> ChangedRows:
    """The cache rows that one call changed or should have changed, in any of its layers.

    Args:
        call: its rows of the frame, one for each layer.
    """
    addressed = set().union(*call["expected"])
    unchanged, unaddressed = set(), set()
    for expected, changed in zip(call["expected"], call["changed"]):
        unchanged |= set(expected) - set(changed)
        unaddressed |= set(changed) - set(expected)
    return ChangedRows(addressed - unchanged, unchanged, unaddressed)
