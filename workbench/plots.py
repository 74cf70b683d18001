"""Six figures, each a function from a DataFrame to a matplotlib Figure, and `save`.

The data come first, everything else is a keyword. All six have the keywords `title`,
`width` in inches (`COLUMN` or `PAGE`), and `figure`, a figure to draw into, such as a
widget's canvas, in place of a new one. pyplot neither keeps nor shows the figure that
they return."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import cycle, product
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

__all__ = ["bars", "cache_rows", "grid", "heatmap", "lines", "save", "tradeoff"]

COLUMN = 3.5
PAGE = 7.1
LINE = 0.16  # inches: height of a line of a title or a legend
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours, which are distinct for colour-blind readers."""
MARKERS = "os^DvPX<>"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=PALETTE),
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "workbench",
    "svg.fonttype": "none",  # text stays text: searchable, in the reader's font
}
FLOOR = 1e-8  # of 1 − cosine: what equal vectors of float32 may differ by
LIMIT_FACTOR = 6.0
"""Times its rounding floor (`budget`) that an error may be, as in the gate `budget`."""
HALF_ULP = 2.0**-11  # of an fp16 number, relative to it
LABELS = {"cosine": "1 − cosine", "error": "error ÷ its limit"}
CACHE_ROWS = 24
BEYOND = "//////"
DASHED = {"color": "black", "linestyle": "--", "linewidth": 0.8}
UNMEASURED = {"facecolor": "0.95", "edgecolor": "0.7", "hatch": "...."}


def _label_log(axis) -> None:
    """Labels powers of ten, within few decades their double and fivefold too, and every
    tick of a scale that is shorter: plain numbers where all lie from 0.01 to 9999."""
    low, high = axis.get_view_interval()
    plain = 0.01 <= low and high < 1e4
    labels = "{x:g}" if plain else LogFormatterSciNotation()
    axis.set_major_formatter(labels)
    if high > 4 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 40 * low else (1,)))
        labels = NullFormatter()
    axis.set_minor_formatter(labels)


def _figure(draw: Callable) -> Callable:
    """Calls `draw` with a new figure, or the one given without its contents, in the
    look of every figure, and sets the title."""

    @wraps(draw)
    def drawn(
        data: pd.DataFrame,
        *,
        title: str = "",
        width: float = PAGE,
        figure: Figure | None = None,
        **options,
    ) -> Figure:
        with matplotlib.rc_context(STYLE):
            if figure is None:
                figure = plt.figure(figsize=(width, 3))
                plt.close(figure)
            figure.clear()
            draw(data, figure, **options)
            for ax in figure.axes:
                ax.xaxis.label.set_text(_wrapped(figure, ax.get_xlabel()))
            _set_title(figure, title)
        return figure

    return drawn


def _wrapped(figure: Figure, text: str, share: float = 0.5) -> str:
    """A text in lines of a share of the figure's width."""
    return textwrap.fill(text, max(8, int(14 * share * figure.get_figwidth())))


def _set_title(figure: Figure, *paragraphs: str) -> None:
    """Writes each paragraph above all axes, wrapped at the width of the figure."""
    lines = [_wrapped(figure, text, 1) for text in paragraphs if text]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9)


def _panels_in(
    figure: Figure, count: int, height: float, sharey: bool = True
) -> Sequence[Axes]:
    """Axes of panels of a height in inches: side by side on a page, one above the other
    in a column."""
    shape = (1, count) if figure.get_figwidth() > COLUMN else (count, 1)
    figure.set_figheight(1.2 + height * shape[0])
    return figure.subplots(*shape, squeeze=False, sharex=True, sharey=sharey).flat


def save(figure: Figure, stem: Path, *, about: str = "") -> list[Path]:
    """Writes ``stem.svg``, ``.pdf`` and ``.png`` and returns their paths; equal data
    give equal bytes. `about` (checkpoint, options, machine of the data) ends the
    title."""
    title = figure.get_suptitle().replace("\n", " ")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        _set_title(figure, title, about)
        for name, metadata in undated.items():
            paths.append(stem.with_name(f"{stem.name}.{name}"))
            figure.savefig(paths[-1], metadata={"Title": title} | metadata)
    return paths


@_figure
def heatmap(
    rows: pd.DataFrame,
    figure: Figure,
    *,
    metric: str = "cosine",
    by: str | None = "T",
    tensor: str = "update",
    mode: str = "isolated",
    tokens: Sequence[str] | None = None,
) -> None:
    """Layer × token position against Hugging Face's values, on a log scale; a panel for
    each value of the column `by`, or one panel of the worst.

    Panels with equal values are drawn once. A hatched cell has an error beyond its
    limit, `LIMIT_FACTOR` times what rounding alone causes there; a black one is not
    finite.

    Args:
        rows: the log's table `fidelity`: layer, position, T, tensor, mode, cosine,
            finite, and for the limits error and budget.
        metric: ``cosine`` (1 − cosine) or ``error`` (relative RMS error ÷ its limit).
        tokens: the text of the token at each position.
    """
    rows = rows[(rows["tensor"] == tensor) & (rows["mode"] == mode)]
    if rows.empty:
        raise ValueError(f"no rows of the {tensor}, {mode}")
    cells = _with_values(rows, metric)
    panels = _panels(cells, by)
    layers, positions = next(iter(panels.values())).index.levels
    of_panel = 0.3 + min(max(0.16 * len(layers), 0.3), 2.5)
    figure.set_figheight(1.2 + len(panels) * of_panel)
    axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    finite = cells["value"].replace(np.inf, np.nan)
    low, high = finite.agg(["min", "max"]).fillna(1)
    norm = LogNorm(low, max(high, 10 * low))  # cells alike look alike
    for ax, (name, panel) in zip(axes, panels.items()):
        mesh = _draw_cells(ax, panel["value"].unstack(), norm)
        _hatch(mesh, panel["beyond"].unstack().eq(True).to_numpy())
        _label_cells(ax.yaxis, ["logits" if i < 0 else i for i in layers], 8)
        ax.set(title=name, ylabel="layer")
    ax.set_xlabel("token position" if tokens is None else "token")
    if tokens is not None:
        positions = [tokens[i] for i in positions]
        ax.tick_params(axis="x", rotation=90, labelsize=7)
    _label_cells(ax.xaxis, positions, int(7.5 * figure.get_figwidth()))
    bar = figure.colorbar(mesh, ax=axes, label=LABELS[metric])
    _label_log(bar.ax.yaxis)
    if metric == "error":
        bar.ax.axhline(1, color="black")
    keys = []
    if cells["beyond"].any():
        beyond = f"error > {LIMIT_FACTOR:g} × what rounding alone causes"
        keys.append(Patch(fill=False, hatch=BEYOND, label=beyond))
    if np.isinf(cells["value"]).any():
        keys.append(Patch(facecolor="black", label="not finite"))
    if pd.concat(panels)["value"].isna().any():
        keys.append(Patch(**UNMEASURED, label="not measured"))
    _legend(figure, keys)


def _panels(cells: pd.DataFrame, by: str | None) -> dict[str, pd.DataFrame]:
    """`value` and `beyond` by layer and position for each value of the column `by`, the
    worst of several rows; a single panel if all are equal."""
    index = ["layer", "position"]
    everywhere = pd.MultiIndex.from_product([np.sort(cells[i].unique()) for i in index])
    panels = {}
    for name, part in _groups(cells, by):
        panels[name] = part.groupby(index)[["value", "beyond"]].max()
        panels[name] = panels[name].reindex(everywhere)
    first, *others = panels.values()
    if others and all(first.equals(panel) for panel in others):
        return {" and ".join(panels) + ": equal bit for bit": first}
    return panels


def _groups(data: pd.DataFrame, column: str | None) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column, in the order of the rows, with its label; all
    rows without a column."""
    if column is None:
        return [("", data)]
    parts = data.groupby(column, sort=False)
    return [(_named(column, value), part) for value, part in parts]


def _named(column: str | None, value) -> str:
    """A value of a column as a label: a text alone, a number with the column's name."""
    return value if isinstance(value, str) else f"{column} = {value}"


def _with_values(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with the `value` that is drawn, infinite where a result is not finite,
    and whether the error lies `beyond` its limit."""
    known = rows.reindex(columns=["error", "budget"]).astype(float)
    ratio = known["error"] / (LIMIT_FACTOR * np.hypot(known["budget"], HALF_ULP))
    value = ratio if metric == "error" else 1 - rows["cosine"].astype(float)
    broken = ~rows["finite"].fillna(True).astype(bool)
    value = value.clip(lower=FLOOR).mask(broken, np.inf)
    return rows.assign(value=value, beyond=(ratio > 1) | broken)


def _draw_cells(ax: Axes, table: pd.DataFrame, norm: Normalize) -> QuadMesh:
    """Draws a table as coloured cells, row 0 on top; nulls are dotted."""
    ax.spines[:].set_visible(False)
    ax.patch.set(**UNMEASURED)
    colours = matplotlib.colormaps["cividis"].with_extremes(over="black")
    values = table.to_numpy(dtype=float)
    values = np.where(np.isinf(values), 2 * norm.vmax, values)
    mesh = ax.pcolormesh(values, norm=norm, cmap=colours)
    ax.set_ylim(len(table), 0)
    ax.tick_params(length=0)
    return mesh


def _ink(mesh: QuadMesh) -> np.ndarray:
    """White or black for each cell, whichever contrasts with the cell's colour."""
    colours = mesh.to_rgba(mesh.get_array())[..., :3]
    return np.where(colours.mean(axis=-1) < 0.45, "white", "black")


def _hatch(mesh: QuadMesh, marked: np.ndarray) -> None:
    """Hatches the marked cells."""
    ink = _ink(mesh)
    for colour in ("white", "black"):
        cells = np.ma.masked_where(~marked | (ink != colour), marked)
        mesh.axes.pcolor(
            cells, hatch=BEYOND, facecolor="none", edgecolor=colour, linewidth=0
        )


def _label_cells(axis, labels: Sequence, most: int) -> None:
    """Labels the cells along an axis: all, or every 2nd, 3rd … if there are more than
    `most`."""
    step = -(-len(labels) // most)
    places = np.arange(0, len(labels), step) + 0.5
    axis.set_ticks(places, labels=[str(label) for label in labels[::step]])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)


def _legend(figure: Figure, keys: Sequence) -> None:
    """A legend below all axes, in as many columns as the width has room for."""
    if keys:
        longest = max(len(line) for key in keys for line in key.get_label().split("\n"))
        columns = max(1, int(16 * figure.get_figwidth() / (longest + 7)))
        lines = -(-len(keys) // columns)
        figure.set_figheight(figure.get_figheight() + lines * LINE)
        figure.legend(handles=keys, loc="outside lower left", ncols=columns)


@_figure
def grid(
    table: pd.DataFrame,
    figure: Figure,
    *,
    texts: Sequence[Sequence[str]] | None = None,
    label: str = "",
) -> None:
    """A table as coloured cells with their numbers, or `texts`; nulls are dotted. The
    names of index and columns label the axes; `label` names the colours."""
    values = table.to_numpy(dtype=float)
    norm = Normalize(*np.nanquantile(values, (0, 1)))
    figure.set_figheight(1.1 + 0.25 * len(table))
    ax = figure.subplots()
    mesh = _draw_cells(ax, table, norm)
    mesh.set(edgecolor="white", linewidth=1)
    if texts is None:
        texts = table.map("{:.3g}".format).replace("nan", "").to_numpy()
    for (y, x), colour in np.ndenumerate(_ink(mesh)):
        text = texts[y][x]
        ax.text(x + 0.5, y + 0.5, text, color=colour, ha="center", va="center")
    share = 0.6 / len(table.columns)
    _label_cells(ax.xaxis, [_wrapped(figure, str(c), share) for c in table.columns], 40)
    _label_cells(ax.yaxis, table.index, 40)
    ax.set(xlabel=table.columns.name, ylabel=table.index.name)
    if label:
        figure.colorbar(mesh, ax=ax, label=label)
    if np.isnan(values).any():
        _legend(figure, [Patch(**UNMEASURED, label="not measured")])


@_figure
def lines(
    data: pd.DataFrame,
    figure: Figure,
    *,
    x: str,
    y: str,
    hue: str,
    col: str | None = None,
    spread: Sequence[float] = (0, 1),
    marks: Mapping[str, float] = {},
    xlog: float = 0,
    ylog: bool = False,
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> None:
    """Medians of `y` over `x`, a line for each value of `hue`, a panel for each value of
    `col`; bars span the quantiles `spread` of the rows of a point.

    Colours and markers differ in length, so that 63 lines look different.

    Args:
        marks: names and values of dashed horizontal lines.
        xlog: base of a logarithmic x axis; 0: linear, with whole numbers.
        ylabel: "" where panels have quantities of their own, and no common scale.
    """
    panels = _groups(data, col)
    shared = ylabel != ""
    axes = _panels_in(figure, len(panels), 1.7, shared)
    looks = {}
    names = data[hue].unique()
    for name, colour, marker in zip(names, cycle(PALETTE), cycle(MARKERS)):
        looks[name] = {"color": colour, "marker": marker, "label": _named(hue, name)}
    for ax, (name, panel) in zip(axes, panels):
        for place, (key, look) in enumerate(looks.items()):
            points = panel[panel[hue] == key].groupby(x)[y]
            middle = points.median()
            low, high = map(points.quantile, spread)
            apart = 1.02**place if xlog else 1  # so that no bar hides another
            reach = [middle - low, high - middle]
            ax.errorbar(middle.index * apart, middle, reach, **look, capsize=2)
        for value in marks.values():
            ax.axhline(value, **DASHED)
        if xlog:
            ax.set_xscale("log", base=xlog)
            ticks = sorted(data[x].unique())
            ax.set_xticks(ticks, labels=map(str, ticks))
            ax.minorticks_off()
        else:
            ax.xaxis.get_major_locator().set_params(integer=True)
        if ylog:
            ax.set_yscale("log")
            _label_log(ax.yaxis)
        ax.grid(axis="y")
        ax.set(title=name, xlabel=xlabel or x, ylabel=y if ylabel is None else ylabel)
        if shared:
            ax.label_outer()
    keys = [Line2D([], [], **look) for look in looks.values()]
    _legend(figure, keys + [Line2D([], [], **DASHED, label=m) for m in marks])


@_figure
def bars(table: pd.DataFrame, figure: Figure, *, xlabel: str = "") -> None:
    """Horizontal bars: a group for each row, a bar with its value for each column."""
    count = len(table.columns)
    figure.set_figheight(1 + (0.1 + 0.2 * count) * len(table))
    ax = figure.subplots()
    places = np.arange(len(table))
    for number, (name, values) in enumerate(table.astype(float).items()):
        at = places + (number - (count - 1) / 2) * 0.8 / count
        drawn = ax.barh(at, values.fillna(0), 0.75 / count, label=name)
        texts = values.map("{:.3g}".format).replace("nan", "not measured")
        ax.bar_label(drawn, texts, padding=3, fontsize=7)
    ax.axvline(0, color="black")
    ax.set_yticks(places, labels=[_wrapped(figure, str(i)) for i in table.index])
    ax.invert_yaxis()
    ax.margins(x=0.9 / figure.get_figwidth())
    ax.set_xlabel(xlabel)
    keys = ax.get_legend_handles_labels()[0]
    _legend(figure, keys[count == 1 :])


@_figure
def tradeoff(
    configurations: pd.DataFrame,
    figure: Figure,
    *,
    hue: str | None = None,
    max_kl: float | None = None,
) -> None:
    """Tokens per second over mean KL; the best that pass are numbered and named in the
    legend.

    Args:
        configurations: name, kl_mean (nats), tokens_per_s, verdict, and the column
            `hue`, which gives the colours.
        max_kl: the limit on the mean KL, drawn as a dashed line.
    """
    shown = configurations.dropna(subset=["kl_mean", "tokens_per_s"])
    shown = shown.assign(kl_mean=shown["kl_mean"].clip(lower=FLOOR))
    figure.set_figheight(3.2)
    ax = figure.subplots()
    looks = cycle(product(MARKERS, PALETTE))
    for (name, group), (marker, colour) in zip(_groups(shown, hue), looks):
        for verdict, points in group.groupby("verdict"):
            look = {"color": colour, "marker": "X" if verdict == "RED" else marker}
            look["label"] = f"{name}, {verdict}" if hue else verdict
            ax.scatter("kl_mean", "tokens_per_s", data=points, **look)
    best = shown[shown["verdict"] == "GREEN"].sort_values(
        ["kl_mean", "tokens_per_s"], ascending=[True, False]
    )
    fastest = best["tokens_per_s"].cummax().shift(fill_value=0)
    front = best[best["tokens_per_s"] > 1.02 * fastest]
    for number, row in enumerate(front.itertuples(), 1):
        at = (row.kl_mean, row.tokens_per_s)
        ax.annotate(str(number), at, (-3, 4), textcoords="offset points", ha="right")
        name = _wrapped(figure, f"{number}: {row.name}", 0.8)
        ax.plot([], [], linestyle="", label=name)
    if max_kl:
        ax.axvline(max_kl, **DASHED, label=f"your limit, {max_kl:g} nats")
    ax.grid()
    ax.margins(0.1)
    ax.set(xscale="log", ylabel="tokens per second", ylim=0)
    ax.set_xlabel("mean KL from Hugging Face's model (nats)")
    _label_log(ax.xaxis)
    _legend(figure, ax.get_legend_handles_labels()[0])


@_figure
def cache_rows(calls: pd.DataFrame, figure: Figure, *, by: str | None = None) -> None:
    """Call × cache row: a filled mark for a row written as addressed, a hollow one for
    a missed row, a cross for a stray one, of the first `CACHE_ROWS`; a panel for each
    value of `by`.

    Args:
        calls: T, pos, expected and changed (lists of row numbers), any number of rows
            of the frame for one call, such as one for each layer: a fault in any shows.
    """
    panels = _groups(calls, by)
    names = list(calls[["T", "pos"]].drop_duplicates().itertuples(index=False))
    axes = _panels_in(figure, len(panels), 0.1 + 0.15 * len(names))
    looks = (
        {"color": PALETTE[0], "marker": "s", "label": "written as addressed"},
        {"color": PALETTE[5], "marker": "s", "label": "missed", "fillstyle": "none"},
        {"color": PALETTE[5], "marker": "x", "label": "stray"},
    )
    for ax, (title, panel) in zip(axes, panels):
        for y, (T, pos) in enumerate(names):
            call = panel[(panel["T"] == T) & (panel["pos"] == pos)]
            addressed = set().union(*call["expected"])
            missed, stray = set(), set()
            for expected, changed in zip(call["expected"], call["changed"]):
                missed |= set(expected) - set(changed)
                stray |= set(changed) - set(expected)
            for look, marked in zip(looks, (addressed - missed, missed, stray)):
                ax.plot(sorted(marked), [y] * len(marked), linestyle="", **look)
        ax.set(title=title, xlabel="cache row", xlim=(-0.7, CACHE_ROWS - 0.3))
        ax.grid()
        ax.set_yticks(range(len(names)), [f"T = {T}, pos {pos}" for T, pos in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.label_outer()
    _legend(figure, [Line2D([], [], linestyle="", **look) for look in looks])
