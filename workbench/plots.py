"""Six figures, each a function from a DataFrame to a matplotlib Figure, and `save`.

The data come first, everything else is a keyword. All six have the keywords `title`,
`width` in inches (`COLUMN` or `PAGE`), and `figure`, a figure to draw into, such as a
widget's canvas, in place of a new one. pyplot neither keeps nor shows the figure that
they return.

A null is a group of its own, ``not set``. Rows that a figure cannot draw are counted in
its legend."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from itertools import cycle, product
from pathlib import Path

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import (
    FixedLocator,
    LogFormatterSciNotation,
    LogLocator,
    NullFormatter,
)

__all__ = ["bars", "cache_rows", "grid", "heatmap", "lines", "save", "tradeoff"]

COLUMN = 3.5
PAGE = 7.1
LINE = 0.16  # inches: height of a line of a title or a legend
CHARACTER = 0.06  # inches: width of a character of a token
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours, which are distinct for colour-blind readers."""
MARKERS = "os^DvPX<>"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=PALETTE),
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
"""Times its room, √(budget² + `HALF_ULP`²), that an error may be, as in the gate
`budget`."""
HALF_ULP = 2.0**-11  # of an fp16 number, relative to it
ROOM = "√(rounding² + 2⁻²²)"
BIT_FOR_BIT = "equal bit for bit"
NOT_SET = "not set"
VECTOR_CELLS = 2500  # more cells are an image: a vector cell takes up to 1.5 kB
CELLS_PER_INCH = 70  # of a figure's width: each has a pixel of its own on a screen
LAYERS_DRAWN = 250
HATCHED_INCHES = 0.05  # smaller cells have no room for the lines of a hatch
VECTOR_POINTS = 2000  # more points of lines are an image
CODE_POINTS = 3  # in a row that are written, of characters that the font lacks
LABELS = {"cosine": "1 − cosine", "error": "error ÷ its limit"}
CACHE_ROWS = 24
FASTER = 1.02  # times the fastest of a lower KL: smaller differences are noise
BEYOND = "//////"
BEYOND_COLOUR = "#D55E00"  # of a cell too small for a hatch
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


def _style() -> AbstractContextManager:
    """The look of every figure, complete: it starts from matplotlib's defaults, so that
    no setting of the user takes part. The user's settings come back at the end."""
    return matplotlib.style.context(["default", STYLE])


class StyledFigure(Figure):
    """A figure that is drawn, shown and saved in the look of this module: matplotlib
    creates ticks and reads settings as late as at drawing."""

    def draw(self, renderer) -> None:
        with _style():
            super().draw(renderer)

    def savefig(self, fname, **options) -> None:
        with _style():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        """The picture in a notebook."""
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=100)
        return png.getvalue()


@cache
def _characters() -> frozenset[int]:
    """Code points of the characters that the font of every figure has."""
    with _style():
        return frozenset(get_font(findfont(FontProperties())).get_charmap())


def _lacking(text: str) -> set[str]:
    """The characters of a text that the font lacks."""
    return {c for c in text if c != "\n" and ord(c) not in _characters()}


def _in_code_points(text: str) -> str:
    """A text with the characters that the font lacks, which would be drawn as boxes, as
    code points such as U+4F60."""

    def code_points(run: re.Match) -> str:
        points = [f"U+{ord(character):04X}" for character in run[0][:CODE_POINTS]]
        return " ".join(points) + "…" * (len(run[0]) > CODE_POINTS)

    if not (lacking := _lacking(text)):
        return text
    return re.sub(f"[{re.escape(''.join(lacking))}]+", code_points, text)


def _write_code_points(figure: Figure) -> None:
    """Writes all texts of a figure as `_in_code_points`, with one warning for the
    figure."""
    missing = set()

    def written(text: str) -> str:
        missing.update(_lacking(text))
        return _in_code_points(text)

    for axis in figure.findobj(Axis):
        if isinstance(axis.get_major_locator(), FixedLocator):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            if (words := [written(label) for label in labels]) != labels:
                axis.set_ticks(axis.get_majorticklocs(), labels=words)
    for text in figure.findobj(Text):
        if _lacking(text.get_text()):
            text.set_text(written(text.get_text()))
    if missing:
        points = ", ".join(f"U+{ord(character):04X}" for character in sorted(missing))
        warnings.warn(
            f"the font of the figures lacks {points}; they are written as code points",
            stacklevel=3,
        )


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
        with _style():
            if figure is None:
                figure = StyledFigure(figsize=(width, 3))
            figure.clear()
            draw(data, figure, **options)
            for ax in figure.axes:
                ax.xaxis.label.set_text(_wrapped(figure, ax.get_xlabel()))
            _set_title(figure, title)
            _write_code_points(figure)
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
    with _style():
        _set_title(figure, title, about)
        _write_code_points(figure)
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

    Panels that look alike are drawn once, and their title says whether their tensors
    are equal. A hatched cell has an error beyond its limit, `LIMIT_FACTOR` times the
    root of budget² + `HALF_ULP`²; a black one is not finite. Where there are more
    positions than pixels, a drawn cell is the worst of several; cells too small for a
    hatch have a colour of their own beyond the limit.

    Args:
        rows: the log's table `fidelity`: layer, position, T, tensor, mode, cosine,
            finite, for the limits error and budget, and digest, which names the values
            of a tensor.
        metric: ``cosine`` (1 − cosine) or ``error`` (relative RMS error ÷ its limit).
        tokens: the text of the token at each position.
    """
    rows = rows[(rows["tensor"] == tensor) & (rows["mode"] == mode)]
    if rows.empty:
        raise ValueError(f"no rows of the {tensor}, {mode}")
    cells = _with_values(rows, metric)
    panels = _panels(cells, by)
    layers, positions = next(iter(panels.values())).index.levels
    panel_height = min(max(0.16 * len(layers), 0.3), 2.5)
    figure.set_figheight(1.2 + len(panels) * (0.3 + panel_height))
    axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    finite = cells["value"].replace(np.inf, np.nan)
    low, high = finite.agg(["min", "max"]).fillna(1)
    norm = LogNorm(low, max(high, 10 * low))  # cells alike look alike
    merged = (
        -(-len(layers) // LAYERS_DRAWN),
        -(-len(positions) // int(CELLS_PER_INCH * figure.get_figwidth())),
    )
    cell_width = 0.8 * figure.get_figwidth() / len(positions)
    hatched = min(cell_width, panel_height / len(layers)) >= HATCHED_INCHES
    raster = len(panels) * len(layers) * len(positions) > VECTOR_CELLS
    for ax, (name, panel) in zip(axes, panels.items()):
        mesh = _draw_cells(ax, panel["value"].unstack(), norm, merged, raster)
        beyond = panel["beyond"].unstack().eq(True).to_numpy()
        beyond = _worst_of_blocks(beyond.astype(float), merged) == 1
        if hatched:
            _hatch(mesh, beyond, raster)
        else:
            _recolour(mesh, beyond)
        _label_cells(ax.yaxis, ["logits" if i < 0 else i for i in layers], 8)
        ax.set(title=_wrapped(figure, name, 0.85), ylabel="layer")
    ax.set_xlabel("token position" if tokens is None else "token")
    if tokens is not None:
        positions = [tokens[i] for i in positions]
        ax.tick_params(axis="x", rotation=90, labelsize=7)
        longest = max(len(_in_code_points(token)) for token in positions)
        # room for 12 characters, the most of a token, is there already
        more = CHARACTER * max(0, longest - 12)
        figure.set_figheight(figure.get_figheight() + more)
    _label_cells(ax.xaxis, positions, int(7.5 * figure.get_figwidth()))
    bar = figure.colorbar(mesh, ax=axes, label=LABELS[metric])
    _label_log(bar.ax.yaxis)
    if metric == "error":
        bar.ax.axhline(1, color="black")
    keys = []
    if cells["beyond"].any():
        look = {"fill": False, "hatch": BEYOND}
        if not hatched:
            look = {"facecolor": BEYOND_COLOUR}
        keys.append(Patch(**look, label=f"error > {LIMIT_FACTOR:g} × {ROOM}"))
    if np.isinf(cells["value"]).any():
        keys.append(Patch(facecolor="black", label="not finite"))
    if pd.concat(panels)["value"].isna().any():
        keys.append(Patch(**UNMEASURED, label="not measured"))
    notes = []
    if metric == "error" and not cells["beyond"].any():
        notes.append(f"limit: {LIMIT_FACTOR:g} × {ROOM}")
    for count, what in zip(merged, ("layers", "positions")):
        if count > 1:
            notes.append(f"a drawn cell is the worst of {count} {what}")
    if (cells["value"] == FLOOR).any():
        notes.append(f"{LABELS[metric]} below {FLOOR:g} has the colour of {FLOOR:g}")
    _legend(figure, keys, notes)


def _panels(cells: pd.DataFrame, by: str | None) -> dict[str, pd.DataFrame]:
    """`value` and `beyond` by layer and position for each value of the column `by`, the
    worst of several rows. Panels that look alike are one, whose name has the names of
    all and says whether their tensors are equal."""
    index = ["layer", "position"]
    everywhere = pd.MultiIndex.from_product([np.sort(cells[i].unique()) for i in index])
    alike = []  # names, panel, rows of each of the names
    for name, part in _groups(cells, by):
        panel = part.groupby(index)[["value", "beyond"]].max().reindex(everywhere)
        for names, other, parts in alike:
            if panel.equals(other):
                names.append(name)
                parts.append(part)
                break
        else:
            alike.append(([name], panel, [part]))
    panels = {}
    for names, panel, parts in alike:
        title = names[0]
        if len(names) > 1:
            title = f"{'; '.join(names[:-1])} and {names[-1]}: {_equality(parts)}"
        panels[title] = panel
    return panels


def _equality(parts: Sequence[pd.DataFrame]) -> str:
    """How far the tensors behind panels that look alike are equal. The figures of rows
    without a digest, each rounded, show less than the tensors."""
    index = ["layer", "position"]
    figures = ["cosine", "psnr_db", "max_abs", "error"]

    def equal(columns: Sequence[str]) -> bool:
        tables = []
        for part in parts:
            table = part.reindex(columns=[*index, *columns]).drop_duplicates()
            tables.append(table.sort_values([*index, *columns], ignore_index=True))
        return all(table.equals(tables[0]) for table in tables[1:])

    together = pd.concat(parts).reindex(columns=["digest", "max_abs"])
    if together["max_abs"].eq(0).all():  # each equals the reference
        return BIT_FOR_BIT
    if together["digest"].notna().all():
        return BIT_FOR_BIT if equal(["digest"]) else "alike in this picture, not equal"
    return "equal figures" if equal(figures) else "alike in this picture, not equal"


def _groups(data: pd.DataFrame, column: str | None) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column, in the order of the rows, with its label; all
    rows without a column. Null is a value."""
    if column is None:
        return [("", data)]
    parts = data.groupby(column, sort=False, dropna=False)
    return [(_named(column, value), part) for value, part in parts]


def _named(column: str | None, value) -> str:
    """A value of a column as a label: a text alone, a number with the column's name."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return f"{column} {NOT_SET}"
    return f"{column} = {_number(value)}"


def _number(value) -> str:
    """A number without ".0": a null in a column makes floats of its whole numbers."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _count(number: int, thing: str) -> str:
    """A number of things in words."""
    return f"{number} {thing}" + "s" * int(number != 1)


def _labels(names: Sequence) -> list[str]:
    """Labels of rows or columns of a table."""
    return [NOT_SET if pd.isna(name) else str(name) for name in names]


def _with_values(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with the `value` that is drawn, infinite where a result is not finite,
    and whether the error lies `beyond` its limit."""
    known = rows.reindex(columns=["error", "budget"]).astype(float)
    ratio = known["error"] / (LIMIT_FACTOR * np.hypot(known["budget"], HALF_ULP))
    value = ratio if metric == "error" else 1 - rows["cosine"].astype(float)
    broken = ~rows["finite"].fillna(True).astype(bool)
    value = value.clip(lower=FLOOR).mask(broken, np.inf)
    return rows.assign(value=value, beyond=(ratio > 1) | broken)


def _worst_of_blocks(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The largest value of each block of `shape` cells; blocks at the ends may be
    smaller. Null where all of a block are."""
    gaps = [(0, -length % size) for length, size in zip(values.shape, shape)]
    padded = np.pad(values, gaps, constant_values=np.nan)
    rows, columns = (length // size for length, size in zip(padded.shape, shape))
    blocks = padded.reshape(rows, shape[0], columns, shape[1])
    return np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1)


def _edges(length: int, size: int) -> np.ndarray:
    """The edges of blocks of `size` cells along an axis of `length` cells."""
    return np.append(np.arange(0, length, size), length)


def _draw_cells(
    ax: Axes,
    table: pd.DataFrame,
    norm: Normalize,
    merged: tuple[int, int] = (1, 1),
    raster: bool = False,
) -> QuadMesh:
    """Draws a table as coloured cells, row 0 on top; nulls are dotted.

    Args:
        merged: rows and columns of which a drawn cell shows the largest value.
        raster: the cells are an image in a vector format too.
    """
    ax.spines[:].set_visible(False)
    ax.patch.set(**UNMEASURED)
    colours = matplotlib.colormaps["cividis"].with_extremes(over="black")
    values = _worst_of_blocks(table.to_numpy(dtype=float), merged)
    values = np.where(np.isinf(values), 2 * norm.vmax, values)
    rows, columns = map(_edges, table.shape, merged)
    mesh = ax.pcolormesh(
        columns, rows, values, norm=norm, cmap=colours, rasterized=raster
    )
    ax.set_ylim(len(table), 0)
    ax.tick_params(length=0)
    return mesh


def _ink(mesh: QuadMesh) -> np.ndarray:
    """White or black for each cell, whichever contrasts with the cell's colour."""
    colours = mesh.to_rgba(mesh.get_array())[..., :3]
    return np.where(colours.mean(axis=-1) < 0.45, "white", "black")


def _hatch(mesh: QuadMesh, marked: np.ndarray, raster: bool) -> None:
    """Hatches the marked cells."""
    ink = _ink(mesh)
    corners = mesh.get_coordinates()
    for colour in ("white", "black"):
        cells = np.ma.masked_where(~marked | (ink != colour), marked)
        drawn = mesh.axes.pcolor(
            *(corners[..., 0], corners[..., 1], cells),
            hatch=BEYOND,
            facecolor="none",
            edgecolor=colour,
            linewidth=0,
        )
        drawn.set_rasterized(raster)


def _recolour(mesh: QuadMesh, marked: np.ndarray) -> None:
    """Draws the marked cells in one colour, but for those that are not finite."""
    finite = mesh.get_array().filled(0) <= mesh.norm.vmax
    cells = np.ma.masked_where(~(marked & finite), marked.astype(float))
    corners = mesh.get_coordinates()
    mesh.axes.pcolormesh(
        *(corners[..., 0], corners[..., 1], cells),
        cmap=ListedColormap([BEYOND_COLOUR]),
        rasterized=True,
    )


def _label_cells(axis, labels: Sequence, most: int) -> None:
    """Labels the cells along an axis: all, or every 2nd, 3rd … if there are more than
    `most`."""
    step = -(-len(labels) // most)
    places = np.arange(0, len(labels), step) + 0.5
    axis.set_ticks(places, labels=[str(label) for label in labels[::step]])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)


def _legend(figure: Figure, keys: Sequence, notes: Sequence[str] = ()) -> None:
    """A legend below all axes, in as many columns as the width has room for, under the
    notes."""
    if not keys and not notes:
        return
    labels = [key.get_label() for key in keys]
    longest = max(
        (len(line) for text in labels for line in text.split("\n")), default=0
    )
    columns = max(1, int(16 * figure.get_figwidth() / (longest + 7)))
    title = "\n".join(_wrapped(figure, note, 0.95) for note in notes)
    lines = -(-len(keys) // columns) + len(title.splitlines())
    figure.set_figheight(figure.get_figheight() + lines * LINE)
    look = {"title": title, "alignment": "left"} if title else {}
    figure.legend(handles=keys, loc="outside lower left", ncols=columns, **look)


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
    columns = [_wrapped(figure, name, share) for name in _labels(table.columns)]
    _label_cells(ax.xaxis, columns, 40)
    _label_cells(ax.yaxis, _labels(table.index), 40)
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

    Colours and markers differ in length, so that 63 lines look different. The legend
    names what the points and bars are, and what is not drawn; a linear axis that starts
    above 0 says so.

    Args:
        marks: names and values of dashed horizontal lines.
        xlog: base of a logarithmic x axis; 0: linear, with whole numbers.
        ylabel: "" where panels have quantities of their own, and no common scale.
    """
    panels = _groups(data, col)
    shared = ylabel != ""
    axes = _panels_in(figure, len(panels), 1.7, shared)
    looks = {}
    kinds = zip(_groups(data, hue), cycle(PALETTE), cycle(MARKERS))
    for (name, _), colour, marker in kinds:
        looks[name] = {"color": colour, "marker": marker, "label": name}
    keys = {}
    several = False  # rows of a point
    off_x, off_y = 0, {}  # points that have no place on a logarithmic axis
    crowded = len(data[[name for name in (x, hue, col) if name]].drop_duplicates())
    for ax, (name, panel) in zip(axes, panels):
        for key, group in _groups(panel, hue):
            points = group.groupby(x)[y]
            middle = points.median().dropna()
            several |= (points.count() > 1).any()
            if xlog:
                off_x += (middle.index <= 0).sum()
                middle = middle[middle.index > 0]
            if ylog:
                off_y[key] = off_y.get(key, 0) + (middle <= 0).sum()
                middle = middle[middle > 0]
            if middle.empty:
                continue
            low, high = (points.quantile(share)[middle.index] for share in spread)
            reach = [middle - low, high - middle]
            drawn = ax.errorbar(middle.index, middle, reach, **looks[key], capsize=2)
            for artist in drawn.get_children():
                artist.set_rasterized(crowded > VECTOR_POINTS)
            keys[key] = Line2D([], [], **looks[key])
        for value in marks.values():
            ax.axhline(value, **DASHED)
        if xlog:
            ax.set_xscale("log", base=xlog)
            ticks = sorted(place for place in data[x].dropna().unique() if place > 0)
            ax.set_xticks(ticks, labels=map(_number, ticks))
            if len(ticks) == 1:  # matplotlib's margins of a single place have no width
                ax.set_xlim(ticks[0] / xlog, ticks[0] * xlog)
            ax.minorticks_off()
        else:
            ax.xaxis.get_major_locator().set_params(integer=True)
        if ylog:
            ax.set_yscale("log")
            _label_log(ax.yaxis)
        ax.grid(axis="y")
        label = y if ylabel is None else ylabel
        if not ylog and ax.get_ylim()[0] > 0:
            label = f"{label}\n(axis starts above 0)".strip()
        ax.set(title=name, xlabel=xlabel or x, ylabel=label)
        if shared:
            ax.label_outer()
    keys = [keys[name] for name in looks if name in keys]
    keys += [Line2D([], [], **DASHED, label=mark) for mark in marks]
    notes = []
    if several:
        ends = "the least to the most"
        if tuple(spread) != (0, 1):
            ends = "{:.0%} to {:.0%} of the values".format(*spread)
        notes.append(f"points: medians; bars: {ends}")
    if off_x:
        points = _count(off_x, "point")
        notes.append(f"{xlabel or x} ≤ 0 is not on the logarithmic axis: {points}")
    if off_names := [name for name, count in off_y.items() if count]:
        points = f"{_count(sum(off_y.values()), 'point')} of {', '.join(off_names)}"
        notes.append(f"{ylabel or y} ≤ 0 is not on the logarithmic axis: {points}")
    notes += _unplaced(data, [x, y])
    _legend(figure, keys, notes)


def _unplaced(data: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """A note on the rows that have no place for lack of a value."""
    count = data[list(columns)].isna().any(axis=1).sum()
    if not count:
        return []
    of = f"{count} of {_count(len(data), 'row')}"
    return [f"not drawn: {of}, without {' or '.join(columns)}"]


@_figure
def bars(table: pd.DataFrame, figure: Figure, *, xlabel: str = "") -> None:
    """Horizontal bars: a group for each row, a bar with its value for each column."""
    count = len(table.columns)
    figure.set_figheight(1 + (0.1 + 0.2 * count) * len(table))
    ax = figure.subplots()
    places = np.arange(len(table))
    table = table.astype(float).set_axis(_labels(table.columns), axis=1)
    for number, (name, values) in enumerate(table.items()):
        at = places + (number - (count - 1) / 2) * 0.8 / count
        drawn = ax.barh(at, values.fillna(0), 0.75 / count, label=name)
        texts = values.map("{:.3g}".format).replace("nan", "not measured")
        ax.bar_label(drawn, texts, padding=3, fontsize=7)
    ax.axvline(0, color="black")
    ax.set_yticks(places, labels=[_wrapped(figure, i) for i in _labels(table.index)])
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
    low = (shown["kl_mean"] < FLOOR).sum()
    shown = shown.assign(kl_mean=shown["kl_mean"].clip(lower=FLOOR))
    figure.set_figheight(3.2)
    ax = figure.subplots()
    looks = cycle(product(MARKERS, PALETTE))
    for (name, group), (marker, colour) in zip(_groups(shown, hue), looks):
        for verdict, points in group.groupby("verdict", dropna=False):
            look = {"color": colour, "marker": "X" if verdict == "RED" else marker}
            verdict = _named("verdict", verdict)
            look["label"] = f"{name}, {verdict}" if hue else verdict
            ax.scatter("kl_mean", "tokens_per_s", data=points, **look)
    best = shown[shown["verdict"] == "GREEN"].sort_values(
        ["kl_mean", "tokens_per_s"], ascending=[True, False]
    )
    fastest = best["tokens_per_s"].cummax().shift(fill_value=0)
    front = best[best["tokens_per_s"] > FASTER * fastest]
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
    notes = []
    if len(front) > 1:
        share = f"{FASTER - 1:.0%}"
        notes.append(
            f"numbered: GREEN, and more than {share} faster than all of a lower KL"
        )
    if low:
        notes.append(f"{low} with a KL below {FLOOR:g} are drawn at {FLOOR:g}")
    notes += _unplaced(configurations, ["kl_mean", "tokens_per_s"])
    _legend(figure, ax.get_legend_handles_labels()[0], notes)


@_figure
def cache_rows(calls: pd.DataFrame, figure: Figure, *, by: str | None = None) -> None:
    """Call × cache row: a filled mark for a row written as addressed, a hollow one for
    a missed row, a cross for a stray one, of the first `CACHE_ROWS`; a panel for each
    value of `by`.

    Args:
        calls: T, pos, expected and changed (lists of row numbers), any number of rows
            of the frame for one call, such as one for each layer: a fault in any shows.
    """
    calls = calls.reset_index(drop=True)
    panels = _groups(calls, by)
    numbers = calls.groupby(["T", "pos"], sort=False, dropna=False).ngroup()
    names = list(calls[["T", "pos"]].drop_duplicates().itertuples(index=False))
    axes = _panels_in(figure, len(panels), 0.1 + 0.15 * len(names))
    looks = (
        {"color": PALETTE[0], "marker": "s", "label": "written as addressed"},
        {"color": PALETTE[5], "marker": "s", "label": "missed", "fillstyle": "none"},
        {"color": PALETTE[5], "marker": "x", "label": "stray"},
    )
    keys, outside = {}, 0
    for ax, (title, panel) in zip(axes, panels):
        for y in range(len(names)):
            call = panel[numbers[panel.index] == y]
            addressed = set().union(*call["expected"])
            missed, stray = set(), set()
            for expected, changed in zip(call["expected"], call["changed"]):
                missed |= set(expected) - set(changed)
                stray |= set(changed) - set(expected)
            for look, marked in zip(looks, (addressed - missed, missed, stray)):
                ax.plot(sorted(marked), [y] * len(marked), linestyle="", **look)
                hidden = sum(row >= CACHE_ROWS for row in marked)
                outside += hidden
                if hidden < len(marked):
                    keys[look["label"]] = Line2D([], [], linestyle="", **look)
        ax.set(title=title, xlabel="cache row", xlim=(-0.7, CACHE_ROWS - 0.3))
        ax.grid()
        labels = [f"{_named('T', T)}, {_named('pos', pos)}" for T, pos in names]
        labels = [label.replace("pos = ", "pos ") for label in labels]
        ax.set_yticks(range(len(names)), labels)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.label_outer()
    notes = []
    if outside:
        marks = _count(outside, "mark")
        notes.append(f"not drawn: {marks} from cache row {CACHE_ROWS} on")
    keys = [keys[look["label"]] for look in looks if look["label"] in keys]
    _legend(figure, keys, notes)
