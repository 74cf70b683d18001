"""Kept caches: which cells of the reuse matrix hold, which failures planted hypotheses give, how soon a token comes."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from workbench.plots.figure import axes, grid_cells, legend_above, style, unmeasured_key

_MARKS = {"GREEN": "✓", "ok": "✓", "RED": "✗", "FAIL": "✗"}
_HOLDS = ListedColormap(["#F3B58A", "#DCEBF5"])


def _marked(ax: Axes, verdicts: pd.DataFrame) -> None:
    """A table of verdicts as cells that say by mark and colour whether they hold; anything else is hatched."""
    marks = verdicts.map(_MARKS.get)
    grid_cells(ax, marks.map({"✓": 1.0, "✗": 0.0}.get).astype(float), Normalize(0, 1), _HOLDS)
    ax.set_xticks([i + 0.5 for i in range(verdicts.shape[1])], labels=[str(c) for c in verdicts.columns])
    ax.set_yticks([i + 0.5 for i in range(verdicts.shape[0])], labels=[str(r) for r in verdicts.index])
    for y, row in enumerate(marks.to_numpy()):
        for x, mark in enumerate(row):
            ax.text(x + 0.5, y + 0.5, mark or "", ha="center", va="center", weight="bold" if mark == "✗" else "normal")


@style()
def reuse_matrix(found: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One mark per cell of the reuse matrix: ``batch``, ``cache``, ``streaming``, ``format``, ``context``, ``verdict``."""
    path = found["streaming"].map({True: "stream", False: "generate"})
    label = "batch " + found["batch"].astype(str) + "  " + found["cache"] + "  " + found["format"] + "  " + path
    shown = found.assign(row=label)[~((found["cache"] == "cold") & (found["format"] == "q4"))]
    table = shown.pivot(index="row", columns="context", values="verdict").loc[shown["row"].drop_duplicates()]
    ax = axes(ax, 2.4 + 0.55 * len(table.columns), 0.9 + 0.2 * len(table))
    _marked(ax, table)
    ax.set(xlabel="context (tokens)", ylabel="")
    ax.set_title("restored caches")
    legend_above(ax, [unmeasured_key()] * bool((~table.isin(["GREEN", "RED"])).any(axis=None)))
    return ax


@style()
def failure_patterns(found: pd.DataFrame) -> Figure:
    """Hypothesis × configuration, a panel per context: ``hypothesis``, ``context``, ``cache``, ``path``, ``result`` (ok
    or FAIL); the first hypothesis is set apart."""
    names, contexts = found["hypothesis"].drop_duplicates(), sorted(found["context"].unique())
    size = (2.1 + 1.6 * len(contexts), 1.5 + 0.24 * len(names))
    figure, panels = plt.subplots(1, len(contexts), figsize=size, sharey=True, squeeze=False)
    for ax, context in zip(panels[0], contexts):
        part = found[found["context"] == context].assign(where=lambda rows: rows["cache"] + ", " + rows["path"])
        _marked(ax, part.pivot(index="hypothesis", columns="where", values="result").loc[names])
        ax.tick_params(axis="x", rotation=60)
        ax.axhline(1, color="black", linewidth=1.2)
        ax.set(title=f"context {context}", xlabel="", ylabel="")
    figure.suptitle("✗: not the tokens and logits of the session decoded alone", x=0.02, ha="left", fontsize=9)
    return figure


@style()
def first_token(samples: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time to the first token over the context: ``temperature``, ``context`` (tokens), ``ms``, one row per repetition;
    medians, bars from the least to the largest."""
    ax = axes(ax, 4.8, 3.0)
    for name, line in samples.groupby("temperature", sort=False):
        found = line.groupby("context")["ms"].agg(["median", "min", "max"])
        spread = [found["median"] - found["min"], found["max"] - found["median"]]
        ax.errorbar(found.index, found["median"], yerr=spread, capsize=2.5, elinewidth=0.8, label=name)
    contexts = sorted(samples["context"].unique())
    ax.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="ms to the first token")
    ax.set_xticks(contexts, labels=[str(n) for n in contexts])
    ax.xaxis.minorticks_off()
    ax.grid(axis="y")
    ax.set_title("time to the first token, median and range")
    legend_above(ax, ax.get_legend_handles_labels()[0])
    return ax
