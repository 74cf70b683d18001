"""Text arrives at each reader as it was given: what is escaped is read back by a parser
of the format."""

import re
import shlex
from html.parser import HTMLParser

import pytest
from hypothesis import given as given_examples
from hypothesis import settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt

from workbench import escape


def given(*texts):
    """Odd texts; a loaded machine may take its time over one."""
    return lambda test: settings(deadline=None)(given_examples(*texts)(test))


SYNTAX = (
    "a\\b `c` *d* _e_ [f](g) <h> & | ~i~ $j$ #k - + 1. 2) = : {l} % ^ \" ' ! ? \n--"
)
ODD = some.text(
    some.sampled_from(sorted(set(SYNTAX)) + list("éÅßąμΩ−×✗ᵀ²₃中😀 \r\t"))
) | (some.text(some.characters(exclude_categories=["Cs", "Cc"])))
WORDS = [
    "<s>",
    "a|b",
    "<|im_end|>",
    "*x*",
    "</td>",
    "a\\|b",
    "-- x",
    "1. a",
    "&amp;",
    "max_kl",
]


def squeezed(text: str) -> str:
    """The text as a reader sees it: a run of spaces and line ends is one space."""
    return " ".join(text.split())


class Text(HTMLParser):
    """The text of a page, and the values of attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.attributes = "", []
        self.feed(page)
        self.close()

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == "br":
            self.text += " "


def rendered(source: str) -> str:
    """The page that CommonMark with GitHub's tables makes of a Markdown text."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return parser.render(source)


@given(some.lists(ODD, min_size=1))
def test_a_shell_reads_the_words_as_given(words):
    assert shlex.split(escape.shell(words)) == words


@given(ODD)
def test_a_path_template_is_filled_as_the_path(path):
    assert escape.path_template(path).format(l="filled") == path


@given(ODD)
def test_a_page_shows_the_text_and_its_attributes_as_given(text):
    page = Text(f'<p title="{escape.html(text)}">{escape.html(text)}</p>')
    assert page.text == text and page.attributes == [("title", text)]


@given(ODD)
def test_a_paragraph_of_markdown_shows_the_text_as_given(text):
    page = rendered(f"before\n\n{escape.markdown(text)}\n")
    assert squeezed(Text(page).text) == squeezed(f"before {text}")
    assert set(re.findall(r"</?\w+", page)) <= {"<p", "</p"}
    page = rendered(f"![{escape.markdown(' '.join(text.split()))}](a.svg)")
    assert dict(Text(page).attributes)["alt"] == squeezed(text)


@given(ODD, ODD)
def test_a_cell_of_a_markdown_table_shows_the_text_as_given(first, second):
    cells = " | ".join(map(escape.markdown_cell, (first, second)))
    page = rendered(f"| a | b |\n|:--|:--|\n| {cells} |\n")
    html_cells = re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)
    texts = [squeezed(Text(cell).text) for cell in html_cells]
    assert texts == [squeezed(first), squeezed(second)]


@pytest.mark.parametrize("text", WORDS)
def test_words_that_other_tools_lose_stay(text):
    assert Text(escape.html(text)).text == text
    assert Text(rendered(escape.markdown(text))).text.strip() == text
    cell = rendered(f"| a |\n|---|\n| {escape.markdown_cell(text)} |")
    assert Text(re.search("<td>(.*)</td>", cell)[1]).text == text


# what the LaTeX kernel defines without a package
COMMAND = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z])")
KERNEL = {
    r"\ensuremath",
    r"\char",
    *(rf"\{accent}" for accent in escape.ACCENTS.values()),
}
KERNEL |= {
    command for written in escape.LATEX.values() for command in COMMAND.findall(written)
}
# runs of raised or of lowered characters, the only mathematics between dollars
SCRIPTS = re.compile(r"\$([\^_])\{((?:[0-9+n-]|-\{\})+)\}\$")
# command → character, for commands that are no accent
SIGNS = {written: character for character, written in escape.LATEX.items()}


@given(ODD)
def test_latex_is_ascii_with_balanced_groups_and_commands_of_the_kernel(text):
    written = escape.latex(text)
    assert written.isascii() and written.isprintable()
    assert set(COMMAND.findall(written)) <= KERNEL
    plain = COMMAND.sub("", SCRIPTS.sub("", written))
    assert not re.search(r"[$&#_%^~]", plain.replace("~", "", text.count("\u00a0")))
    depth = 0
    for brace in re.findall("[{}]", plain):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0


@given(some.text(some.sampled_from([c for c in SYNTAX if c != "\n"])))
def test_latex_says_the_text_as_given(text):
    signs = sorted(filter(str.strip, SIGNS), key=len, reverse=True)
    read = re.compile("|".join(map(re.escape, signs)))
    written = escape.latex(text).replace("-{}", "-")
    characters_of = {"^": escape.SUPERSCRIPTS, "_": escape.SUBSCRIPTS}

    def characters(run: re.Match) -> str:
        of_digit = {digit: c for c, digit in characters_of[run[1]].items()}
        return "".join(map(of_digit.get, run[2]))

    written = SCRIPTS.sub(characters, written)
    assert read.sub(lambda sign: SIGNS[sign[0]], written) == text


def test_what_plain_pdflatex_lacks_has_a_command_or_its_code():
    assert escape.latex("✗ é 3 × 10⁻² ᵀ") == (
        r"\ensuremath{\times} \'{e} 3 \ensuremath{\times} "
        r"10$^{-2}$ \textsuperscript{T}"
    )
    assert escape.latex("√(a² + 2⁻²²), x₁₀") == (
        r"\ensuremath{\surd}(a$^{2}$ + 2$^{-22}$), x$_{10}$"
    )
    assert escape.latex("a -- 中") == "a -{}- [U+4E2D]"


def test_an_apostrophe_in_latex_is_typographic_and_a_quotation_mark_straight():
    straight = escape.LATEX["'"]
    assert escape.latex("Face's, it's") == "Face's, it's"
    assert escape.latex("the models' weights") == "the models' weights"
    assert escape.latex("'yes' or '") == f"{straight}yes{straight} or {straight}"
    assert escape.latex_sentence("`f'a`") == rf"\texttt{{f{straight}a}}"


@given(ODD.filter(lambda text: "`" not in text), ODD.filter(lambda t: "`" not in t))
def test_code_in_a_sentence_is_code_and_the_rest_is_as_given(before, after):
    sentence = f"{before} `a_b<c>` {after}"
    for page in (
        escape.html_sentence(sentence),
        rendered(f"x {escape.markdown_sentence(sentence)}").replace("<p>x", "<p>"),
    ):
        assert "<code>a_b&lt;c&gt;</code>" in page
        assert squeezed(Text(page).text) == squeezed(f"{before} a_b<c> {after}")
    assert r"\texttt{a\_b\textless{}c\textgreater{}}" in escape.latex_sentence(sentence)
