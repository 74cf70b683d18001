"""The common parts of all figures: their look, grids of cells, and reproducible files.

`save` takes a function that draws, and writes SVG, PDF and PNG with a sidecar.
"""

import json
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import PIL
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours, which are distinct for colour-blind readers."""

COLUMN = 3.5
PAGE = 7.1
"""Widths of figures in inches: one column of a paper with two, and both."""

STYLE = {
    "font.family": "sans-serif",
    # matplotlib ships the first; an SVG reader without it uses the next one that it has
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=PALETTE, marker=list("os^DvPX")),
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.borderaxespad": 0,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "workbench",
    "svg.fonttype": "none",  # text stays text: searchable, and set in the reader's font
}

_DATES = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
_DESCRIPTION = {"svg": "Description", "pdf": "Subject", "png": "Description"}
ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""The box behind a text on lines."""

INVALID = {"facecolor": "none", "edgecolor": "0.4", "hatch": "xxxx"}
"""The look of values of invalid runs."""

_UNMEASURED = {"facecolor": "0.95", "edgecolor": "0.6", "hatch": "////"}


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure here, as a context or a decorator for figures of your
    own."""
    with matplotlib.rc_context(STYLE):
        yield
        interactive = matplotlib.is_interactive()
    # a notebook's backend turns the interactive mode on with its first figure: it stays
    # on
    matplotlib.interactive(interactive)


def save(
    draw: Callable[[], Axes | Figure],
    stem: Path | str,
    *,
    run_ids: Sequence[str],
    alt: str,
    about: str = "",
    formats: Sequence[str] = ("svg", "pdf", "png"),
) -> list[Path]:
    """Writes ``stem.<format>`` for each format and the sidecar ``stem.json``; returns
    the paths, the sidecar last. Equal data gives equal bytes.

    Args:
        draw: called once per format, since the layout of a figure changes when it is
            saved.
        run_ids: the runs of the data, for the sidecar.
        alt: a description for readers who cannot see the figure, for the sidecar.
        about: checkpoint, compression, max_seq_len and machine of the data: the
            subtitle, and the description in every file's metadata.
    """
    if not alt.strip():
        raise ValueError(f"{stem}: a figure needs a text alternative")
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in (*formats, "json")]
    for path, suffix in zip(paths, formats):
        with style():
            figure = draw().get_figure(root=True)
            title = _subtitle(figure, about)
            metadata = {"Title": title, **_DATES.get(suffix, {})}
            metadata[_DESCRIPTION.get(suffix, "Description")] = about or alt
            figure.savefig(path, format=suffix, metadata=metadata)
            plt.close(figure)
    sidecar = {"title": title, "about": about, "alt": alt, "run_ids": list(run_ids)}
    sidecar["written_by"] = writer()
    text = json.dumps(sidecar, indent=2, ensure_ascii=False)
    paths[-1].write_text(text + "\n", encoding="utf-8")
    return paths


def _subtitle(figure: Figure, about: str) -> str:
    """Sets the title of the whole figure with `about` below it; returns the title."""
    first = figure.axes[0]
    lines = figure.get_suptitle() or first.get_title(loc="left")
    title = lines.partition("\n")[0]
    if about:
        if not figure.get_suptitle():
            first.set_title("")
        space = "\N{NO-BREAK SPACE}"  # lines break beside the dots alone
        text = about.replace(" ", space).replace(f"{space}·{space}", " · ")
        letters = int(17 * figure.get_figwidth())
        lines = textwrap.wrap(text, letters, break_on_hyphens=False)
        whole = "\n".join([title, *lines])
        figure.suptitle(whole, x=0.01, ha="left", fontsize=7.5)
    return title


def writer() -> str:
    """The versions of the libraries on which the bytes of a figure depend."""
    libraries = f"matplotlib {matplotlib.__version__}, Pillow {PIL.__version__}"
    return f"{libraries}, zlib {zlib.ZLIB_RUNTIME_VERSION}"


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the axes of a new figure of that size in inches."""
    if ax is None:
        return plt.subplots(figsize=(width, height))[1]
    return ax


def grid_cells(
    ax: Axes, grid: pd.DataFrame, norm: Normalize, cmap: Colormap
) -> QuadMesh:
    """Draws a table as coloured cells, row 0 on top, labelled by its index and columns;
    nulls are hatched."""
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.patch.set(**_UNMEASURED)
    values = grid.to_numpy(dtype=float)
    mesh = ax.pcolormesh(values, norm=norm, cmap=cmap, rasterized=grid.size > 1024)
    label_cells(ax.xaxis, grid.columns)
    label_cells(ax.yaxis, grid.index)
    ax.set(xlabel=grid.columns.name, ylabel=grid.index.name)
    ax.set_ylim(len(grid), 0)
    return mesh


def ink(mesh: QuadMesh) -> np.ndarray:
    """White or black for each cell of a mesh, whichever contrasts with the cell's
    colour."""
    colours = mesh.to_rgba(mesh.get_array())
    dark = colours[..., :3].mean(axis=-1) < 0.5
    return np.where(dark, "white", "black")


def write_cells(mesh: QuadMesh, texts: pd.DataFrame) -> None:
    """Writes each text that is not null into the middle of its cell, a failure, ✗, in
    bold."""
    colours = ink(mesh)
    for (y, x), text in np.ndenumerate(texts.to_numpy()):
        if not pd.isna(text):
            look = {"ha": "center", "va": "center", "color": colours[y, x]}
            look["weight"] = "bold" if text == "✗" else "normal"
            mesh.axes.text(x + 0.5, y + 0.5, text, **look)


def crosses(ax: Axes, cells: np.ndarray, colour) -> None:
    """Marks the cells of a grid that are True, in one colour or one for each."""
    y, x = cells.nonzero()
    ax.scatter(x + 0.5, y + 0.5, s=14, marker="x", linewidths=1, color=colour)


def colour_bar(mesh: QuadMesh, ax: Axes | list[Axes], label: str) -> Colorbar:
    """The scale of a grid's colours beside it."""
    bar = mesh.figure.colorbar(mesh, ax=ax, label=label, pad=0.02, extend="neither")
    bar.outline.set_visible(False)
    return bar


def note(ax: Axes, text: str, x: float, y: float | str) -> Annotation:
    """Writes a text to the right of a point of the data."""
    return ax.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


def ring(ax: Axes, x: float, y: float, **options) -> None:
    """A ring around a point of the data."""
    ax.plot(x, y, "o", ms=11, mfc="none", mec="black", **options)


def label_cells(axis, labels: Sequence, most: int = 16) -> None:
    """Labels the cells along an axis; every 2nd, 5th, 10th … if there are more than
    `most`."""
    steps = np.outer(10 ** np.arange(9), (1, 2, 5)).ravel()
    step = steps[len(labels) <= steps * most][0]
    places = np.arange(0, len(labels), step) + 0.5
    axis.set_ticks(places, labels=list(map(str, labels[::step])))
    axis.set_tick_params(length=0)


def on_machine(title: str, data: pd.DataFrame) -> str:
    """A title of times, followed on a new line by the single value of the column
    `machine`.

    Raises:
        ValueError: rows of several machines.
    """
    machines = []
    if "machine" in data:
        machines = data["machine"].dropna().unique()
    if len(machines) > 1:
        text = "times are shown of one machine at a time"
        raise ValueError(f"rows of the machines {'; '.join(machines)}; {text}")
    return "\n".join([title, *machines])


def unmeasured_key(cells: pd.DataFrame) -> list[Patch]:
    """Legend entry for hatched cells, if any of `cells` is missing."""
    if cells.isna().any(axis=None):
        return [Patch(**_UNMEASURED, label="not measured")]
    return []


def without_invalid(data: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of valid runs, and rows of invalid ones, whose column `invalid` has a
    reason."""
    invalid = pd.Series(False, data.index)
    if "invalid" in data:
        invalid = data["invalid"].notna()
    return data[~invalid], data[invalid]


def invalid_key(ax: Axes, invalid: pd.DataFrame) -> list[Patch]:
    """The legend entry for rows of invalid runs, if there are any; their reasons are
    written below the axis."""
    if invalid.empty:
        return []
    letters = int(15 * ax.figure.get_figwidth())
    lines = [ax.get_xlabel()]
    for reason in invalid["invalid"].unique():
        lines += textwrap.wrap(f"invalid: {reason}", letters)
    ax.set_xlabel("\n".join(lines))
    return [Patch(**INVALID, label="invalid")]


def heading(ax: Axes, title: str, keys: Sequence[Artist] | None = None) -> Axes:
    """Sets the title with a one-line legend between it and the axes; returns the Axes.

    `keys` are the legend's entries, by default all labelled artists; without any there
    is no legend."""
    if keys is None:
        keys = ax.get_legend_handles_labels()[0]
    ax.set_title(title)
    if keys:
        ax.set_title(title, pad=18)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.01)}
        ax.legend(handles=keys, ncols=len(keys), handlelength=1.4, **place)
    return ax


def panels_heading(figure: Figure, title: str) -> Figure:
    """Sets the title above all panels; returns the figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    return figure


def median_range(
    ax: Axes,
    samples: pd.DataFrame,
    x: str,
    y: str,
    lines: str,
    label: str = "{}",
    base: int = 10,
) -> None:
    """Draws medians of `y` over `x` on a log scale, a line per value of the column
    `lines`, with bars from the least to the largest value. Lines are shifted a little
    along `x`, so that none hides another."""
    groups = list(samples.groupby(lines, sort=False))
    for place, (name, line) in enumerate(groups):
        points = line.groupby(x)[y]
        median = points.median()
        reach = [median - points.min(), points.max() - median]
        look = {"capsize": 2.5, "elinewidth": 0.8, "label": label.format(name)}
        apart = 1.04 ** (place - (len(groups) - 1) / 2)
        ax.errorbar(median.index * apart, median, yerr=reach, **look)
    ax.set_xscale("log", base=base)
    at = sorted(samples[x].unique())
    ax.set_xticks(at, labels=map(str, at))
    ax.grid(axis="y")


def counts_in_words(counts: pd.Series) -> str:
    """Numbers of samples, one for each point of a figure, as "5" or "9 to 24"."""
    ends = sorted({counts.min(), counts.max()})
    return " to ".join(map(str, ends))


def pivot_in_order(
    rows: pd.DataFrame, index: str, columns: str, values: str
) -> pd.DataFrame:
    """A table of `values` with its rows and columns in the order of their first
    occurrence."""
    table = rows.pivot(index=index, columns=columns, values=values)
    return table.loc[rows[index].drop_duplicates(), rows[columns].drop_duplicates()]
