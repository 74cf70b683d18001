"""A page as blocks, which are written as Markdown, for issues and pull requests, or as
one HTML file that needs no other one. Texts arrive as they are; each format escapes
them."""

import base64
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

import pandas as pd

from workbench import escape
from workbench.errors import visible
from workbench.experiment.tables import html_table, markdown_table

HEADING_MARK = "## "
"""Begins a line of a text, such as an answer, that is a heading."""


@dataclass(frozen=True)
class Heading:
    """Begins a part of a page."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """A sentence or several, in which backticks mark code."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """The judgement of the export, or of its quality.

    Attributes:
        subject: Export or Quality.
        word: as in `Gate.verdict`, or in words.
        reason: of the judgement; empty where the word says it.
    """

    subject: str
    word: str
    reason: str = ""


@dataclass(frozen=True)
class Verdicts:
    """Both verdicts, side by side."""

    export: Verdict
    quality: Verdict


@dataclass(frozen=True)
class Table:
    """A table below its caption, in which backticks mark code.

    Attributes:
        more_rows: number of rows that are left out.
        source: name of the file that has all rows.
        folded: the rows that an HTML page, which has no file beside it, shows when it is
            asked to: all of them, or the first.
    """

    data: pd.DataFrame
    caption: str = ""
    more_rows: int = 0
    source: str = ""
    folded: pd.DataFrame | None = None


@dataclass(frozen=True)
class Picture:
    """A drawing.

    Attributes:
        alt: its description.
        address: relative path of a file with the drawing, for Markdown, which cannot
            contain it; empty: Markdown has the description alone.
        number: among the figures of a page; 0: it has none.
    """

    svg: bytes
    alt: str
    address: str = ""
    number: int = 0

    @property
    def caption(self) -> str:
        """The description behind the number."""
        return f"Figure {self.number}. {self.alt}" if self.number else self.alt


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Continuations:
    """The texts of two models after one prompt.

    Attributes:
        common: the beginning that both texts have.
        reference: the rest of Hugging Face's text.
        bundle: the rest of the bundle's text.
        note: describes the first difference.
    """

    prompt: str
    common: str
    reference: str
    bundle: str
    note: str


Block = Heading | Paragraph | Verdicts | Table | Picture | Commands | Continuations


@dataclass(frozen=True)
class Page:
    """A title and the blocks below it."""

    title: str
    blocks: tuple[Block, ...]


def markdown(page: Page) -> str:
    """The page in GitHub's Markdown."""
    blocks = map(_markdown, _numbered(page.blocks))
    parts = [f"# {escape.markdown(page.title)}", *blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbered(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks, whose captions begin with "Figure 1." and "Table 1.", by which a text
    can name them."""
    figures, tables = count(1), count(1)
    for block in blocks:
        if isinstance(block, Picture):
            block = replace(block, number=next(figures))
        elif isinstance(block, Table) and block.caption:
            block = replace(block, caption=f"Table {next(tables)}. {block.caption}")
        yield block


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"## {escape.markdown(block.text)}"
        case Paragraph():
            return escape.markdown_sentence(block.text)
        case Verdicts(export, quality):
            words = f"**Export {export.word}, quality {quality.word}**"
            reasons = "\n".join(
                f"- {verdict.subject}: {escape.markdown_sentence(verdict.reason)}"
                for verdict in (export, quality)
                if verdict.reason
            )
            return f"{words}\n\n{reasons}" if reasons else words
        case Table():
            parts = [escape.markdown_sentence(block.caption)] if block.caption else []
            parts.append(markdown_table(block.data))
            if block.more_rows:
                link = f"[{escape.markdown(block.source)}]({_address(block.source)})"
                parts.append(f"{block.more_rows} more rows: {link}.")
            return "\n\n".join(parts)
        case Picture():
            alt, caption = (
                escape.markdown(" ".join(text.split()))
                for text in (block.alt, block.caption)
            )
            if not block.address:
                return ""
            # the text of a picture's address is read aloud, and not shown
            return f"![{alt}]({_address(block.address)})\n\n*{caption}*"
        case Commands():
            text = "\n".join(block.lines)
            runs = map(len, re.findall("`+", text))
            fence = "`" * max(3, 1 + max(runs, default=0))
            return f"{fence}\n{text}\n{fence}"
        case Continuations():
            named = {
                "Prompt": block.prompt,
                "Both write": block.common,
                "then Hugging Face": block.reference,
                "then the bundle": block.bundle,
            }
            rows = [(name, visible(text)) for name, text in named.items()]
            table = pd.DataFrame(rows, columns=["text", visible(block.note)])
            return markdown_table(table)


def _address(path: str) -> str:
    """A relative path as the address of a link in Markdown."""
    return re.sub(r"[\s()<>\\%#?\"'*`\[\]&|~$]", _percent, path)


def _percent(character: re.Match) -> str:
    return "".join(f"%{byte:02X}" for byte in character[0].encode())


# No script, no font and no picture of another address is loaded, whatever a text holds.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
@page { size: A4; margin: 15mm 14mm 16mm; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 32px 48px; max-width: 1080px; color: #1a1a1a;
  background: #fff; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 16px; }
h2 { font-size: 19px; margin: 34px 0 10px; padding-bottom: 4px;
  border-bottom: 1px solid #d5d5d5; break-after: avoid; }
p { margin: 8px 0; max-width: 52em; }
code, pre, .text { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas,
  monospace; }
pre { background: #f5f5f3; border: 1px solid #e2e2df; border-radius: 4px;
  padding: 10px 12px; white-space: pre-wrap; }
.verdicts { display: flex; gap: 14px; margin: 14px 0 18px; }
.verdict { flex: 1; border: 1px solid #cfcfcf; border-left: 7px solid #8a8a8a;
  border-radius: 4px; padding: 10px 14px; break-inside: avoid; }
.verdict b { font-size: 20px; display: block; }
.verdict span { color: #444; font-size: 14px; }
.good { border-left-color: #009e73; } .bad { border-left-color: #d55e00; }
td.good { color: #00704f; font-weight: 600; white-space: nowrap; }
td.bad { color: #b34700; font-weight: 600; white-space: nowrap; }
table { border-collapse: collapse; margin: 8px 0 14px; font-size: 13.5px; }
thead { display: table-header-group; }
tr { break-inside: avoid; }
th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e6e6e6; }
th { border-bottom: 1.5px solid #888; font-weight: 600; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
th.short, td.short { white-space: nowrap; }
summary { cursor: pointer; color: #444; font-size: 13.5px; }
figure { margin: 12px 0; break-inside: avoid; }
figure img { width: 100%; max-width: 920px; height: auto; }
figcaption { color: #444; font-size: 13.5px; }
.continuation { margin: 12px 0 18px; border-left: 3px solid #d5d5d5;
  padding-left: 12px; break-inside: avoid; }
.continuation p { margin: 2px 0; max-width: none; break-after: auto; }
.continuation .text { white-space: pre-wrap; }
.reference { background: #dcefe7; } .bundle { background: #fbe3d3; }
.note { color: #444; font-size: 13.5px; max-width: 62em; break-after: avoid; }
@media print { body { padding: 0; max-width: none; font-size: 10pt; }
  h1 { font-size: 17pt; } h2 { font-size: 13pt; margin-top: 18pt; }
  table, figcaption, .note, .verdict span { font-size: 8.5pt; }
  code, pre, .text { font-size: 8pt; } td { padding-right: 8px; }
  figure img { width: auto; max-width: 100%; max-height: 150mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def html(page: Page) -> str:
    """The page as one HTML file: style and drawings are in it, and it has no script."""
    title = _text(page.title)
    blocks = map(_html, _numbered(page.blocks))
    body = "\n".join([f"<h1>{title}</h1>", *blocks])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """A text between tags: control characters, which no browser shows, as their
    escapes."""
    return escape.html(visible(text))


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h2>{_text(block.text)}</h2>"
        case Paragraph():
            return f"<p>{escape.html_sentence(visible(block.text))}</p>"
        case Verdicts(export, quality):
            cards = "".join(map(_html_verdict, (export, quality)))
            return f'<div class="verdicts">{cards}</div>'
        case Table():
            table = html_table(block.data, block.caption)
            return f"{table}\n{_html_folded(block)}" if block.more_rows else table
        case Picture():
            encoded = base64.b64encode(block.svg).decode()
            alt = _text(block.alt)
            source = f"data:image/svg+xml;base64,{encoded}"
            picture = f'<img alt="{alt}" src="{source}">'
            caption = f"<figcaption>{_text(block.caption)}</figcaption>"
            return f"<figure>{picture}{caption}</figure>"
        case Commands():
            return f"<pre>{_text(chr(10).join(block.lines))}</pre>"
        case Continuations():
            rows = (
                ("reference", "Hugging Face", block.reference),
                ("bundle", "bundle", block.bundle),
            )
            lines = [
                f'<p class="note">{name}</p><p class="text">{_text(block.common)}'
                f'<span class="{kind}">{_text(rest)}</span></p>'
                for kind, name, rest in rows
            ]
            head = f"<p><b>{_text(block.prompt)}</b></p>"
            note = f'<p class="note">{_text(block.note)}</p>'
            return f'<div class="continuation">{head}{note}{"".join(lines)}</div>'


def _html_folded(block: Table) -> str:
    """The rows of a table in a part of the page that is closed at first."""
    count = len(block.data) + block.more_rows
    if block.folded is None:
        return (
            f'<p class="note">{block.more_rows} more rows: {_text(block.source)}.</p>'
        )
    if len(block.folded) < count:
        rows = (
            f"The first {len(block.folded)} of {count} rows; all are in the run's file "
        )
        rows += block.source
    else:
        rows = f"All {count} rows"
    summary = f"<summary>{_text(rows)}</summary>"
    return f"<details>{summary}\n{html_table(block.folded)}</details>"


def _html_verdict(verdict: Verdict) -> str:
    kinds = {"GREEN": "good", "WITHIN": "good", "RED": "bad", "OVER": "bad"}
    kind = kinds.get(verdict.word, "")
    reason = escape.html_sentence(visible(verdict.reason))
    return (
        f'<div class="verdict {kind}">{verdict.subject}<b>{_text(verdict.word)}</b>'
        f"<span>{reason}</span></div>"
    )
