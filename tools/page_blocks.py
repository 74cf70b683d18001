"""Blocks of pages that tools write: the lines between the marks `<!-- NAME -->` and
`<!-- /NAME -->`."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path


def format_block(name: str, lines: Iterable[str]) -> str:
    """A block with its marks; blank lines at the ends of `lines` are left out."""
    text = "\n".join(lines).strip("\n")
    return f"<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->"


def find_block(name: str, page: Path) -> str:
    """The block of this name in a page, with its marks.

    Raises:
        SystemExit: the page has no such block.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    match = re.search(pattern, page.read_text(), re.DOTALL)
    if not match:
        sys.exit(f"{page}: found no line {begin} with a line {end} behind it: add both")
    return match[0]


def replace_block(page: Path, name: str, lines: Iterable[str]) -> None:
    """Writes `lines` over the block of this name in a page.

    Raises:
        SystemExit: the page has no such block.
    """
    block = find_block(name, page)
    page.write_text(page.read_text().replace(block, format_block(name, lines), 1))
