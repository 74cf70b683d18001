"""Stored caches: which cells of the reuse matrix hold, which failures planted hypotheses give, how soon a token comes."""

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

_MARKS = {"GREEN": "✓", "ok": "✓", "RED": "✗", "FAIL": "✗"}
_HOLDS = ListedColormap(["#F3B58A", "#DCEBF5"])


def _marked(ax: Axes, verdicts: pd.DataFrame) -> None:
    """A table of verdicts as cells that say by mark and colour whether they hold; anything else is hatched."""
    marks = verdicts.map(_MARKS.get)
    grid_cells(ax, marks.map({"✓": 1.0, "✗": 0.0}.get).astype(float), Normalize(0, 1), _HOLDS)
    label_cells(ax.xaxis, verdicts.columns, verdicts.size)
    label_cells(ax.yaxis, verdicts.index, verdicts.size)
    write_cells(
        ax, marks, lambda mark: mark or "", weight=lambda mark: "bold" if mark == "✗" else "normal"
    )


@style()
def reuse_matrix(cells: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One mark per cell of the reuse matrix: ``batch``, ``cache``, ``streaming``, ``format``, ``context``, ``verdict``."""
    path = cells["streaming"].map({True: "stream", False: "generate"})
    label = (
        "batch "
        + cells["batch"].astype(str)
        + "  "
        + cells["cache"]
        + "  "
        + cells["format"]
        + "  "
        + path
    )
    rows = cells.assign(row=label)[~((cells["cache"] == "cold") & (cells["format"] == "q4"))]
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
        part = results[results["context"] == context].assign(
            where=lambda rows: rows["cache"] + ", " + rows["path"]
        )
        _marked(ax, part.pivot(index="hypothesis", columns="where", values="result").loc[names])
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
