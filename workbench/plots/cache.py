"""Figures of the KV cache: rows changed by each call, verdicts on restored caches, time
to the first token."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from workbench.plots.figure import (
    COLUMN,
    PAGE,
    axes,
    counts_in_words,
    grid_cells,
    heading,
    label_cells,
    median_range,
    style,
    unmeasured_key,
    write_cells,
)

_CALL_MARKS = {
    "as expected": dict(marker="s", color="#0072B2"),
    "missed": dict(
        marker="s", color="#D55E00", markerfacecolor="none", markeredgewidth=1.2
    ),
    "stray": dict(marker="x", color="#D55E00", markeredgewidth=1.5),
}
_MARKS = {"GREEN": "✓", "ok": "✓", "RED": "✗", "FAIL": "✗"}
_HOLDS = ListedColormap(["#F3B58A", "#DCEBF5"])


@style()
def cache_rows(changed: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Call × row: a filled mark for a row written as expected, a hollow one for a
    missed row, a cross for a row that should not have changed.

    `changed`: ``call``, ``T``, ``slot`` (the row's number), ``layer``, and the booleans
    ``changed`` and ``expected``, for up to about 100 rows. A fault in any layer shows;
    "as expected" holds in all of them."""
    rows = changed.astype({"changed": bool, "expected": bool})
    rows["missed"] = rows["expected"] & ~rows["changed"]
    rows["stray"] = rows["changed"] & ~rows["expected"]
    groups = rows.groupby(["call", "slot"], as_index=False)
    cells = groups[["expected", "missed", "stray"]].any()
    cells["as expected"] = cells["expected"] & ~cells["missed"]
    calls = rows.groupby("call")["T"].first()
    expected = rows[rows["expected"]]
    starts = expected.groupby("call")["slot"].min()
    starts = starts.reindex(calls.index)
    slots = pd.Index(cells["slot"].unique()).sort_values()
    width = PAGE
    if len(slots) <= 32:
        width = PAGE * 0.7
    ax = axes(ax, width, 0.9 + 0.16 * len(calls))
    for kind, look in _CALL_MARKS.items():
        marked = cells[cells[kind]]
        x = slots.get_indexer(marked["slot"])
        y = calls.index.get_indexer(marked["call"])
        label = f"{kind} ({len(marked)})"
        ax.plot(x + 0.5, y + 0.5, ls="", label=label, **look)
    ax.set(xlim=(0, len(slots)), xlabel="cache row")
    ax.set(ylim=(len(calls), 0), ylabel="call")
    label_cells(ax.xaxis, slots)
    names = []
    for call, T in calls.items():
        names.append(f"T = {T}, pos {starts[call]:g}")
    label_cells(ax.yaxis, names, 24)
    ax.grid()
    return heading(ax, "cache rows changed by each call")


def _marked(
    ax: Axes, verdicts: pd.DataFrame, texts: pd.DataFrame | None = None
) -> None:
    """Draws a table of verdicts as marked and coloured cells; other values are hatched.
    Texts that are not null replace the marks."""
    marks = verdicts.map(lambda verdict: _MARKS.get(verdict, ""))
    holds = marks.map({"✓": 1.0, "✗": 0.0}.get).astype(float)
    mesh = grid_cells(ax, holds, Normalize(0, 1), _HOLDS)
    label_cells(ax.xaxis, verdicts.columns, verdicts.size)
    label_cells(ax.yaxis, verdicts.index, verdicts.size)
    write_cells(mesh, marks if texts is None else texts.fillna(marks))


@style()
def reuse_matrix(cells: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The reuse matrix: ``batch``, ``cache``, ``streaming``, ``format``, ``context``,
    ``verdict``. A cell for batch, cache and format over the context has a mark if both
    paths (stream, generate) pass, else the names of those that fail."""
    path = cells["streaming"].map({True: "stream", False: "generate"})
    batch = "batch " + cells["batch"].astype(str)
    row = batch + ", " + cells["cache"] + ", " + cells["format"]
    cells = cells.assign(row=row, path=path)
    impossible = (cells["cache"] == "cold") & (cells["format"] == "q4")
    cells = cells[~impossible]
    groups = cells.groupby(["row", "context"], sort=False)
    verdicts = groups["verdict"].agg(_together)
    verdicts = verdicts.unstack().sort_index(axis=1)
    red = cells[cells["verdict"] == "RED"]
    paths = red.groupby(["row", "context"])["path"]
    failing = paths.agg("\n✗ ".join)
    table = verdicts.loc[cells["row"].drop_duplicates()]
    ax = axes(ax, PAGE * 0.7, 0.9 + 0.2 * len(table))
    texts = failing.unstack().reindex_like(table)
    _marked(ax, table, texts.map(lambda names: f"✗ {names}", na_action="ignore"))
    ax.set(xlabel="context (tokens)", ylabel="")
    green = int((cells["verdict"] == "GREEN").sum())
    count = len(cells)
    title = f"restored caches: {green} of {count} sessions go on as they would alone"
    measured = table.where(table.isin(["GREEN", "RED"]))
    return heading(ax, title, unmeasured_key(measured))


def _together(verdicts: pd.Series) -> str:
    """RED if one is, GREEN if all are."""
    for verdict in ("RED", "not_run"):
        if verdict in set(verdicts):
            return verdict
    return "GREEN"


@style()
def failure_patterns(results: pd.DataFrame) -> Figure:
    """Hypothesis × configuration, a panel per context: ``hypothesis``, ``context``,
    ``cache``, ``path``, ``result`` (ok or FAIL), one session for each cell; the first
    hypothesis is set apart."""
    words = results["hypothesis"].str.replace("_", " ")
    results = results.assign(hypothesis=words.replace("none", "no fault planted"))
    names = results["hypothesis"].drop_duplicates()
    contexts = sorted(results["context"].unique())
    size = (PAGE, 1.5 + 0.24 * len(names))
    figure, panels = plt.subplots(
        1, len(contexts), figsize=size, sharey=True, squeeze=False
    )
    for ax, context in zip(panels[0], contexts):
        part = results[results["context"] == context]
        where = part["cache"] + ", " + part["path"]
        table = part.assign(where=where).pivot(
            index="hypothesis", columns="where", values="result"
        )
        _marked(ax, table.loc[names])
        ax.tick_params(axis="x", rotation=60)
        ax.axhline(1, color="black", linewidth=1.2)
        ax.set(title=f"context {context}", xlabel="", ylabel="")
    title = (
        "✗: not the tokens and logits of the session decoded alone; one session a cell"
    )
    figure.suptitle(title, x=0.02, ha="left", fontsize=9)
    return figure


@style()
def first_token(samples: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time to the first token over the context: ``temperature``, ``context`` (tokens),
    ``ms``, one row per repetition; medians, bars from the least to the largest."""
    ax = axes(ax, COLUMN, 2.8)
    median_range(ax, samples, "context", "ms", "temperature")
    ax.set(yscale="log", xlabel="context (tokens)", ylabel="ms to the first token")
    ax.xaxis.minorticks_off()
    count = counts_in_words(samples.groupby(["context", "temperature"]).size())
    return heading(ax, f"time to the first token, median and range, n = {count}")
