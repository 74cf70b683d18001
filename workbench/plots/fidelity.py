"""How far an export is from its golden: heatmaps over layer × position, and bars of what each ingredient is worth.

Colour says how far on a fixed scale; a cross says that a threshold is broken, so that no verdict rests on colour.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    ink,
    label_cells,
    note,
    pivot_in_order,
    style,
    unmeasured_key,
)

MAX_TOKEN_LABELS = 64
_METRICS = {
    "1-cosine": ("1 − cosine", LogNorm, (1e-6, 1e-1)),
    "error": ("relative RMS error", LogNorm, (1e-6, 1e0)),
    "max_abs": ("largest absolute error", LogNorm, (1e-6, 1e2)),
    "psnr_db": ("PSNR (dB)", Normalize, (0.0, 120.0)),
}


@dataclass(frozen=True)
class View:
    """What a heatmap shows of the log's table `fidelity`.

    `metric` is ``error``, ``1-cosine``, ``max_abs`` or ``psnr_db``. Cells beyond `threshold` (in the metric's unit) and
    cells whose result is not finite are crossed; cells without a measurement are hatched. `budget` says how many times
    the rows' own ``budget`` (what rounding alone costs) an ``error`` may be; the colours then end there. `limits` fix the colour scale, so that
    figures compare; values outside take the colour of the nearer end. `tokens[position]` names the positions where there
    are at most 64.
    """

    tensor: str = "update"
    mode: str = "isolated"
    metric: str = "1-cosine"
    threshold: float | None = None
    budget: float | None = None
    tokens: Sequence[str] | None = None
    limits: tuple[float, float] | None = None

    def measured(self, fidelity: pd.DataFrame) -> pd.DataFrame:
        """The rows of this tensor and mode, at any T."""
        return fidelity[(fidelity["tensor"] == self.tensor) & (fidelity["mode"] == self.mode)]

    def draw(self, ax: Axes, fidelity: pd.DataFrame, T: int) -> tuple[QuadMesh, list[Artist]]:
        """One heatmap without title and scale; returns the mesh and legend entries for the marks that occur.

        It spans the layers and positions measured at any T, so that figures at several T line up.
        """
        measured = self.measured(fidelity)
        rows = measured[measured["T"] == T]
        if rows.empty or rows.duplicated(["layer", "position"]).any():
            problem = "several rows for one layer and position" if len(rows) else "no rows"
            raise ValueError(
                f"fidelity: {problem}; filter to one run, runtime and precision, and to a T that was measured"
            )
        label, scale, limits = _METRICS[self.metric]
        if self.budget is not None and measured["budget"].notna().any():
            # from below the least budget to what the largest allows
            limits = measured["budget"].min() / 4, measured["budget"].max() * self.budget
        least, most = self.limits or limits
        value = (1 - rows["cosine"] if self.metric == "1-cosine" else rows[self.metric]).astype(
            float
        )
        infinite = ~rows["finite"].fillna(True).astype(bool)
        threshold = np.nan if self.threshold is None else self.threshold
        limit = f"{threshold:g}"
        if self.budget is not None:
            limit, threshold = (
                f"{self.budget:g} × budget",
                self.budget * rows["budget"].astype(float),
            )
        if self.metric == "psnr_db":  # small values fail; bright colours lie on the failing side
            colours, off_scale, beyond, sign = "cividis_r", least - 1, value < threshold, "<"
        else:
            colours, off_scale, beyond, sign = "cividis", 2 * most, value > threshold, ">"
        cell = value.clip(least, most).mask(infinite, off_scale)
        table = rows.assign(cell=cell, crossed=beyond | infinite).pivot(
            index="layer", columns="position", values=["cell", "crossed"]
        )
        layers, positions = (measured[c].sort_values().unique() for c in ("layer", "position"))
        cells, crossed = (
            table[c].reindex(index=layers, columns=positions) for c in ("cell", "crossed")
        )
        colours = matplotlib.colormaps[colours].with_extremes(over="black", under="black")
        mesh = grid_cells(ax, cells, scale(least, most), colours)
        if self.tokens is not None and len(positions) <= MAX_TOKEN_LABELS:
            names = [_printable(self.tokens[position]) for position in positions]
            label_cells(ax.xaxis, names, MAX_TOKEN_LABELS)
            ax.tick_params(axis="x", rotation=90)
            for text in ax.get_xticklabels():
                text.set_parse_math(False)
        if self.tensor == "logits":  # they belong to no layer
            ax.set(ylabel="", yticks=[])
        y, x = np.nonzero(crossed.eq(True).to_numpy())
        ax.scatter(x + 0.5, y + 0.5, s=14, marker="x", linewidths=1, color=ink(mesh)[y, x])
        keys = []
        if beyond.any():
            broken = f"{label} {sign} {limit}"
            keys.append(Line2D([], [], linestyle="", marker="x", color="black", label=broken))
        if infinite.any():
            keys.append(Patch(facecolor="black", label="not finite"))
        return mesh, keys + unmeasured_key(cells)

    def scale(self, mesh: QuadMesh, ax: Axes | list[Axes], fidelity: pd.DataFrame) -> None:
        """Draws the colour bar, with a line at the threshold, or at the least and the largest budget of the rows."""
        bar = mesh.figure.colorbar(
            mesh, ax=ax, label=_METRICS[self.metric][0], pad=0.02, extend="neither"
        )
        bar.outline.set_visible(False)
        marks = [] if self.threshold is None else [self.threshold]
        if self.budget is not None and (budgets := self.measured(fidelity)["budget"]).notna().any():
            marks += [budgets.min(), budgets.max()]
            bar.set_label(f"{_METRICS[self.metric][0]} (lines: least and largest budget)")
        for mark in marks:
            bar.ax.axhline(mark, color="white", linewidth=2)
            bar.ax.axhline(mark, color="black", linewidth=1, marker="")


@style()
def fidelity_heatmap(fidelity: pd.DataFrame, *, T: int, ax: Axes | None = None, **options) -> Axes:
    """Layer × position of one metric at one T; `options` are the fields of a `View`.

    `fidelity` has the columns of the log's table of that name and, for this `T`, tensor and mode, at most one row per
    layer and position.
    """
    ax, view = axes(ax, 6.5, 3.2), View(**options)
    mesh, keys = view.draw(ax, fidelity, T)
    view.scale(mesh, ax, fidelity)
    return heading(ax, f"{view.tensor}, {view.mode}, T = {T}", keys)


@style()
def fidelity_grid(
    fidelity: pd.DataFrame, Ts: Iterable[int], *, columns: int = 2, **options
) -> Figure:
    """`fidelity_heatmap` at several T as small multiples with one colour scale; `options` are the fields of a `View`."""
    Ts, view = list(Ts), View(**options)
    rows = -(-len(Ts) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(7, 0.7 + 2 * rows), squeeze=False)
    keys = {}
    for i, (ax, T) in enumerate(zip(grid.flat, Ts)):
        mesh, marks = view.draw(ax, fidelity, T)
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
    figure.suptitle(f"{view.tensor}, {view.mode}", x=0.01, ha="left", fontsize=9)
    if keys:
        figure.legend(handles=list(keys.values()), loc="outside upper right", ncols=len(keys))
    view.scale(mesh, list(grid.flat[: len(Ts)]), fidelity)
    return figure


def _printable(token: str) -> str:
    """Token text with visible white space, at most 12 characters, only glyphs that the font has."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    visible = token.translate(str.maketrans(" \n\t", "␣↵⇥"))
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
    bars = ax.barh(
        table.index, table["update"], 0.6, color="#56B4E9", edgecolor="#0072B2", label="update"
    )
    for bar, (row, value) in zip(bars, table["update"].items()):
        hatch, cross = ("////", " ×") if value < threshold else (None, "")
        bar.set_hatch(hatch)
        ax.text(1.03, row, f"{value:.4f}{cross}", va="center")
    limit = f"threshold {threshold:g} (× fails)"
    keys = [bars, ax.axvline(threshold, color="black", linewidth=1, linestyle="--", label=limit)]
    if "hidden" in table:
        ring = {"color": "black", "markerfacecolor": "white", "label": "hidden state"}
        keys += ax.plot(table["hidden"], table.index, "o", **ring)
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
    rows = parts.set_index("layer").drop(columns=["rss", "cross", "run_id"], errors="ignore")
    row = rows.loc[layer].astype(float)
    ax = axes(ax, 4.5, 0.9 + 0.25 * len(row))
    least = row[row > 0].min() / 10
    lengths = row.where(row > 0, least)
    ax.barh(row.index, lengths, 0.6, color=np.where(row.index == "total", "0.4", "#0072B2"))
    for name, value in row.items():
        note(ax, "not measured" if pd.isna(value) else f"{value:.2g}", lengths[name], name)
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
