"""How far an export is from its golden: heatmaps over layer × position, and bars of what each ingredient is worth.

Colour says how far on a fixed scale; a cross says that a threshold is broken, so that no verdict rests on colour.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.plots.figure import (
    axes,
    grid_cells,
    heading,
    label_cells,
    pivot_in_order,
    style,
    unmeasured_key,
)

MAX_TOKEN_LABELS = 64


class _Metric(NamedTuple):
    label: str
    norm: type[Normalize]
    limits: tuple[float, float]
    fails: Callable
    """Whether a value is beyond a threshold; bright colours lie on that side."""
    colours: str


_METRICS = {
    "1-cosine": _Metric("1 − cosine", LogNorm, (1e-6, 1e-1), operator.gt, "cividis"),
    "error": _Metric("relative RMS error", LogNorm, (1e-6, 1e0), operator.gt, "cividis"),
    "max_abs": _Metric("largest absolute error", LogNorm, (1e-6, 1e2), operator.gt, "cividis"),
    "psnr_db": _Metric("PSNR (dB)", Normalize, (0.0, 120.0), operator.lt, "cividis_r"),
}


@style()
def fidelity_heatmap(
    fidelity: pd.DataFrame,
    *,
    T: int,
    tensor: str = "update",
    mode: str = "isolated",
    metric: str = "1-cosine",
    tokens: Sequence[str] | None = None,
    threshold: float | None = None,
    budget: float | None = None,
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Layer × position of one metric (``error``, ``1-cosine``, ``max_abs`` or ``psnr_db``) at one T.

    `fidelity` has the columns of the log's table of that name and, for this `T`, `tensor` and `mode`, at most one row
    per layer and position. Cells beyond `threshold` (in the metric's unit) and cells whose result is not finite are
    crossed; cells without a measurement are hatched. `budget` says how many times the rows' own
    ``budget`` (what rounding alone costs) an ``error`` may be; the colour bar shows the budgets' range. `limits` fix the colour scale, so that figures compare; values
    outside take the colour of the nearer end. `tokens[position]` names the positions where there are at most 64.
    """
    ax = axes(ax, 6.5, 3.2)
    mesh, keys = _draw(ax, fidelity, T, tensor, mode, metric, threshold, budget, tokens, limits)
    _scale(mesh, ax, metric, threshold, fidelity if budget else None)
    return heading(ax, f"{tensor}, {mode}, T = {T}", keys)


@style()
def fidelity_grid(
    fidelity: pd.DataFrame,
    Ts: Iterable[int],
    *,
    tensor: str = "update",
    mode: str = "isolated",
    metric: str = "1-cosine",
    threshold: float | None = None,
    budget: float | None = None,
    columns: int = 2,
    **options,
) -> Figure:
    """`fidelity_heatmap` at several T as small multiples with one colour scale; `options` are its `tokens` and `limits`."""
    Ts = list(Ts)
    rows = -(-len(Ts) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(7, 0.7 + 2 * rows), squeeze=False)
    keys = {}
    for i, (ax, T) in enumerate(zip(grid.flat, Ts)):
        mesh, marks = _draw(ax, fidelity, T, tensor, mode, metric, threshold, budget, **options)
        keys |= {key.get_label(): key for key in marks}
        ax.set_title(f"T = {T}")
        if i % columns:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        if i + columns < len(Ts):
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    for ax in grid.flat[len(Ts) :]:
        ax.remove()
    figure.suptitle(f"{tensor}, {mode}", x=0.01, ha="left", fontsize=9)
    if keys:
        figure.legend(handles=list(keys.values()), loc="outside upper right", ncols=len(keys))
    _scale(mesh, list(grid.flat[: len(Ts)]), metric, threshold, fidelity if budget else None)
    return figure


def _draw(
    ax, fidelity, T, tensor, mode, metric, threshold, budget=None, tokens=None, limits=None
) -> tuple[QuadMesh, list[Artist]]:
    """One heatmap without title and scale; returns the mesh and legend entries for the marks that occur."""
    measured = fidelity[(fidelity["tensor"] == tensor) & (fidelity["mode"] == mode)]
    rows = measured[measured["T"] == T]
    kind = _METRICS[metric]
    norm = kind.norm(*(limits or kind.limits))
    value = (1 - rows["cosine"] if metric == "1-cosine" else rows[metric]).astype(float)
    infinite = ~rows["finite"].fillna(True).astype(bool)
    if budget is not None:
        beyond = value > budget * rows["budget"].astype(float)
    else:
        beyond = kind.fails(value, np.nan if threshold is None else threshold)
    off_scale = 2 * norm.vmax if kind.fails(1, 0) else norm.vmin - 1
    cells = _pivot(rows, value.clip(norm.vmin, norm.vmax).mask(infinite, off_scale), measured)
    mesh = grid_cells(
        ax,
        cells,
        norm,
        matplotlib.colormaps[kind.colours].with_extremes(over="black", under="black"),
    )
    if tokens is not None and len(cells.columns) <= MAX_TOKEN_LABELS:
        label_cells(
            ax.xaxis, [_printable(tokens[position]) for position in cells.columns], MAX_TOKEN_LABELS
        )
        ax.tick_params(axis="x", rotation=90)
        for text in ax.get_xticklabels():
            text.set_parse_math(False)
    if tensor == "logits":  # they belong to no layer
        ax.set(ylabel="", yticks=[])
    y, x = np.nonzero(_pivot(rows, beyond | infinite, measured).eq(True).to_numpy())
    dark = mesh.to_rgba(cells.to_numpy()[y, x])[:, :3].mean(axis=1) < 0.5
    ax.scatter(
        x + 0.5, y + 0.5, s=14, marker="x", linewidths=1, color=np.where(dark, "white", "black")
    )
    keys = []
    if beyond.any():
        limit = f"{threshold:g}" if budget is None else f"{budget:g} × budget"
        broken = f"{kind.label} {'>' if kind.fails(1, 0) else '<'} {limit}"
        keys.append(Line2D([], [], linestyle="", marker="x", color="black", label=broken))
    if infinite.any():
        keys.append(Patch(facecolor="black", label="not finite"))
    return mesh, keys + unmeasured_key(cells)


def _pivot(rows: pd.DataFrame, cell: pd.Series, measured: pd.DataFrame) -> pd.DataFrame:
    """Layer × position over whatever was measured at any T, so that figures at several T line up."""
    if rows.empty or rows.duplicated(["layer", "position"]).any():
        problem = "several rows for one layer and position" if len(rows) else "no rows"
        raise ValueError(
            f"fidelity: {problem}; filter to one run, runtime and precision, and to a T that was measured"
        )
    layers, positions = (measured[name].sort_values().unique() for name in ("layer", "position"))
    grid = rows.assign(cell=cell).pivot(index="layer", columns="position", values="cell")
    return grid.reindex(index=layers, columns=positions)


def _scale(
    mesh: QuadMesh,
    ax: Axes | list[Axes],
    metric: str,
    threshold: float | None,
    budgets: pd.DataFrame | None = None,
) -> None:
    """The colour bar, with a line at the threshold, or lines at the least and the largest of the rows' `budgets`."""
    bar = mesh.figure.colorbar(
        mesh, ax=ax, label=_METRICS[metric].label, pad=0.02, extend="neither"
    )
    bar.outline.set_visible(False)
    marks = [] if threshold is None else [threshold]
    if budgets is not None and budgets["budget"].notna().any():
        marks += [budgets["budget"].min(), budgets["budget"].max()]
        bar.set_label(f"{_METRICS[metric].label} (lines: least and largest budget)")
    for mark in marks:
        bar.ax.axhline(mark, color="white", linewidth=2)
        bar.ax.axhline(mark, color="black", linewidth=1, marker="")


def _printable(token: str) -> str:
    """Token text with visible white space, at most 12 characters, only glyphs that the font has."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    visible = token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    short = visible if len(visible) <= 12 else visible[:11] + "…"
    return "".join(
        letter if ord(letter) in glyphs and letter.isprintable() else "□" for letter in short
    )


@style()
def update_cosine_bars(
    ablations: pd.DataFrame, *, threshold: float = 0.97, ax: Axes | None = None
) -> Axes:
    """What leaving out each ingredient does: a bar to the cosine of the update, a ring at that of the hidden state.

    `ablations`: ``ingredient``, ``tensor`` (``update``, and ``hidden`` where it was measured) and ``cosine``; one bar
    per ingredient, in the order given. Bars that fail `threshold` are hatched and their figure is crossed.
    """
    table = pivot_in_order(ablations, "ingredient", "tensor", "cosine").astype(float)
    ax = axes(ax, 5.5, 0.8 + 0.28 * len(table))
    fails = table["update"] < threshold
    bars = ax.barh(
        table.index, table["update"], 0.6, color="#56B4E9", edgecolor="#0072B2", label="update"
    )
    for bar, (row, value), failed in zip(bars, table["update"].items(), fails):
        bar.set_hatch("////" if failed else None)
        ax.text(1.03, row, f"{value:.4f}{' ×' if failed else ''}", va="center")
    limit = ax.axvline(
        threshold,
        color="black",
        linewidth=1,
        linestyle="--",
        label=f"threshold {threshold:g} (× fails)",
    )
    keys = [bars, limit]
    if "hidden" in table:
        keys += ax.plot(
            table["hidden"],
            table.index,
            "o",
            color="black",
            markerfacecolor="white",
            label="hidden state",
        )
    ax.invert_yaxis()
    ax.set(xlabel="cosine", xlim=(min(0.0, table.min(axis=None)), 1.18))
    ax.tick_params(axis="y", length=0)
    return heading(ax, "one ingredient left out", keys)


@style()
def error_parts(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Where the error of each layer comes from: one line per part on a log scale, the total dashed.

    `parts`: ``layer``, one column per part (``storage``, ``quantization`` …) and ``total``, each a relative RMS. Lines,
    not a stack, since the parts are vectors and their norms do not add. A part that was not measured is left out.
    """
    lines = parts.set_index("layer").sort_index().astype(float).dropna(axis="columns", how="all")
    return _part_lines(axes(ax, 6.0, 2.8), lines, "parts of the error")


def _part_lines(ax: Axes, lines: pd.DataFrame, title: str) -> Axes:
    """One line per column of `lines` over its index, the column `total` dashed; a log scale has no place for zeros."""
    for name, line in lines.drop(columns="total").items():
        ax.plot(line.index, line, label=name if (line > 0).any() else f"{name} (0)")
    ax.plot(lines.index, lines["total"], color="black", linestyle="--", marker="", label="total")
    ax.set(xlabel=lines.index.name, ylabel="relative RMS error", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y")
    return heading(ax, title)


@style()
def layer_parts(parts: pd.DataFrame, *, layer: int, ax: Axes | None = None) -> Axes:
    """How the error of one layer splits: a bar per part on a log scale, with its figure; parts not measured say so.

    `parts`: ``layer``, one column per part and ``total``, each a relative RMS; columns ``rss``, ``cross`` are left out.
    """
    row = (
        parts[parts["layer"] == layer]
        .iloc[0]
        .drop(["layer", "rss", "cross", "run_id"], errors="ignore")
        .astype(float)
    )
    ax = axes(ax, 4.5, 0.9 + 0.25 * len(row))
    least = row[row > 0].min() / 10
    ax.barh(
        row.index,
        row.where(row > 0, least),
        0.6,
        color=["#0072B2" if name != "total" else "0.4" for name in row.index],
    )
    for name, value in row.items():
        text = "not measured" if value != value else f"{value:.2g}"
        ax.annotate(
            text,
            (value if value > 0 else least, name),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set(xscale="log", xlabel="relative RMS error", xlim=(least, 8 * row.max()))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    return heading(ax, f"error of layer {layer}, split")


@style()
def error_by_position(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Error along the sequence: one line per part on a log scale, the median over layers; the total dashed.

    `parts`: ``layer``, ``position``, one column per part and ``total``, each a relative RMS. Parts that are zero
    everywhere are left out.
    """
    lines = parts.drop(columns="layer").groupby("position").median()
    lines = lines.loc[:, (lines > 0).any()]
    return _part_lines(
        axes(ax, 6.0, 2.8), lines.where(lines > 0), "parts of the error along the sequence"
    )
