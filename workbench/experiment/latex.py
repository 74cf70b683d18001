"""Writes tables for a paper: LaTeX for pdflatex with the package booktabs."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from workbench import escape
from workbench.experiment.headings import SYMBOL, heading_of
from workbench.experiment.tables import (
    printed,
    text_columns,
    with_powers,
    without_run_ids,
    words_of,
)

LINE_WIDTH = 340  # points: of the class article in 10 pt, the narrowest common one
SEPARATION = 7  # points between two columns
LEAST_PARAGRAPH = 9  # characters
# For narrower paragraphs a smaller type is taken: their characters, which for a long text
# grow with its length up to a width that needs no more.
READABLE_PARAGRAPH = 14
READABLE_LINES = 10
READABLE_LONG_PARAGRAPH = 28
SHORT_HEADING = 6  # characters of a heading's line that always fit
# A word of more characters, such as a tensor's name, may be broken behind these signs.
LONG_WORD = 12
PIECES = re.compile(r"[^._/:,=-]{1,16}[._/:,=-]*|[._/:,=-]+")


@dataclass(frozen=True)
class TypeSize:
    """A size of LaTeX's type, and the mean width of a character of it in points."""

    command: str
    character: float


# The mean widths of letters and digits of Computer Modern, digits weighing most.
TYPE_SIZES = (
    TypeSize(r"\small", 4.7),
    TypeSize(r"\footnotesize", 4.3),
    TypeSize(r"\scriptsize", 3.9),  # no smaller one is read in print
)
# A table that does not fit in any of them is split into parts of this type or a larger one.
PART_SIZES = TYPE_SIZES[:2]
MOST_KEYS = 3  # columns that each part of a table repeats
NUMBER = re.compile(r"−?(?:[\d.]+(?:×10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?|∞)")  # as `printed` writes it


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    values: pd.Series
    is_text: bool
    """Whether it is aligned to the left, and may be broken into lines."""
    heading: list[str]
    """The lines of the heading."""
    width: int
    """Characters of its longest line, where no cell is broken."""


@dataclass(frozen=True)
class TableFit:
    """The largest type in which a table fits the line."""

    size: TypeSize
    text_widths: list[int]
    """Characters of a line in each column of text; longer cells are broken into lines."""


def latex_table(table: pd.DataFrame, caption: str, label: str) -> str:
    """Writes a table of a paper.

    Where the table is wider than the page, columns of text become paragraphs, which share
    the width by the length of their texts, and headings that are longer than their numbers
    have several lines. A table that is wider still becomes several tables, which repeat
    the columns that name a row. Columns of run ids and of lists are left out: no paper
    prints them.

    Args:
        caption: backticks mark code.
        label: for LaTeX's `\\ref`. The second part of a split table has the label with
            ``-2`` behind it, and so on.
    """
    table = without_run_ids(table)
    table = table[[name for name in table.columns if not _has_lists(table[name])]]
    texts = set(text_columns(table))
    columns = [_measure(table[name], name in texts) for name in table.columns]
    parts = _split(columns)
    written = []
    for number, part in enumerate(parts, 1):
        is_first = number == 1
        of_part = f" (Part {number} of {len(parts)}.)" if len(parts) > 1 else ""
        part_label = label if is_first else f"{label}-{number}"
        written.append(_write_part(part, caption + of_part, part_label))
    return "\n".join(written)


def _write_part(columns: Sequence[Column], caption: str, label: str) -> str:
    """One table environment with these columns."""
    fit = _fit_line(columns)
    text_widths = iter(fit.text_widths)
    cells, headings, formats = {}, [], []
    for column in columns:
        width = next(text_widths) if column.is_text else column.width
        is_paragraph = width < column.width
        cells[column.values.name] = [
            _latex_cell(value, is_paragraph) for value in column.values
        ]
        headings.append(_latex_heading(column.heading, is_paragraph))
        if is_paragraph:
            points = width * fit.size.character
            formats.append(rf"p{{{points:.0f}pt}}")
        else:
            formats.append("l" if column.is_text else "r")
    latex_cells = pd.DataFrame(cells)
    latex_cells.columns = headings
    text = latex_cells.to_latex(
        index=False,
        escape=False,
        column_format="".join(formats),
        caption=escape.latex_sentence(with_powers(caption)),
        label=label,
    )
    setup = f"{fit.size.command}\n\\setlength{{\\tabcolsep}}{{{SEPARATION / 2:g}pt}}\n"
    return text.replace("\\begin{tabular}", f"{setup}\\begin{{tabular}}", 1)


def _split(columns: Sequence[Column]) -> list[list[Column]]:
    """The parts of a table, each with the columns that name a row in front. A table that
    fits the line in one of `TYPE_SIZES` is one part."""
    if _find_fit(columns, TYPE_SIZES):
        return [[*columns]]
    count = _count_keys(columns)
    keys, parts = [*columns[:count]], [[]]
    for column in columns[count:]:
        if parts[-1] and not _find_fit([*keys, *parts[-1], column], PART_SIZES):
            parts.append([])
        parts[-1].append(column)
    return [[*keys, *part] for part in parts]


def _count_keys(columns: Sequence[Column]) -> int:
    """The number of first columns that tell all rows apart, at most `MOST_KEYS`; 1 where
    so many do not."""
    rows = pd.DataFrame()
    for count, column in enumerate(columns[:MOST_KEYS], 1):
        rows[count] = [words_of(value) for value in column.values]
        if not rows.duplicated().any():
            return count
    return 1


def _has_lists(values: pd.Series) -> bool:
    """Whether a cell is a list, or another collection."""
    return any(pd.api.types.is_list_like(value) for value in values)


def _measure(values: pd.Series, is_text: bool) -> Column:
    longest = max((len(printed(value)) for value in values), default=0)
    heading = [heading_of(str(values.name))]
    if not is_text:
        heading = _lines_of(heading[0], max(longest, SHORT_HEADING))
    return Column(values, is_text, heading, max(longest, *map(len, heading)))


def _find_fit(columns: Sequence[Column], sizes: Sequence[TypeSize]) -> TableFit | None:
    """The largest of some types in which a table fits the line, if need be with texts
    broken into lines that are still readable; None where it fits in no type."""
    full_widths = [column.width for column in columns if column.is_text]
    for size in sizes:
        room = _room_for_texts(columns, size)
        least_widths = [*map(_readable_width, full_widths)]
        if sum(least_widths) <= room:
            return TableFit(size, _shared_widths(full_widths, least_widths, room))
    return None


def _fit_line(columns: Sequence[Column]) -> TableFit:
    """The largest type in which a table fits the line. Where it fits in no type, the
    smallest one: lines may then be narrower than is readable, and the table may still be
    wider than the line."""
    if fit := _find_fit(columns, TYPE_SIZES):
        return fit
    size = TYPE_SIZES[-1]
    room = _room_for_texts(columns, size)
    full_widths = [column.width for column in columns if column.is_text]
    limit = _longest_fitting(full_widths, room)
    least_widths = [min(width, limit) for width in full_widths]
    return TableFit(size, _shared_widths(full_widths, least_widths, room))


def _room_for_texts(columns: Sequence[Column], size: TypeSize) -> float:
    """The characters of a line that columns of numbers leave to all columns of text."""
    points = LINE_WIDTH - SEPARATION * len(columns)
    number_width = sum(column.width for column in columns if not column.is_text)
    return points / size.character - number_width


def _readable_width(width: int) -> int:
    """The characters that a line of a text needs.

    Args:
        width: characters of the whole text.
    """
    wanted = max(READABLE_PARAGRAPH, width // READABLE_LINES)
    return min(width, wanted, READABLE_LONG_PARAGRAPH)


def _longest_fitting(full_widths: Sequence[int], room: float) -> int:
    """The largest limit on the characters of a line of text, up to a readable paragraph's,
    with which all columns of text fit beside each other. A limit below `LEAST_PARAGRAPH`
    is not tried.

    Args:
        full_widths: characters of each column of text.
        room: characters for all of them.
    """
    limit = READABLE_PARAGRAPH
    while limit > LEAST_PARAGRAPH:
        if sum(min(width, limit) for width in full_widths) <= room:
            break
        limit -= 1
    return limit


def _shared_widths(
    full_widths: Sequence[int], least_widths: Sequence[int], room: float
) -> list[int]:
    """The characters of a line of each column of text: the same share of its length, at
    least the least width, and the share is the largest with which all fit."""
    pairs = [*zip(full_widths, least_widths)]
    for percent in range(100, 0, -1):
        widths = [max(least, full * percent // 100) for full, least in pairs]
        if sum(widths) <= room:
            return widths
    return [*least_widths]


def _lines_of(heading: str, width: int) -> list[str]:
    """A heading in lines of about `width` characters, broken at spaces and behind
    underscores."""
    lines: list[str] = []
    for piece in re.findall(r"[^\s_]+_?\s*|_\s*|\s+", heading):
        if lines and len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.rstrip() for line in lines] or [""]


def _latex_heading(lines: list[str], is_paragraph: bool) -> str:
    """The lines of a heading, one above the other; a symbol has its index lowered."""
    if SYMBOL.fullmatch("".join(lines)):
        letter, index = "".join(lines).split("_")
        return rf"${letter}_{{\mathrm{{{index}}}}}$"
    if len(lines) == 1:
        return _latex_cell(lines[0], is_paragraph)
    stacked = r"\\".join(map(_latex_cell, lines))
    return rf"\shortstack[r]{{{stacked}}}"


def _latex_number(printed: str) -> str:
    """A printed number in LaTeX's mathematics: −4.6×10⁻⁶ → ``$-4.6\\times10^{-6}$``."""
    written = printed.replace("−", "-").replace("×", r"\times").replace("∞", r"\infty")

    def exponent(raised: re.Match) -> str:
        return f"^{{{''.join(map(escape.SUPERSCRIPTS.get, raised[0]))}}}"

    written = escape.RAISED.sub(exponent, written)
    return written if re.fullmatch(r"[\d.]*", written) else f"${written}$"


def _latex_cell(value: object, is_paragraph: bool = False) -> str:
    """A cell; in a paragraph, lines end at spaces and within long words."""
    text = unicodedata.normalize("NFC", printed(value))
    if NUMBER.fullmatch(text) and not isinstance(value, str):
        return _latex_number(text)
    if is_paragraph:
        words = []
        for word in text.split():
            pieces = PIECES.findall(word) if len(word) > LONG_WORD else [word]
            words.append(r"\allowbreak{}".join(map(escape.latex, pieces)))
        # \raggedright gives \\ another meaning than the end of a row
        begin = r"\raggedright\let\\\tabularnewline\hspace{0pt}"
        return begin + " ".join(words)
    text = escape.latex(text)
    # behind the end of a row, [ begins a length and * forbids a page break
    return f"{{}}{text}" if text.startswith(("[", "*")) else text
