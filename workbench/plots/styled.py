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
import numpy as np
import pandas as pd
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.transforms import ScaledTranslation, Transform

from workbench.plots import text

COLUMN = 3.5  # inches: width of a column of a two-column page
PAGE = 7.1  # inches: width of a page
LINE = 0.16  # inches: height of a line of a title or a legend
SUBTITLE_LINE = 0.13  # inches: height of a line of a subtitle
TITLE_SHARE = 0.95
"""Of a figure's width, for titles and notes. A PNG has text that is up to 3% wider than it
is measured, since its letters stand on whole pixels."""
TITLE_FONT = {"fontsize": 9, "fontweight": "bold"}
SUBTITLE_FONT = {"fontsize": 7.5}
SUBTITLE_ID = "subtitle"
NOTE_FONT = {"fontsize": 7}
MUTED_COLOUR = "0.3"
"""The colour of subtitles and notes."""
EM = text.FONT_SIZE / 72  # inches: the unit of the lengths in a legend
LEGEND_LENGTHS = {"handlelength": 2.0, "handletextpad": 0.8, "columnspacing": 2.0}
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
    "font.size": text.FONT_SIZE,
    "axes.titlesize": text.FONT_SIZE,
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
    figure gets the common style, the note and the title."""

    @wraps(draw)
    def drawn(
        data: pd.DataFrame,
        *,
        title: str = "",
        note: str = "",
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
            add_note(figure, note)
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


def set_title(figure: FigureBase, title: str) -> None:
    """Writes a title above all axes, wrapped at the width of the figure."""
    lines = text.wrap(figure, title, TITLE_SHARE, **TITLE_FONT)
    add_height(figure, LINE * lines.count("\n"))
    figure.suptitle(lines, x=0.01, ha="left", **TITLE_FONT)


def add_subtitle(figure: Figure, subtitle: str) -> None:
    """Writes a subtitle below the title, smaller than it and in grey, wrapped at the
    width of the figure. A figure that has a subtitle keeps it, so that it can be saved
    twice."""
    if not subtitle or any(part.get_gid() == SUBTITLE_ID for part in figure.artists):
        return
    with style():
        _write_subtitle(figure, subtitle)
        text.write_code_points(figure)


def _write_subtitle(figure: Figure, subtitle: str) -> None:
    # a line ends with the sign between two facts, and none starts with it
    facts = subtitle.replace(" · ", "\N{NO-BREAK SPACE}· ")
    lines = text.wrap(figure, facts, TITLE_SHARE, **SUBTITLE_FONT)
    lines = lines.replace("\N{NO-BREAK SPACE}", " ")
    height = SUBTITLE_LINE * (1 + lines.count("\n"))
    add_height(figure, height)
    written = figure.get_suptitle()
    (title,) = (words for words in figure.texts if words.get_text() == written)
    figure.add_artist(
        Annotation(
            lines,
            (0, 0),
            (0, -2),
            xycoords=title,
            textcoords="offset points",
            va="top",
            color=MUTED_COLOUR,
            annotation_clip=False,
            gid=SUBTITLE_ID,
            **SUBTITLE_FONT,
        )
    )
    # the layout makes room for the title alone
    share = height / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - share))


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
    columns = _legend_columns(labels, TITLE_SHARE * text.width_of(figure))
    title = "\n".join(
        text.wrap(figure, note, TITLE_SHARE, **NOTE_FONT) for note in notes
    )
    lines = math.ceil(len(keys) / columns) + len(title.splitlines())
    add_height(figure, lines * LINE)
    legend = figure.legend(
        handles=keys,
        loc="outside lower left",
        ncols=columns,
        title=title or None,
        title_fontsize=NOTE_FONT["fontsize"],
        alignment="left",
        **LEGEND_LENGTHS,
    )
    legend.get_title().set_color(MUTED_COLOUR)


def add_note(figure: FigureBase, note: str) -> None:
    """Writes a note below the other notes of the legend."""
    if not note:
        return
    if not figure.legends:
        add_legend(figure, [], [note])
        return
    (legend,) = figure.legends
    lines = text.wrap(figure, note, TITLE_SHARE, **NOTE_FONT)
    add_height(figure, LINE * (1 + lines.count("\n")))
    notes = [words for words in (legend.get_title().get_text(), lines) if words]
    legend.set_title("\n".join(notes))


def _legend_columns(labels: Sequence[str], inches: float) -> int:
    """The number of columns of a legend that has as few rows as its width allows."""
    mark = EM * (LEGEND_LENGTHS["handlelength"] + LEGEND_LENGTHS["handletextpad"])
    gap = EM * LEGEND_LENGTHS["columnspacing"]
    widths = [mark + text.measure_line(label) + gap for label in labels]
    for rows in range(1, len(labels)):
        columns = math.ceil(len(labels) / rows)
        # matplotlib fills the columns one after the other, the first ones with more keys
        parts = np.array_split(widths, columns)
        if sum(part.max() for part in parts) - gap <= inches:
            return columns
    return 1


def unmeasured_key(label: str = "") -> Patch:
    """The legend's key for cells without a value; default: not measured."""
    return Patch(**UNMEASURED, label=label or "not measured")


def save(figure: Figure, stem: Path, *, subtitle: str = "") -> list[Path]:
    """Writes ``stem.svg``, ``.pdf`` and ``.png`` and returns their paths; equal data
    give equal bytes.

    Args:
        subtitle: checkpoint, options and machine of the data, in grey below the title.
    """
    title = figure.get_suptitle().replace("\n", " ")
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    add_subtitle(figure, subtitle)
    with style():
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


def shifted(ax: Axes, shift: float) -> Transform:
    """Data coordinates, `shift` points to the right."""
    scale = ax.get_figure().dpi_scale_trans
    return ax.transData + ScaledTranslation(shift / 72, 0, scale)
