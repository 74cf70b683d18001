"""Texts in figures: labels of values, wrapped lines, and code points in place of
characters that the font lacks."""

import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import pandas as pd
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import FigureBase
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import (
    FixedLocator,
    LogFormatterSciNotation,
    LogLocator,
    NullFormatter,
)

NOT_SET = "not set"
FONT_SIZE = 8  # points
LEAST_CHARACTERS = 8
"""Characters of a wrapped line, however narrow the figure is."""
MAX_CODE_POINTS = 3
"""Code points that are written for adjacent characters that the font lacks."""


def wrap(figure: FigureBase, text: str, share: float = 0.5, **font) -> str:
    """A text in lines of a share of the figure's width; `font` as in `wrap_at`."""
    return wrap_at(text, share * width_of(figure), **font)


def wrap_at(text: str, inches: float, **font) -> str:
    """A text in lines that are at most this wide, and not much narrower.

    Args:
        font: keywords of `measure_line`.
    """
    lines = []
    for characters in range(max(LEAST_CHARACTERS, len(text)), LEAST_CHARACTERS - 1, -1):
        # textwrap breaks a word that is longer than a line
        lines = textwrap.wrap(text, characters)
        if all(measure_line(line, **font) <= inches for line in lines):
            break
    return "\n".join(lines)


@cache
def measure_line(
    line: str, fontsize: float = FONT_SIZE, fontweight: str = "normal"
) -> float:
    """The width of a line of text in inches.

    Args:
        fontsize: in points.
    """
    font = FontProperties(size=fontsize, weight=fontweight)
    # the code points that are drawn in place of missing characters are wider
    drawn = in_code_points(line)
    points, _, _ = text_to_path.get_text_width_height_descent(drawn, font, ismath=False)
    return points / 72


def width_of(figure: FigureBase) -> float:
    """The width of a figure, or of a part of one, in inches."""
    return figure.bbox.width / figure.dpi


def label_of(column: str | None, value) -> str:
    """A value of a column as a label: a text alone, a number with the column's name."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return f"{column} {NOT_SET}"
    return f"{column} = {format_number(value)}"


def format_number(value) -> str:
    """A number without ".0": a null in a column makes floats of its whole numbers."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def format_count(count: int, thing: str) -> str:
    """A number of things in words."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def labels_of(names: Sequence) -> list[str]:
    """Labels of the rows or columns of a table."""
    return [NOT_SET if pd.isna(name) else str(name) for name in names]


def group_by(data: pd.DataFrame, column: str | None) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column with the value's label, in the order of the
    rows; without a column all rows. A null is a value."""
    if column is None:
        return [("", data)]
    parts = data.groupby(column, sort=False, dropna=False)
    return [(label_of(column, value), part) for value, part in parts]


def describe_unplaced(data: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """A note on the rows that a figure cannot place, since a column is null."""
    count = data[list(columns)].isna().any(axis=1).sum()
    if not count:
        return []
    rows = format_count(len(data), "row")
    return [f"not drawn: {count} of {rows}, without {' or '.join(columns)}"]


def label_log(axis) -> None:
    """Labels a logarithmic axis, depending on the ratio between its ends: from 40 on at
    powers of ten; above 4 at 1, 2 and 5 times a power of ten; otherwise at every tick.
    The labels are plain numbers where all lie from 0.01 to 9999."""
    low, high = axis.get_view_interval()
    is_plain = 0.01 <= low and high < 1e4
    formatter = "{x:g}" if is_plain else LogFormatterSciNotation()
    axis.set_major_formatter(formatter)
    if high >= 40 * low:
        axis.set_major_locator(LogLocator(subs=(1,)))
        axis.set_minor_formatter(NullFormatter())
    elif high > 4 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_minor_formatter(formatter)


@cache
def _characters() -> frozenset[int]:
    """Code points of the characters that the font of every figure has, in the weight of
    titles too."""
    # the font does not depend on the rest of the style
    with style.context("default"):
        fonts = (FontProperties(weight=weight) for weight in ("normal", "bold"))
        characters = [{*get_font(findfont(font)).get_charmap()} for font in fonts]
    return frozenset.intersection(*map(frozenset, characters))


def _missing_characters(text: str) -> set[str]:
    """The characters of a text that the font lacks."""
    return {c for c in text if c != "\n" and ord(c) not in _characters()}


def _code_points(characters: re.Match) -> str:
    points = [f"U+{ord(c):04X}" for c in characters[0][:MAX_CODE_POINTS]]
    words = " ".join(points)
    return f"{words}…" if len(characters[0]) > MAX_CODE_POINTS else words


def in_code_points(text: str) -> str:
    """A text with code points, such as U+4F60, in place of characters that the font
    lacks, which would be drawn as boxes."""
    all_missing = _missing_characters(text)
    if not all_missing:
        return text
    return re.sub(f"[{re.escape(''.join(all_missing))}]+", _code_points, text)


def _find_texts(artist: Artist) -> Iterator[Text]:
    """The texts of an artist and of its parts, without the labels of ticks: to list those,
    matplotlib would make every tick, which takes as long as the rest of a small figure."""
    if isinstance(artist, Axis):
        yield artist.label
        return
    if isinstance(artist, Text):
        yield artist
    for part in artist.get_children():
        yield from _find_texts(part)


def write_code_points(figure: FigureBase) -> None:
    """Changes all texts of a figure as `in_code_points` does, with one warning for the
    whole figure."""
    all_missing = set()
    for axis in chain.from_iterable((ax.xaxis, ax.yaxis) for ax in figure.axes):
        # matplotlib writes the labels of other locators anew, and those are numbers
        if isinstance(axis.get_major_locator(), FixedLocator):
            ticks = [label.get_text() for label in axis.get_ticklabels()]
            if missing := set().union(*map(_missing_characters, ticks)):
                all_missing |= missing
                words = [in_code_points(tick) for tick in ticks]
                axis.set_ticks(axis.get_majorticklocs(), labels=words)
    for text in _find_texts(figure):
        if missing := _missing_characters(text.get_text()):
            all_missing |= missing
            text.set_text(in_code_points(text.get_text()))
    if all_missing:
        points = ", ".join(
            f"U+{ord(character):04X}" for character in sorted(all_missing)
        )
        warnings.warn(
            f"the font of the figures lacks {points}; they are written as code points",
            stacklevel=3,
        )
