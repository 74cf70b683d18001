"""The block of a page that a tool writes is replaced, and nothing else of the page."""

import pytest
from page_blocks import find_block, format_block, replace_block

PAGE = """Before
<!-- a -->
old
<!-- /a -->
<!-- b -->
kept
<!-- /b -->
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


@pytest.mark.parametrize("lines", [["| new |"], ["", r"\1 \g<0>", "", ""]], ids=str)
def test_a_block_is_replaced_as_often_as_one_likes(page, lines):
    for _ in range(2):
        replace_block(page, "a", lines)
    begin, blank, *inner, end = find_block("a", page).splitlines()
    assert (begin, blank, end) == ("<!-- a -->", "", "<!-- /a -->")
    assert inner == [line for line in lines if line] + [""]
    old = "<!-- a -->\nold\n<!-- /a -->"
    assert page.read_text() == PAGE.replace(old, format_block("a", lines))


@pytest.mark.parametrize("missing", ["<!-- a -->", "<!-- /a -->"])
def test_a_page_without_a_mark_is_refused_and_left_as_it_is(page, missing):
    text = PAGE.replace(missing, "")
    page.write_text(text)
    with pytest.raises(SystemExit, match="page.md: found no line <!-- a --> with"):
        replace_block(page, "a", ["new"])
    assert page.read_text() == text
