"""Writes tables for a notebook (HTML), a report (Markdown) and a paper (LaTeX). A value
has the same words in each, and callers pass texts unescaped."""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas.io.formats.style import Styler

from workbench import escape
from workbench.check import gates
from workbench.errors import visible

SIGNS = {
    "RED": "✗ RED",
    "OVER": "✗ OVER",
    "GREEN": "✓ GREEN",
    "WITHIN": "✓ WITHIN",
    gates.NOT_JUDGED: "– not judged",
    "not_run": "– not run",
}
VERDICT_CLASSES = {
    SIGNS["GREEN"]: "good",
    SIGNS["WITHIN"]: "good",
    SIGNS["RED"]: "bad",
    SIGNS["OVER"]: "bad",
}
"""A verdict with its sign → the CSS class of a page's cell, which colours it."""
NULL = "–"
SHORT_TEXT = 24  # characters of a column of a page whose cells are not broken
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
LINE_WIDTH = 340  # points: of the class article in 10 pt, the narrowest common one
SEPARATION = 7  # points between two columns
LEAST_PARAGRAPH = 9  # characters
READABLE_PARAGRAPH = 14  # characters: for a narrower one a smaller type is taken
SHORT_HEADING = 6  # characters of a heading's line that always fit


def words_of(value: object) -> str:
    """A cell in words: numbers with four digits, nulls as –."""
    if isinstance(value, float):
        return NULL if math.isnan(value) else f"{value:.4g}"
    if value is None or value is pd.NA or value is pd.NaT:
        return NULL
    if hasattr(value, "tolist"):
        return words_of(value.tolist())
    return str(value)


def table_of(rows: Sequence[Mapping], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table with these columns, whose texts are Python's objects: pandas' own
    type of text refuses lone surrogates, which a stranger's JSON may hold."""
    values_of = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        has_text = any(isinstance(value, str) for value in values)
        values_of[name] = pd.Series(values, dtype=object if has_text else None)
    return pd.DataFrame(values_of, columns=list(columns))


def text_columns(table: pd.DataFrame) -> list:
    """Columns that are aligned to the left: all but those of numbers."""
    return list(table.select_dtypes(exclude="number").columns)


def show(table: pd.DataFrame) -> Styler:
    """A table for display: text and its heading to the left and wrapped, numbers with
    four digits, nulls as –."""
    texts = text_columns(table)
    left = {"text-align": "left", "white-space": "normal", "max-width": "44em"}
    heading = [{"selector": "th.col_heading", "props": [("text-align", "left")]}]
    styler = table.style.format(lambda value: escape.html(words_of(value)))
    styler = styler.format_index(escape.html, axis="columns").hide(axis="index")
    styler = styler.set_properties(subset=texts, **left)
    return styler.set_table_styles(dict.fromkeys(texts, heading), overwrite=False)


def show_with_caption(table: pd.DataFrame, caption: str) -> Styler:
    """A table for display below its caption, in which backticks mark code."""
    return show(table).set_caption(escape.html_sentence(caption))


def markdown_table(table: pd.DataFrame) -> str:
    """A table of a report."""
    texts = set(text_columns(table))
    headings = [escape.markdown_cell(name) for name in table.columns]
    columns = [[escape.markdown_cell(words_of(v)) for v in table[n]] for n in table]
    widths = [max(3, *map(len, [h, *c])) for h, c in zip(headings, columns)]
    is_text = [name in texts for name in table.columns]

    def line(cells: Iterable[str]) -> str:
        padded = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(cells, widths, is_text)
        ]
        return f"| {' | '.join(padded)} |"

    ruler = [
        f":{'-' * (width + 1)}" if left else f"{'-' * (width + 1)}:"
        for width, left in zip(widths, is_text)
    ]
    return "\n".join(
        [line(headings), f"|{'|'.join(ruler)}|", *map(line, zip(*columns))]
    )


def html_table(table: pd.DataFrame, caption: str = "") -> str:
    """A table of a page, below its caption, in which backticks mark code. A cell that is
    a verdict has its colour."""
    texts = set(text_columns(table))
    column_classes = []
    for name in table.columns:
        longest = max(map(len, map(words_of, [name, *table[name]])))
        text_class = "" if longest > SHORT_TEXT else "short"
        column_classes.append(text_class if name in texts else "number")

    def line(tag: str, cells: Iterable[object], classes: Iterable[str]) -> str:
        written = []
        for cell, css_class in zip(cells, classes):
            attribute = f' class="{css_class}"' if css_class else ""
            text = escape.html(visible(words_of(cell)))
            written.append(f"<{tag}{attribute}>{text}</{tag}>")
        return f"<tr>{''.join(written)}</tr>"

    rows = []
    for row in table.itertuples(index=False):
        classes = [
            VERDICT_CLASSES.get(words_of(value), of_column)
            for value, of_column in zip(row, column_classes)
        ]
        rows.append(line("td", row, classes))
    head = line("th", table.columns, column_classes)
    above = ""
    if caption:
        # a caption element would be as narrow as its table
        above = f'<p class="note">{escape.html_sentence(visible(caption))}</p>\n'
    body = "\n".join(rows)
    return f"{above}<table><thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>"


def latex_table(table: pd.DataFrame, caption: str, label: str) -> str:
    """A table of a paper, for pdflatex with the package booktabs. Where the table is
    wider than the page, columns of text become paragraphs, the widest first, and
    headings that are longer than their numbers have several lines."""
    texts = set(text_columns(table))
    # by column: the lines of its heading, and the characters of its longest line
    headings, natural_widths = {}, {}
    for name in table.columns:
        longest = max((len(words_of(value)) for value in table[name]), default=0)
        headings[name] = [str(name)]
        if name not in texts:
            headings[name] = _lines_of(str(name), max(longest, SHORT_HEADING))
        natural_widths[name] = max(longest, *map(len, headings[name]))
    fit = _fit_line(natural_widths, texts)
    paragraphs = {n for n, width in natural_widths.items() if fit.widths[n] < width}
    cells = {
        name: [_latex_cell(value, name in paragraphs) for value in table[name]]
        for name in table.columns
    }
    latex_cells = pd.DataFrame(cells)
    latex_cells.columns = [
        _latex_heading(headings[name], name in paragraphs) for name in table.columns
    ]
    column_formats = []
    for name in table.columns:
        if name in paragraphs:
            points = fit.widths[name] * fit.size.character
            column_formats.append(rf"p{{{points:.0f}pt}}")
        else:
            column_formats.append("l" if name in texts else "r")
    text = latex_cells.to_latex(
        index=False,
        escape=False,
        column_format="".join(column_formats),
        caption=escape.latex_sentence(caption),
        label=label,
    )
    setup = f"{fit.size.command}\n\\setlength{{\\tabcolsep}}{{{SEPARATION / 2:g}pt}}\n"
    return text.replace("\\begin{tabular}", f"{setup}\\begin{{tabular}}", 1)


@dataclass(frozen=True)
class TableFit:
    """The type of a table, and the characters of a line of each column."""

    size: TypeSize
    widths: dict[str, int]


def _fit_line(natural_widths: dict[str, int], texts: set[str]) -> TableFit:
    """The largest type in which a table fits the line. Columns have their natural widths,
    or smaller ones where texts are broken into lines. In the smallest type a table may
    still be wider than the line.

    Args:
        natural_widths: column → characters of its longest line.
        texts: the columns of texts.
    """
    text_widths = [width for name, width in natural_widths.items() if name in texts]
    number_width = sum(natural_widths.values()) - sum(text_widths)
    points = LINE_WIDTH - SEPARATION * len(natural_widths)
    for size in TYPE_SIZES:
        room = points / size.character - number_width  # characters for all texts
        limit = _longest_fitting(text_widths, room)
        is_unbroken = limit == max(text_widths, default=0)
        is_readable = limit >= READABLE_PARAGRAPH or is_unbroken
        if is_readable and sum(min(width, limit) for width in text_widths) <= room:
            break
    # where no size fits, `size` and `limit` are those of the smallest one
    widths = {
        name: min(width, limit) if name in texts else width
        for name, width in natural_widths.items()
    }
    return TableFit(size, widths)


def _longest_fitting(text_widths: list[int], room: float) -> int:
    """The most characters of a line of a text for which all texts fit beside each other,
    at least `LEAST_PARAGRAPH` where some text is as long.

    Args:
        text_widths: characters of each column of texts.
        room: characters for all of them.
    """
    limit = max(text_widths, default=0)
    while (
        limit > LEAST_PARAGRAPH
        and sum(min(width, limit) for width in text_widths) > room
    ):
        limit -= 1
    return limit


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


def gate_table(results: Iterable[gates.Gate]) -> pd.DataFrame:
    """Gates, RED and OVER first: gate, verdict with a sign, value, limit, reason. A
    yes-or-no gate has null for value and limit."""
    rows = [gate.json() for gate in results]
    rows.sort(key=lambda row: [*SIGNS].index(row["verdict"]))
    columns = ["name", "verdict", "value", "threshold", "reason"]
    table = table_of(rows, columns)
    table["verdict"] = table["verdict"].map(SIGNS)
    is_yes_or_no = table[["threshold", "value"]].isin([0.0, 1.0]).all(axis="columns")
    table.loc[is_yes_or_no, ["value", "threshold"]] = None
    return table.rename(columns={"name": "gate", "threshold": "limit"})
