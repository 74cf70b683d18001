"""Tables for their readers: a notebook (HTML), a report (Markdown), a paper (LaTeX).
Values are the same words in each; text arrives as it is."""

import math
from collections.abc import Iterable

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
    "not_run": "– not run",
}
# of the cells of a page
COLOURS = {
    SIGNS[word]: f' class="{kind}"'
    for kind, words in {"good": ("GREEN", "WITHIN"), "bad": ("RED", "OVER")}.items()
    for word in words
}
NULL = "–"
# of the longest text of a column that LaTeX breaks into lines
LONG_TEXT = 32
SHORT_TEXT = 24  # characters of a column of a page whose cells are not broken
LINE = 90  # characters of a line of a page in LaTeX's small type


def words_of(value: object) -> str:
    """A cell in words: numbers with four digits, nulls as –."""
    if isinstance(value, float):
        return NULL if math.isnan(value) else f"{value:.4g}"
    if value is None or value is pd.NA or value is pd.NaT:
        return NULL
    if hasattr(value, "tolist"):
        return words_of(value.tolist())
    return str(value)


def text_columns(table: pd.DataFrame) -> list:
    """Columns that are aligned to the left: all but those of numbers."""
    return list(table.select_dtypes(exclude="number").columns)


def show(table: pd.DataFrame) -> Styler:
    """A table for display: text and its heading to the left and wrapped, numbers with
    four digits, nulls as –."""
    texts = text_columns(table)
    left = {"text-align": "left", "white-space": "normal", "max-width": "44em"}
    heading = [{"selector": "th.col_heading", "props": [("text-align", "left")]}]
    look = table.style.format(lambda value: escape.html(words_of(value)))
    look = look.format_index(escape.html, axis="columns").hide(axis="index")
    look = look.set_properties(subset=texts, **left)
    return look.set_table_styles(dict.fromkeys(texts, heading), overwrite=False)


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
    classes = []
    for name in table.columns:
        longest = max(map(len, map(words_of, [name, *table[name]])))
        kind = "" if longest > SHORT_TEXT else ' class="short"'
        classes.append(kind if name in texts else ' class="number"')

    def line(tag: str, cells: Iterable[object], kinds: Iterable[str]) -> str:
        written = [
            f"<{tag}{kind}>{escape.html(visible(words_of(cell)))}</{tag}>"
            for cell, kind in zip(cells, kinds)
        ]
        return f"<tr>{''.join(written)}</tr>"

    rows = []
    for row in table.itertuples(index=False):
        kinds = [COLOURS.get(words_of(v), kind) for v, kind in zip(row, classes)]
        rows.append(line("td", row, kinds))
    head = line("th", table.columns, classes)
    above = ""
    if caption:
        # a caption element would be as narrow as its table
        above = f'<p class="note">{escape.html_sentence(visible(caption))}</p>\n'
    body = "\n".join(rows)
    return f"{above}<table><thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>"


def latex_table(table: pd.DataFrame, caption: str, label: str) -> str:
    """A table of a paper, for pdflatex with the package booktabs. A column of long text
    is a paragraph, whose width is what the other columns leave."""
    texts = set(text_columns(table))
    written = table.map(_latex_cell)
    written.columns = [_latex_cell(name) for name in table.columns]
    lengths = {
        name: max([len(str(name)), *(len(words_of(value)) for value in table[name])])
        for name in table.columns
    }
    long = {n: size for n, size in lengths.items() if n in texts and size > LONG_TEXT}
    rest = LINE - sum(size + 2 for name, size in lengths.items() if name not in long)
    kinds = []
    for name in table.columns:
        if name in long:
            share = max(rest, LINE / 3) / LINE * long[name] / sum(long.values())
            kinds.append(rf"p{{{0.95 * share:.2f}\linewidth}}")
        else:
            kinds.append("l" if name in texts else "r")
    return written.to_latex(
        index=False,
        escape=False,
        column_format="".join(kinds),
        caption=escape.latex_sentence(caption),
        label=label,
    )


def _latex_cell(value: object) -> str:
    text = escape.latex(words_of(value)).replace(NULL, "--")
    # behind the end of a row, [ begins a length and * forbids a page break
    return f"{{}}{text}" if text.startswith(("[", "*")) else text


def gate_table(results: Iterable[gates.Gate]) -> pd.DataFrame:
    """Gates, RED and OVER first: gate, verdict with a sign, value, limit, reason; value and limit
    are null for a gate that holds or does not, and compares no figures."""
    rows = [gate.json() for gate in results]
    rows.sort(key=lambda row: [*SIGNS].index(row["verdict"]))
    columns = ["name", "verdict", "value", "threshold", "reason"]
    table = pd.DataFrame(rows, columns=columns)
    table["verdict"] = table["verdict"].map(SIGNS)
    counts_nothing = table["threshold"].isin([0.0, 1.0]) & table["value"].isin(
        [0.0, 1.0]
    )
    table.loc[counts_nothing, ["value", "threshold"]] = None
    return table.rename(columns={"name": "gate", "threshold": "limit"})
