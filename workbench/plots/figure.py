"""What all figures share: their look, grids of cells, and files that come out the same every time.

`save` takes a function that draws, and writes SVG, PDF and PNG with a sidecar. Knows nothing of
what is drawn.
"""

import itertools
import json
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours, which colour-blind readers tell apart."""

COLUMN, PAGE = 3.5, 7.1
"""Widths of figures in inches: one column of a paper with two, and both."""

STYLE = {
    "font.family": "sans-serif",
    # the first is the font that matplotlib ships; SVG readers without it take the next one they
    # have
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
"""The box of a text that lies on lines."""

INVALID = {"facecolor": "none", "edgecolor": "0.4", "hatch": "xxxx"}
"""The look of what an invalid run measured."""

_UNMEASURED = {"facecolor": "0.95", "edgecolor": "0.6", "hatch": "////"}


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure here, as a context or a decorator for figures of your own."""
    with matplotlib.rc_context(STYLE):
        yield
        interactive = matplotlib.is_interactive()
    matplotlib.interactive(
        interactive
    )  # a notebook's backend loads with its first figure: leave on what it turned on


def save(
    draw: Callable[[], Axes | Figure],
    stem: Path | str,
    *,
    run_ids: Sequence[str],
    alt: str,
    about: str = "",
    formats: Sequence[str] = ("svg", "pdf", "png"),
) -> list[Path]:
    """Write ``stem.<format>`` for each format and the sidecar ``stem.json``; return the paths,
    sidecar last.

    `draw` is called afresh for each format, since a figure that has been saved once lays itself out
    differently: the same data gives the same bytes. `about`, the checkpoint, compression,
    max_seq_len and machine that the figure shows, becomes its subtitle and the description in every
    file's metadata. The sidecar holds `run_ids` (the runs shown), `alt` (what a reader who cannot
    see the figure should know), the title and the versions that wrote the files.
    """
    if not alt.strip():
        raise ValueError(f"{stem}: a figure needs a text alternative")
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in (*formats, "json")]
    for path, suffix in zip(paths, formats):
        with style():
            drawn = draw()
            figure = drawn if isinstance(drawn, Figure) else drawn.figure
            title = _subtitle(figure, about)
            metadata = {"Title": title, _DESCRIPTION.get(suffix, "Description"): about or alt}
            figure.savefig(path, format=suffix, metadata=metadata | _DATES.get(suffix, {}))
            plt.close(figure)
    sidecar = {"title": title, "about": about, "alt": alt, "run_ids": list(run_ids)}
    sidecar["written_by"] = writer()
    paths[-1].write_text(json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def _subtitle(figure: Figure, about: str) -> str:
    """Sets the title of the whole figure with `about` below it; returns the title."""
    first = figure.axes[0]
    title = (figure.get_suptitle() or first.get_title(loc="left")).partition("\n")[0]
    if about:
        if not figure.get_suptitle():
            first.set_title("")
        whole = about.replace(" ", "\N{NO-BREAK SPACE}").replace(
            "\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}", " · "
        )
        letters = int(17 * figure.get_figwidth())
        lines = textwrap.wrap(whole, letters, break_on_hyphens=False)
        figure.suptitle("\n".join([title, *lines]), x=0.01, ha="left", fontsize=7.5)
    return title


def writer() -> str:
    """What the bytes of a figure depend on besides its data."""
    return f"matplotlib {matplotlib.__version__}, Pillow {PIL.__version__}, zlib {zlib.ZLIB_RUNTIME_VERSION}"


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the axes of a new figure of that size in inches."""
    if ax is None:
        return plt.subplots(figsize=(width, height))[1]
    return ax


def grid_cells(ax: Axes, grid: pd.DataFrame, norm: Normalize, cmap: Colormap) -> QuadMesh:
    """Draw a table as coloured cells, row 0 on top, labelled by its index and columns; missing
    cells are hatched."""
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.patch.set(**_UNMEASURED)
    mesh = ax.pcolormesh(
        grid.to_numpy(dtype=float), norm=norm, cmap=cmap, rasterized=grid.size > 1024
    )
    label_cells(ax.xaxis, grid.columns)
    label_cells(ax.yaxis, grid.index)
    ax.set(xlabel=grid.columns.name, ylabel=grid.index.name, ylim=(len(grid), 0))
    return mesh


def ink(mesh: QuadMesh) -> np.ndarray:
    """The colour, white or black, that is seen on each cell of a mesh."""
    dark = mesh.to_rgba(mesh.get_array())[..., :3].mean(axis=-1) < 0.5
    return np.where(dark, "white", "black")


def write_cells(mesh: QuadMesh, texts: pd.DataFrame) -> None:
    """Writes each text, unless it is missing, into the middle of its cell; a failure, ✗, in
    bold."""
    colours = ink(mesh)
    for (y, x), text in np.ndenumerate(texts.to_numpy()):
        if not pd.isna(text):
            weight = "bold" if text == "✗" else "normal"
            mesh.axes.text(
                x + 0.5, y + 0.5, text, ha="center", va="center", color=colours[y, x], weight=weight
            )


def note(ax: Axes, text: str, x: float, y: float | str) -> Annotation:
    """Writes a text to the right of a point of the data."""
    return ax.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


def ring(ax: Axes, x: float, y: float, **options) -> None:
    """A ring around a point of the data."""
    ax.plot(x, y, "o", ms=11, mfc="none", mec="black", **options)


def label_cells(axis, labels: Sequence, most: int = 16) -> None:
    """Put labels at the middles of the cells along an axis; every 2nd, 5th, 10th … where there are
    more than `most`."""
    steps = (step * 10**n for n in itertools.count() for step in (1, 2, 5))
    step = next(step for step in steps if len(labels) <= step * most)
    axis.set_ticks(np.arange(0, len(labels), step) + 0.5, labels=list(map(str, labels[::step])))
    axis.set_tick_params(length=0)


def on_machine(title: str, data: pd.DataFrame) -> str:
    """A title of times and, on a line of its own, the one machine that the column `machine` of
    `data` names.

    Raises:
        ValueError: rows of several machines.
    """
    if "machine" in data:
        machines = data["machine"].dropna().unique()
    else:
        machines = []
    if len(machines) > 1:
        raise ValueError(
            f"rows of the machines {'; '.join(machines)}; times are shown of one machine at a time"
        )
    return f"{title}\n{machines[0]}" if len(machines) else title


def unmeasured_key(cells: pd.DataFrame) -> list[Patch]:
    """Legend entry for hatched cells, if any of `cells` is missing."""
    return [Patch(**_UNMEASURED, label="not measured")] * bool(cells.isna().any(axis=None))


def without_invalid(data: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of valid runs, and the rest: those whose column `invalid`, where there is one, gives a
    reason."""
    if "invalid" in data:
        invalid = data["invalid"].notna()
    else:
        invalid = pd.Series(False, data.index)
    return data[~invalid], data[invalid]


def invalid_key(ax: Axes, invalid: pd.DataFrame) -> list[Patch]:
    """Legend entry for what invalid runs measured, if there are any; writes their reasons below the
    axis."""
    if invalid.empty:
        return []
    width = int(15 * ax.figure.get_figwidth())  # letters
    reasons = "\n".join(textwrap.fill(f"invalid: {r}", width) for r in invalid["invalid"].unique())
    ax.set_xlabel(f"{ax.get_xlabel()}\n{reasons}")
    return [Patch(**INVALID, label="invalid")]


def heading(ax: Axes, title: str, keys: Iterable[Artist] | None = None) -> Axes:
    """Sets the title with a one-line legend between it and the axes; returns the Axes.

    `keys` are the legend's entries, by default all labelled artists; without any there is no
    legend.
    """
    if keys is None:
        keys = ax.get_legend_handles_labels()[0]
    else:
        keys = list(keys)
    ax.set_title(title, pad=18 if keys else None)
    if keys:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.01)}
        ax.legend(handles=keys, ncols=len(keys), handlelength=1.4, **place)
    return ax


def median_range(
    ax: Axes, samples: pd.DataFrame, x: str, y: str, lines: str, label: str = "{}", base: int = 10
) -> None:
    """Draws medians of `y` over `x`, on a log scale, a line per value of the column `lines`; bars
    reach from the least to the largest. Lines stand a little apart along `x`, so that none hides
    another."""
    groups = list(samples.groupby(lines, sort=False))
    for place, (name, line) in enumerate(groups):
        values = line.groupby(x)[y].agg(["median", "min", "max"])
        reach = [values["median"] - values["min"], values["max"] - values["median"]]
        look = {"capsize": 2.5, "elinewidth": 0.8, "label": label.format(name)}
        apart = 1.04 ** (place - (len(groups) - 1) / 2)
        ax.errorbar(values.index * apart, values["median"], yerr=reach, **look)
    ax.set_xscale("log", base=base)
    at = sorted(samples[x].unique())
    ax.set_xticks(at, labels=map(str, at))
    ax.grid(axis="y")


def counts_in_words(counts: pd.Series) -> str:
    """Numbers of samples, one for each point of a figure, as "5" or "9 to 24"."""
    least, most = counts.min(), counts.max()
    return f"{least}" if least == most else f"{least} to {most}"


def pivot_in_order(rows: pd.DataFrame, index: str, columns: str, values: str) -> pd.DataFrame:
    """A table of `values` whose rows and columns come in the order in which `rows` first names
    them."""
    table = rows.pivot(index=index, columns=columns, values=values)
    return table.loc[rows[index].drop_duplicates(), rows[columns].drop_duplicates()]
