"""Figures of the error of an export against its golden: heatmaps by layer and position,
error parts, ablations.

Colours show the error on a fixed scale; a cross marks a broken threshold, so that no
verdict depends on colour."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.plots.figure import (
    PAGE,
    PALETTE,
    axes,
    colour_bar,
    crosses,
    grid_cells,
    heading,
    ink,
    label_cells,
    note,
    panels_heading,
    pivot_in_order,
    style,
    unmeasured_key,
)

MAX_TOKEN_LABELS = 64
SAME = 0.01  # relative difference up to which cells of several T are drawn in one panel
PARTS = ("storage", "reauthoring", "quantization", "precision", "runtime")
_PART_COLOURS = dict(zip(PARTS, PALETTE))  # the same in every figure
METRICS = {
    "1-cosine": ("1 − cosine", LogNorm, (1e-6, 1e-1)),
    "error": ("relative RMS error", LogNorm, (1e-6, 1e0)),
    "max_abs": ("largest absolute error", LogNorm, (1e-6, 1e2)),
    "psnr_db": ("PSNR (dB)", Normalize, (0.0, 120.0)),
}


@dataclass(frozen=True)
class View:
    """The selection and the look of a heatmap of the log's table `fidelity`.

    Cells beyond the threshold and cells whose result is not finite are crossed; cells
    without a measurement are hatched.

    Attributes:
        metric: ``error``, ``1-cosine``, ``max_abs`` or ``psnr_db``.
        threshold: in the metric's unit.
        budget: the limit of an ``error`` as a multiple of the rows' ``budget``, the
            error of rounding alone; the colours then span the values.
        tokens: names of the positions, shown for at most 64.
        limits: of the colour scale: two values, ``fixed`` (of the metric) or ``data``
            (of the values); values outside have the colour of the nearer end.
        boundary: a position before which a line is drawn, such as the end of a window.
    """

    tensor: str = "update"
    mode: str = "isolated"
    metric: str = "1-cosine"
    threshold: float | None = None
    budget: float | None = None
    tokens: Sequence[str] | None = None
    limits: tuple[float, float] | str | None = None
    boundary: int | None = None

    def measured(self, fidelity: pd.DataFrame) -> pd.DataFrame:
        """The rows of this tensor and mode, at any T."""
        rows = fidelity[fidelity["tensor"] == self.tensor]
        return rows[rows["mode"] == self.mode]

    def values(self, rows: pd.DataFrame) -> pd.Series:
        """The metric of each row."""
        if self.metric == "1-cosine":
            return 1 - rows["cosine"].astype(float)
        return rows[self.metric].astype(float)

    def worst(self, fidelity: pd.DataFrame, Ts: Sequence[int]) -> pd.DataFrame:
        """The worst row of several T for every layer and position; a result that is not
        finite is the worst."""
        rows = self.measured(fidelity)
        rows = rows[rows["T"].isin(Ts)].reset_index(drop=True)
        badness = self.values(rows)
        if self.metric == "psnr_db":
            badness = -badness
        badness = badness.mask(~_finite(rows), np.inf)
        order = badness.sort_values(ascending=False, na_position="last").index
        return rows.loc[order].drop_duplicates(["layer", "position"])

    def span(self, rows: pd.DataFrame) -> tuple[float, float]:
        """The ends of the colour scale: `limits`, else those of the metric; with a
        budget, half a decade or more around the values of all `rows`."""
        fixed = METRICS[self.metric][2]
        if self.limits == "fixed" or (self.limits is None and self.budget is None):
            return fixed
        if self.limits not in (None, "data"):
            return self.limits
        values = self.values(rows)
        values = values[np.isfinite(values) & (values > 0)]
        if values.empty:
            return fixed
        least = float(values.min())
        most = float(values.max())
        if self.metric == "psnr_db":
            return least - 1, most + 1
        middle = np.sqrt(least * most)
        reach = max(np.sqrt(most / least), 10**0.25) * 1.05
        return middle / reach, middle * reach

    def draw(self, ax: Axes, fidelity: pd.DataFrame, T: int | Sequence[int]) -> tuple:
        """Draws one heatmap without title and scale, of one T or of the worst of
        several.

        It spans the layers and positions measured at any T, so that figures of several
        T align.

        Returns:
            The mesh, and legend entries for the marks that occur.
        """
        measured = self.measured(fidelity)
        rows = self._cells_at(fidelity, T)
        least, most = self.span(measured)
        value = self.values(rows)
        beyond, broken = self._beyond(rows, value)
        infinite = ~_finite(rows)
        # bright colours are on the failing side: of small values for a PSNR, else of
        # large ones
        colours = "cividis"
        off_scale = 2 * most
        if self.metric == "psnr_db":
            colours = "cividis_r"
            off_scale = least - 1
        cell = value.clip(least, most).mask(infinite, off_scale)
        table = rows.assign(cell=cell, crossed=beyond | infinite)
        table = table.set_index(["layer", "position"])
        table = table[["cell", "crossed"]].unstack()
        layers = measured["layer"].sort_values().unique()
        positions = measured["position"].sort_values().unique()
        cells = table["cell"].reindex(index=layers, columns=positions)
        crossed = table["crossed"].reindex(index=layers, columns=positions)
        colours = matplotlib.colormaps[colours]
        colours = colours.with_extremes(over="black", under="black")
        norm = METRICS[self.metric][1](least, most)
        mesh = grid_cells(ax, cells, norm, colours)
        self._label(ax, list(positions))
        marked = crossed.eq(True).to_numpy()
        crosses(ax, marked, ink(mesh)[marked])
        keys = []
        if beyond.any():
            look = {"linestyle": "", "marker": "x", "color": "black"}
            keys.append(Line2D([], [], label=broken, **look))
        if infinite.any():
            keys.append(Patch(facecolor="black", label="not finite"))
        return mesh, keys + unmeasured_key(cells)

    def _cells_at(self, fidelity: pd.DataFrame, T: int | Sequence[int]) -> pd.DataFrame:
        """The rows of one T, or the worst rows of several: one per layer and
        position."""
        if isinstance(T, int):
            measured = self.measured(fidelity)
            rows = measured[measured["T"] == T]
        else:
            rows = self.worst(fidelity, T)
        if len(rows) and not rows.duplicated(["layer", "position"]).any():
            return rows
        problem = "several rows for one layer and position" if len(rows) else "no rows"
        step = "filter to one run, runtime and precision, and to a T that was measured"
        raise ValueError(f"fidelity: {problem}; {step}")

    def _beyond(self, rows: pd.DataFrame, value: pd.Series) -> tuple[pd.Series, str]:
        """Which rows break the threshold or the budget, and a legend text that names
        it."""
        threshold = self.threshold
        if threshold is None:
            threshold = np.nan
        limit = f"{threshold:g}"
        if self.budget is not None:
            limit = f"{self.budget:g} × budget"
            threshold = self.budget * rows["budget"].astype(float)
        label = METRICS[self.metric][0]
        if self.metric == "psnr_db":
            return value < threshold, f"{label} < {limit}"
        return value > threshold, f"{label} > {limit}"

    def _label(self, ax: Axes, positions: list) -> None:
        """Names positions by their tokens and draws the boundary; logits have no layer
        labels."""
        if self.tokens is not None and len(positions) <= MAX_TOKEN_LABELS:
            names = [_printable(self.tokens[position]) for position in positions]
            label_cells(ax.xaxis, names, MAX_TOKEN_LABELS)
            ax.tick_params(axis="x", rotation=90)
            for text in ax.get_xticklabels():
                text.set_parse_math(False)
        if self.boundary in positions:
            ax.axvline(positions.index(self.boundary), color="white", linewidth=1)
        if self.tensor == "logits":
            ax.set(ylabel="", yticks=[])

    def scale(
        self, mesh: QuadMesh, ax: Axes | list[Axes], fidelity: pd.DataFrame
    ) -> None:
        """Draws the colour bar with a line at the threshold; with a budget a text names
        the least limit of the rows."""
        label = METRICS[self.metric][0]
        bar = colour_bar(mesh, ax, label)
        limit = self.threshold
        budgets = pd.Series(dtype=float)
        if self.budget is not None:
            budgets = self.measured(fidelity)["budget"].dropna()
        if len(budgets):
            limit = self.budget * float(budgets.min())
            text = f"limit: {self.budget:g} × budget, {limit:.2g} or more"
            first = ax[0] if isinstance(ax, list) else ax
            first.set_title(text, loc="right", fontsize=7)
        if limit is not None:
            bar.ax.axhline(limit, color="white", linewidth=2)
            bar.ax.axhline(limit, color="black", linewidth=1, marker="")


@style()
def fidelity_heatmap(
    fidelity: pd.DataFrame, *, T: int, ax: Axes | None = None, **options
) -> Axes:
    """Layer × position of one metric at one T; `options` are the fields of a `View`.

    `fidelity` has the columns of the log's table of that name and, for this `T`, tensor
    and mode, at most one row per layer and position."""
    ax = axes(ax, PAGE, 3.2)
    view = View(**options)
    mesh, keys = view.draw(ax, fidelity, T)
    view.scale(mesh, ax, fidelity)
    return heading(ax, f"{view.tensor}, {view.mode}, T = {T}", keys)


@style()
def fidelity_grid(fidelity: pd.DataFrame, Ts: Iterable[int], **options) -> Figure:
    """Two panels with one colour scale: the least T, and the worst of all others; a
    single panel if they are equal within 1%.

    A cache that is wrong only at T > 1 shows in the second panel alone. `options` are
    the fields of a `View`."""
    options.pop("columns", None)  # of figures that were logged with a panel for each T
    Ts = sorted(Ts)
    first, *others = Ts
    view = View(**options)
    panels = {f"T = {first}": (fidelity, first)}
    if others and _alike(view, fidelity, Ts):
        title = f"T = {_numbers(Ts)}, the same within {SAME:.0%}"
        panels = {title: (fidelity, first)}
    elif others:
        title = f"T = {_numbers(others)}"
        if len(others) > 1:
            title += ": the worst"
        panels[title] = fidelity, others
    return _panels(view, fidelity, panels)


@style()
def fidelity_beside(fidelity: pd.DataFrame, *, by: str, **options) -> Figure:
    """A panel for each value of the column `by`, such as a sound bundle and one with a
    planted fault, of the worst over all T, with one colour scale. `options` are the
    fields of a `View`; `boundary` may also be a mapping from values of `by`."""
    boundary = options.pop("boundary", None)
    view = View(**options)
    view = replace(view, limits=view.span(view.measured(fidelity)))
    panels = {}
    for name, rows in fidelity.groupby(by, sort=False):
        measured = view.measured(rows)
        Ts = sorted(measured["T"].unique().tolist())
        before = boundary
        if isinstance(boundary, dict):
            before = boundary.get(name)
        own = replace(view, boundary=before)
        panels[f"{name}, worst of T = {_numbers(Ts)}"] = rows, Ts, own
    return _panels(view, fidelity, panels)


def _panels(view: View, fidelity: pd.DataFrame, panels: dict[str, tuple]) -> Figure:
    """Heatmaps one below the other. `panels` maps a title to rows of `fidelity`, a T or
    several, of which the worst is drawn, and optionally a view of the panel's own."""
    layers = view.measured(fidelity)["layer"].nunique()
    of_panel = 0.35 + min(max(0.16 * layers, 0.3), 2.5)
    height = 1.1 + len(panels) * of_panel
    figure, grid = plt.subplots(
        len(panels), figsize=(PAGE, height), squeeze=False, sharex=True
    )
    keys = {}
    for ax, (title, (rows, T, *own)) in zip(grid[:, 0], panels.items()):
        drawn = own[0] if own else view
        mesh, marks = drawn.draw(ax, rows, T)
        keys |= {key.get_label(): key for key in marks}
        ax.set_title(title, fontsize=8)
    for ax in grid[:-1, 0]:
        ax.set_xlabel("")
    if keys:
        handles = list(keys.values())
        figure.legend(handles=handles, loc="outside upper right", ncols=len(keys))
    view.scale(mesh, list(grid[:, 0]), fidelity)
    return panels_heading(figure, _title(view))


def _alike(view: View, fidelity: pd.DataFrame, Ts: Sequence[int]) -> bool:
    """Whether the values of every cell at all T are equal within `SAME`."""
    rows = view.measured(fidelity)
    rows = rows[rows["T"].isin(Ts)]
    if not _finite(rows).all():
        return False
    cells = [rows["layer"], rows["position"]]
    values = view.values(rows).groupby(cells)
    span = values.max() - values.min()
    limit = SAME * values.max().abs()
    return bool((span <= limit).all())


def _finite(rows: pd.DataFrame) -> pd.Series:
    """Which rows have a finite result; those that do not say count as finite."""
    return rows["finite"].fillna(True).astype(bool)


def _numbers(Ts: Sequence[int]) -> str:
    """Formats values of T, such as 1, 2, 3, 4 as "1 to 4"."""
    first = Ts[0]
    last = Ts[-1]
    if len(Ts) > 2 and list(Ts) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, Ts))


def _title(view: View) -> str:
    words = {"update": "error of each layer's update", "logits": "error of the logits"}
    how = {
        "isolated": "each layer fed Hugging Face's input",
        "chained": "all layers in a row",
    }
    tensor = words.get(view.tensor, f"error of {view.tensor}")
    return f"{tensor}, {how.get(view.mode, view.mode)}"


def _printable(token: str) -> str:
    """Token text with visible white space, at most 12 characters, only glyphs that the
    font has."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    text = token.translate(str.maketrans(" \n\t", "␣↵⇥"))
    if len(text) > 12:
        text = text[:11] + "…"
    for letter in set(text):
        if ord(letter) not in glyphs or not letter.isprintable():
            text = text.replace(letter, "□")
    return text


@style()
def update_cosine_bars(
    ablations: pd.DataFrame, *, threshold: float = 0.97, ax: Axes | None = None
) -> Axes:
    """What leaving out each ingredient does: a bar to the cosine of the update, a ring
    at that of the hidden state.

    `ablations`: ``ingredient``, ``tensor`` (``update``, and ``hidden`` where it was
    measured) and ``cosine``; one bar per ingredient, in the order given. The figures of
    bars below `threshold` are crossed."""
    table = pivot_in_order(ablations, "ingredient", "tensor", "cosine").astype(float)
    ax = axes(ax, PAGE * 0.8, 0.8 + 0.28 * len(table))
    bars = ax.barh(
        table.index,
        table["update"],
        0.6,
        color="#56B4E9",
        edgecolor="#0072B2",
        label="update",
    )
    beside = ax.get_yaxis_transform()
    for row, value in table["update"].items():
        cross = " ×" if value < threshold else ""
        ax.text(1.02, row, f"{value:.4f}{cross}", va="center", transform=beside)
    limit = {"color": "black", "linewidth": 1, "linestyle": "--"}
    limit["label"] = f"limit {threshold:.4g} (×: below)"
    keys = [bars, ax.axvline(threshold, **limit)]
    if "hidden" in table:
        ring = {"color": "black", "markerfacecolor": "white", "label": "hidden state"}
        keys += ax.plot(table["hidden"], table.index, "o", **ring)
    ax.invert_yaxis()
    least = min(0.0, table.min(axis=None))
    ax.set(xlabel="cosine", xlim=(least - 0.03, 1.03))
    ax.tick_params(axis="y", length=0)
    return heading(ax, "one ingredient left out", keys)


@style()
def error_parts(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The parts of each layer's error: one line per part on a log scale, the total wide
    and grey.

    `parts`: ``layer``, one column per part (``storage``, ``quantization`` …) and
    ``total``, each a relative RMS. The parts are not stacked, since they are vectors
    and their norms do not add. A part that was not measured is left out."""
    lines = parts.set_index("layer").sort_index().astype(float)
    lines = lines.dropna(axis="columns", how="all")
    return _part_lines(axes(ax, PAGE, 2.6), lines, "parts of the error")


def _part_lines(ax: Axes, lines: pd.DataFrame, title: str) -> Axes:
    """One line per column of `lines` over its index, the column `total` wide and grey;
    a log scale has no place for zeros."""
    total = {"color": "0.75", "linewidth": 5, "marker": "", "solid_capstyle": "round"}
    ax.plot(lines.index, lines["total"], label="total", **total)
    for name, line in lines.drop(columns="total").items():
        look = {}
        if name in PARTS:
            marker = "os^Dv"[PARTS.index(name)]
            look = {"color": _PART_COLOURS[name], "marker": marker}
        if (line > 0).any():
            ax.plot(line.index, line, label=name, **look)
        else:
            ax.plot([], label=f"{name} (0)", **look)
    ax.set(xlabel=lines.index.name, ylabel="relative RMS error", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y")
    return heading(ax, title)


@style()
def layer_parts(parts: pd.DataFrame, *, layer: int, ax: Axes | None = None) -> Axes:
    """The parts of one layer's error: a bar per part on a log scale, with its value; a
    part that was not measured has a note.

    `parts`: ``layer``, one column per part and ``total``, each a relative RMS; columns
    ``rss``, ``cross`` are left out."""
    rows = parts.set_index("layer")
    rows = rows.drop(columns=["rss", "cross", "run_id"], errors="ignore")
    row = rows.loc[layer].astype(float)
    ax = axes(ax, 4.5, 0.9 + 0.25 * len(row))
    least = row[row > 0].min() / 10
    lengths = row.where(row > 0, least)
    colours = [_PART_COLOURS.get(part, "0.6") for part in row.index]
    ax.barh(row.index, lengths, 0.6, color=colours)
    for name, value in row.items():
        text = f"{value:.2g}"
        if pd.isna(value):
            text = "not measured"
        note(ax, text, lengths[name], name)
    ax.set(xscale="log", xlabel="relative RMS error")
    ax.set_xlim(least, 8 * row.max())
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    return heading(ax, f"error of layer {layer}, split")


@style()
def error_by_position(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Error by position: one line per part on a log scale, the median over layers; the
    total is wide and grey.

    `parts`: ``layer``, ``position``, one column per part and ``total``, each a relative
    RMS. Parts that are zero everywhere are left out."""
    lines = parts.drop(columns="layer").groupby("position").median()
    lines = lines.loc[:, (lines > 0).any()]
    title = "parts of the error along the sequence"
    ax = axes(ax, PAGE, 2.6)
    return _part_lines(ax, lines.where(lines > 0), title)
