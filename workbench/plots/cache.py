"""Which rows of the KV cache each call changed, against which it should have: the write address as a picture."""

import pandas as pd
from matplotlib.axes import Axes

from workbench.plots.figure import axes, heading, label_cells, style

_CALL_MARKS = {
    "as expected": dict(marker="s", color="#0072B2"),
    "missed": dict(marker="s", color="#D55E00", markerfacecolor="none", markeredgewidth=1.2),
    "stray": dict(marker="x", color="#D55E00", markeredgewidth=1.5),
}


@style()
def cache_rows(changed: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Call × slot: filled where a row was written as expected, hollow where it was missed, crossed where it strayed.

    `changed`: ``call``, ``T``, ``slot``, ``layer``, and the booleans ``changed`` and ``expected``, for up to about 100
    slots. A fault in any layer shows; "as expected" holds in all of them.
    """
    rows = changed.astype({"changed": bool, "expected": bool})
    rows["missed"] = rows["expected"] & ~rows["changed"]
    rows["stray"] = rows["changed"] & ~rows["expected"]
    cells = rows.groupby(["call", "slot"])[["expected", "missed", "stray"]].any().reset_index()
    cells["as expected"] = cells["expected"] & ~cells["missed"]
    calls = rows.groupby("call")["T"].first()
    slots = pd.Index(cells["slot"].unique()).sort_values()
    ax = axes(ax, min(1.4 + 0.16 * len(slots), 7), 0.9 + 0.18 * len(calls))
    for kind, look in _CALL_MARKS.items():
        marked = cells[cells[kind]]
        x, y = (
            slots.get_indexer(marked["slot"]) + 0.5,
            calls.index.get_indexer(marked["call"]) + 0.5,
        )
        ax.plot(x, y, ls="", label=f"{kind} ({len(marked)})", **look)
    ax.set(xlim=(0, len(slots)), ylim=(len(calls), 0), xlabel="cache slot", ylabel="call")
    label_cells(ax.xaxis, slots)
    label_cells(ax.yaxis, [f"{call} (T = {T})" for call, T in calls.items()], 24)
    ax.grid()
    return heading(ax, "cache rows changed by each call")
