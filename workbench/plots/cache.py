"""The KV cache: which rows each call changed, which restored caches go on as they should, how soon a token comes."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from workbench.plots.figure import (
    axes,
    grid_cells,
    heading,
    label_cells,
    median_range,
    pivot_in_order,
    style,
    unmeasured_key,
    write_cells,
)

_CALL_MARKS = {
    "as expected": dict(marker="s", color="#0072B2"),
    "missed": dict(marker="s", color="#D55E00", markerfacecolor="none", markeredgewidth=1.2),
    "stray": dict(marker="x", color="#D55E00", markeredgewidth=1.5),
}
_MARKS = {"GREEN": "✓", "ok": "✓", "RED": "✗", "FAIL": "✗"}
_HOLDS = ListedColormap(["#F3B58A", "#DCEBF5"])


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
        x, y = slots.get_indexer(marked["slot"]), calls.index.get_indexer(marked["call"])
        ax.plot(x + 0.5, y + 0.5, ls="", label=f"{kind} ({len(marked)})", **look)
    ax.set(xlim=(0, len(slots)), ylim=(len(calls), 0), xlabel="cache slot", ylabel="call")
    label_cells(ax.xaxis, slots)
    label_cells(ax.yaxis, [f"{call} (T = {T})" for call, T in calls.items()], 24)
    ax.grid()
    return heading(ax, "cache rows changed by each call")


def _marked(ax: Axes, verdicts: pd.DataFrame) -> None:
    """A table of verdicts as cells that say by mark and colour whether they hold; anything else is hatched."""
    marks = verdicts.map(lambda verdict: _MARKS.get(verdict, ""))
    holds = marks.map({"✓": 1.0, "✗": 0.0}.get).astype(float)
    mesh = grid_cells(ax, holds, Normalize(0, 1), _HOLDS)
    label_cells(ax.xaxis, verdicts.columns, verdicts.size)
    label_cells(ax.yaxis, verdicts.index, verdicts.size)
    write_cells(mesh, marks)


@style()
def reuse_matrix(cells: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One mark per cell of the reuse matrix: ``batch``, ``cache``, ``streaming``, ``format``, ``context``, ``verdict``."""
    path = cells["streaming"].map({True: "stream", False: "generate"})
    batch = "batch " + cells["batch"].astype(str)
    cells = cells.assign(row=batch.str.cat([cells["cache"], cells["format"], path], sep="  "))
    rows = cells[~((cells["cache"] == "cold") & (cells["format"] == "q4"))]
    table = pivot_in_order(rows, "row", "context", "verdict").sort_index(axis=1)
    ax = axes(ax, 2.4 + 0.55 * len(table.columns), 0.9 + 0.2 * len(table))
    _marked(ax, table)
    ax.set(xlabel="context (tokens)", ylabel="")
    return heading(ax, "restored caches", unmeasured_key(table.where(table.isin(["GREEN", "RED"]))))


@style()
def failure_patterns(results: pd.DataFrame) -> Figure:
    """Hypothesis × configuration, a panel per context: ``hypothesis``, ``context``, ``cache``, ``path``, ``result`` (ok
    or FAIL); the first hypothesis is set apart."""
    names, contexts = results["hypothesis"].drop_duplicates(), sorted(results["context"].unique())
    size = (2.1 + 1.6 * len(contexts), 1.5 + 0.24 * len(names))
    figure, panels = plt.subplots(1, len(contexts), figsize=size, sharey=True, squeeze=False)
    for ax, context in zip(panels[0], contexts):
        part = results[results["context"] == context]
        where = part["cache"] + ", " + part["path"]
        table = part.assign(where=where).pivot(index="hypothesis", columns="where", values="result")
        _marked(ax, table.loc[names])
        ax.tick_params(axis="x", rotation=60)
        ax.axhline(1, color="black", linewidth=1.2)
        ax.set(title=f"context {context}", xlabel="", ylabel="")
    figure.suptitle(
        "✗: not the tokens and logits of the session decoded alone", x=0.02, ha="left", fontsize=9
    )
    return figure


@style()
def first_token(samples: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time to the first token over the context: ``temperature``, ``context`` (tokens), ``ms``, one row per repetition;
    medians, bars from the least to the largest."""
    ax = axes(ax, 4.8, 3.0)
    median_range(ax, samples, "context", "ms", "temperature")
    ax.set(yscale="log", xlabel="context (tokens)", ylabel="ms to the first token")
    ax.xaxis.minorticks_off()
    return heading(ax, "time to the first token, median and range")
