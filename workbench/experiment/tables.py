"""Writes tables for a notebook or a page (HTML) and for a report (Markdown); `latex` writes
them for a paper. A value has the same digits in each, with powers of ten in HTML and LaTeX
and Python's exponents in Markdown; callers pass texts unescaped."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

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
RUN_ID_COLUMNS = ("run_id", "run_ids")
"""Columns that name rows of the log, which no reader of a table needs."""
POWER = re.compile(r"(?<![\w.])(-?)(\d+(?:\.\d+)?)e([+-])0*(\d+)(?![\w.]*\w)")
SUPERSCRIPT = str.maketrans({digit: c for c, digit in escape.SUPERSCRIPTS.items()})
SHORT_TEXT = 24  # characters of a column of a page whose cells are not broken


def words_of(value: object) -> str:
    """A cell in words: numbers with four digits, nulls as –."""
    if isinstance(value, float):
        return NULL if math.isnan(value) else f"{value:.4g}"
    if value is None or value is pd.NA or value is pd.NaT:
        return NULL
    if hasattr(value, "tolist"):
        return words_of(value.tolist())
    return str(value)


def printed(value: object) -> str:
    """A cell as it is printed: a number with a true minus sign, and with a power of ten
    in the place of Python's exponent, as 4.6×10⁻⁶; a text with such powers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    text = with_powers(words_of(value))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text.replace("-", "−").replace("inf", "∞") if is_number else text


def with_powers(text: str) -> str:
    """A text whose numbers have powers of ten in the place of exponents of Python:
    4.6e-06 → 4.6×10⁻⁶."""

    def power(number: re.Match) -> str:
        sign, mantissa, exponent_sign, exponent = number.groups()
        raised = f"{exponent_sign.strip('+')}{exponent}".translate(SUPERSCRIPT)
        return f"{'−' if sign else ''}{mantissa}×10{raised}"

    return POWER.sub(power, text)


def html_cell(value: object) -> str:
    """A cell of HTML, not escaped: a number as it is printed, and a text as it is,
    because a reader may copy a command from it."""
    return words_of(value) if isinstance(value, str) else printed(value)


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


def without_run_ids(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that a report shows."""
    return table.drop(columns=[*RUN_ID_COLUMNS], errors="ignore")


def show(table: pd.DataFrame) -> Styler:
    """A table for display: text and its heading to the left and wrapped, numbers with
    four digits as `printed`, nulls as –."""
    texts = text_columns(table)
    left = {"text-align": "left", "white-space": "normal", "max-width": "44em"}
    heading = [{"selector": "th.col_heading", "props": [("text-align", "left")]}]
    styler = table.style.format(lambda value: escape.html(html_cell(value)))
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
            text = escape.html(visible(html_cell(cell)))
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
