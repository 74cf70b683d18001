"""The look of every figure: colours, sizes, and the figure that is drawn and saved in
this look whatever the user's settings are."""

import io
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from itertools import cycle
from pathlib import Path

import matplotlib
import matplotlib.style
import pandas as pd
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.patches import Patch

from workbench.plots import text

COLUMN = 3.5  # inches: width of a column of a two-column page
PAGE = 7.1  # inches: width of a page
LINE = 0.16  # inches: height of a line of a title or a legend
LEGEND_CHARACTERS_PER_INCH = 16
MARK_CHARACTERS = 7  # the mark before a label of a legend is as wide as these
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart."""
MARKERS = "os^DvPX<>"
PRESET_LOOKS = {
    "mixed": (PALETTE[0], "o"),
    "fp16": (PALETTE[6], "s"),
    "int8-channel": (PALETTE[1], "^"),
    "lut6-g16": (PALETTE[2], "D"),
    "lut4-g8": (PALETTE[3], "v"),
    "int4-block32": (PALETTE[4], "P"),
    "int8-tensor": (PALETTE[5], "<"),
}
"""A preset of `--compress` → its colour and its mark in every figure. All colours differ,
and all marks, which tell the presets apart in a print without colours."""
SPARE_LOOKS = (("#882255", ">"), ("#332288", "p"))
"""Looks for further presets: a new one takes the first of these into `PRESET_LOOKS`. They
are darker than all colours of the palette but black, so that they stay apart from it in a
print without colours. Source of the colours: the muted scheme of Paul Tol."""
CHOSEN_LOOK = ("#F0E442", "*")
"""What a search chose, in every figure: the eighth colour of Okabe and Ito, which no preset
and no line has. It is too light for a line, and needs a dark edge."""
BEYOND_COLOUR = PALETTE[5]
DASHED = {"color": "black", "linestyle": "--", "linewidth": 0.8}
# kinds of files → metadata without a date, which would change the bytes of equal figures
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
UNMEASURED = {"facecolor": "0.95", "edgecolor": "0.7", "hatch": "...."}
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
    "hatch.linewidth": 0.4,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "workbench",
    "svg.fonttype": "none",  # text stays text: searchable, in the reader's font
}


def style() -> AbstractContextManager:
    """A context with the look of every figure. It starts from matplotlib's defaults, so
    that no setting of the user takes part, and gives the user's settings back."""
    return matplotlib.style.context(["default", STYLE])


class StyledFigure(Figure):
    """A figure that is drawn, shown and saved in the look of this module. matplotlib
    creates ticks and reads settings as late as at drawing."""

    def draw(self, renderer) -> None:
        with style():
            engine = self.get_layout_engine()
            # To save a figure matplotlib draws it twice: first to lay it out, then, with a
            # placeholder as its layout engine, to write it. Here the first pass lays out
            # and draws nothing, which halves the time where there are many cells.
            layout_is_done = engine is None or isinstance(
                engine, PlaceHolderLayoutEngine
            )
            if self.canvas.is_saving() and not layout_is_done:
                engine.execute(self)
                return
            super().draw(renderer)

    def savefig(self, fname, **options) -> None:
        with style():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        """The picture in a notebook."""
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=100)
        return png.getvalue()


def returns_figure(draw: Callable) -> Callable:
    """Turns `draw(data, figure, …)` into a function that returns the figure: a new one,
    or the argument `figure`, cleared first, which may be a subfigure of a larger one. The
    figure gets the common style and the title."""

    @wraps(draw)
    def drawn(
        data: pd.DataFrame,
        *,
        title: str = "",
        width: float = PAGE,
        figure: FigureBase | None = None,
        **options,
    ) -> FigureBase:
        with style():
            if figure is None:
                figure = StyledFigure(figsize=(width, 3))
            figure.clear()
            draw(data, figure, **options)
            # labels of x axes would overlap those of the next panel
            for ax in figure.axes:
                ax.xaxis.label.set_text(text.wrap(figure, ax.get_xlabel()))
            set_title(figure, title)
            text.write_code_points(figure)
        return figure

    return drawn


def looks(marks: str = MARKERS) -> Iterator[tuple[str, str]]:
    """A colour and a mark for each of several groups. The numbers of colours and marks
    have no common divisor, so that 63 groups look different, and neighbours differ in
    both."""
    return zip(cycle(PALETTE), cycle(marks))


def looks_by_name(
    names: Iterable[Hashable],
    vocabulary: Sequence[str] = (),
    all_looks: Iterator[tuple[str, str]] | None = None,
) -> dict[Hashable, tuple[str, str]]:
    """The colour and the mark of each name, the names of the vocabulary first. A preset
    has its look of `PRESET_LOOKS`, which no other name of the figure has.

    Args:
        vocabulary: all names that figures of a kind may have. Each has the look of its
            place here, whichever of them a figure draws.
        all_looks: of names that are no presets; default: `looks()`.
    """
    all_names = dict.fromkeys([*vocabulary, *names])
    remaining_looks = all_looks or looks()
    if all_names.keys() & PRESET_LOOKS.keys():
        reserved = {*PRESET_LOOKS.values()}
        remaining_looks = (look for look in remaining_looks if look not in reserved)
    return {name: PRESET_LOOKS.get(name) or next(remaining_looks) for name in all_names}


def set_title(figure: FigureBase, *paragraphs: str) -> None:
    """Writes each paragraph above all axes, wrapped at the width of the figure or
    before it, so that no line has a single word left."""
    lines = [text.wrap_evenly(figure, words) for words in paragraphs if words]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9)


def set_height(figure: FigureBase, inches: float) -> None:
    """Makes a figure as high as its content needs. A subfigure keeps the height that its
    figure gives it."""
    if isinstance(figure, Figure):
        figure.set_figheight(inches)


def add_height(figure: FigureBase, inches: float) -> None:
    """Makes room for more content; see `set_height`."""
    set_height(figure, figure.bbox.height / figure.dpi + inches)


def panels_in(
    figure: FigureBase, count: int, height: float, sharey: bool = True
) -> Sequence[Axes]:
    """Axes of `count` panels, each `height` inches high: side by side on a page, one
    above the other in a column."""
    shape = (1, count) if text.width_of(figure) > COLUMN else (count, 1)
    set_height(figure, 1.2 + height * shape[0])
    return figure.subplots(*shape, squeeze=False, sharex=True, sharey=sharey).flat


def add_legend(figure: FigureBase, keys: Sequence, notes: Sequence[str] = ()) -> None:
    """A legend below all axes, in as many columns as fit into the width, under the
    notes."""
    if not keys and not notes:
        return
    labels = [key.get_label() for key in keys]
    longest = max(
        (len(line) for label in labels for line in label.split("\n")), default=0
    )
    line_characters = LEGEND_CHARACTERS_PER_INCH * text.width_of(figure)
    columns = max(1, int(line_characters / (longest + MARK_CHARACTERS)))
    title = "\n".join(text.wrap(figure, note, 0.95) for note in notes)
    lines = math.ceil(len(keys) / columns) + len(title.splitlines())
    add_height(figure, lines * LINE)
    legend_options = {"title": title, "alignment": "left"} if title else {}
    figure.legend(
        handles=keys, loc="outside lower left", ncols=columns, **legend_options
    )


def unmeasured_key() -> Patch:
    """The legend's key for cells without a value."""
    return Patch(**UNMEASURED, label="not measured")


def save(figure: Figure, stem: Path, *, subtitle: str = "") -> list[Path]:
    """Writes ``stem.svg``, ``.pdf`` and ``.png`` and returns their paths; equal data
    give equal bytes.

    Args:
        subtitle: checkpoint, options and machine of the data, which end the title.
    """
    title = figure.get_suptitle().replace("\n", " ")
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with style():
        set_title(figure, title, subtitle)
        text.write_code_points(figure)
    for suffix in UNDATED:
        paths.append(stem.with_name(f"{stem.name}.{suffix}"))
        paths[-1].write_bytes(encode(figure, suffix, title))
    return paths


def encode(figure: Figure, suffix: str, title: str = "") -> bytes:
    """A figure as the bytes of a file; equal figures give equal bytes.

    Args:
        suffix: of `UNDATED`.
        title: in the file's metadata.
    """
    contents = io.BytesIO()
    metadata = {"Title": title} if title else {}
    with style():
        figure.savefig(contents, format=suffix, metadata=metadata | UNDATED[suffix])
    return contents.getvalue()
