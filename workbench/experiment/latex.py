"""Writes tables for a paper: LaTeX for pdflatex with the package booktabs."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from workbench import escape
from workbench.experiment.tables import text_columns, words_of

LINE_WIDTH = 340  # points: of the class article in 10 pt, the narrowest common one
SEPARATION = 7  # points between two columns
LEAST_PARAGRAPH = 9  # characters
READABLE_PARAGRAPH = 14  # characters: for a narrower one a smaller type is taken
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
    TypeSize(r"\scriptsize", 3.9),
    TypeSize(r"\tiny", 3.4),
)


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
    max_text_width: int
    """Characters of a line in a column of text; longer cells are broken into lines."""

    def is_broken(self, column: Column) -> bool:
        """Whether the cells of a column are paragraphs."""
        return column.is_text and column.width > self.max_text_width


def latex_table(table: pd.DataFrame, caption: str, label: str) -> str:
    """Writes a table of a paper.

    Where the table is wider than the page, columns of text become paragraphs, the widest
    first, and headings that are longer than their numbers have several lines.

    Args:
        caption: backticks mark code.
        label: for LaTeX's `\\ref`.
    """
    texts = set(text_columns(table))
    columns = {name: _measure(table[name], name in texts) for name in table.columns}
    fit = _fit_line([*columns.values()])
    cells, headings, formats = {}, [], []
    for name, column in columns.items():
        is_paragraph = fit.is_broken(column)
        cells[name] = [_latex_cell(value, is_paragraph) for value in column.values]
        headings.append(_latex_heading(column.heading, is_paragraph))
        if is_paragraph:
            points = fit.max_text_width * fit.size.character
            formats.append(rf"p{{{points:.0f}pt}}")
        else:
            formats.append("l" if column.is_text else "r")
    latex_cells = pd.DataFrame(cells)
    latex_cells.columns = headings
    text = latex_cells.to_latex(
        index=False,
        escape=False,
        column_format="".join(formats),
        caption=escape.latex_sentence(caption),
        label=label,
    )
    setup = f"{fit.size.command}\n\\setlength{{\\tabcolsep}}{{{SEPARATION / 2:g}pt}}\n"
    return text.replace("\\begin{tabular}", f"{setup}\\begin{{tabular}}", 1)


def _measure(values: pd.Series, is_text: bool) -> Column:
    longest = max((len(words_of(value)) for value in values), default=0)
    heading = [str(values.name)]
    if not is_text:
        heading = _lines_of(heading[0], max(longest, SHORT_HEADING))
    return Column(values, is_text, heading, max(longest, *map(len, heading)))


def _fit_line(columns: Sequence[Column]) -> TableFit:
    """The largest type in which a table fits the line, if need be with texts broken into
    lines that are still readable. In the smallest type, lines may be narrower, and the
    table may still be wider than the line."""
    text_widths = [column.width for column in columns if column.is_text]
    number_width = sum(column.width for column in columns if not column.is_text)
    points = LINE_WIDTH - SEPARATION * len(columns)
    for size in TYPE_SIZES:
        room = points / size.character - number_width  # characters for all texts
        limit = _longest_fitting(text_widths, room)
        fit = TableFit(size, limit)
        is_unbroken = limit == max(text_widths, default=0)
        is_readable = limit >= READABLE_PARAGRAPH or is_unbroken
        if is_readable and _total_width(text_widths, limit) <= room:
            return fit
    return fit


def _longest_fitting(text_widths: Sequence[int], room: float) -> int:
    """The largest limit on the characters of a line of text with which all columns of
    text fit beside each other. A limit below `LEAST_PARAGRAPH` is not tried.

    Args:
        text_widths: characters of each column of text.
        room: characters for all of them.
    """
    limit = max(text_widths, default=0)
    while limit > LEAST_PARAGRAPH and _total_width(text_widths, limit) > room:
        limit -= 1
    return limit


def _total_width(text_widths: Sequence[int], limit: int) -> int:
    """The characters of all columns of text when none has a longer line than `limit`."""
    return sum(min(width, limit) for width in text_widths)


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
    if len(lines) == 1:
        return _latex_cell(lines[0], is_paragraph)
    stacked = r"\\".join(map(_latex_cell, lines))
    return rf"\shortstack[r]{{{stacked}}}"


def _latex_cell(value: object, is_paragraph: bool = False) -> str:
    """A cell; in a paragraph, lines end at spaces and within long words."""
    text = unicodedata.normalize("NFC", words_of(value))
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
