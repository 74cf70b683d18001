r"""Escapes text for formats with a syntax: a shell, HTML, Markdown, LaTeX, path templates.

There is one function for each format. Text from a checkpoint, a log or a user then reads
in that format as it was written, whatever characters it contains. Captions and sentences
of notebooks may mark code with backticks; `with_code` formats that code and escapes the
rest. Imports no other module of this package."""

import html as standard_html
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable

# characters with a meaning anywhere in a line of Markdown, GitHub's extensions included
INLINE = re.compile(r"[\\`*\[\]<>&|~$]")
# beginnings that make a line a heading, a list item, a ruler or a table's second row
LINE_START = re.compile(r"[#+\-=:]|\d+(?=[.)](?:\s|$))")
LINE_END = re.compile(r"\r\n|\r|\n")
UNDERSCORES = re.compile(r"_+")
CODE = re.compile(r"`([^`\n]+)`")

# commands of the LaTeX kernel since 2020, which need no package
LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    '"': r"\char34{}",
    "\n": " ",
    "\r": " ",
    "\t": " ",
    "\u00a0": "~",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "‘": r"\textquoteleft{}",
    "’": r"\textquoteright{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "…": r"\textellipsis{}",
    "·": r"\textperiodcentered{}",
    "•": r"\textbullet{}",
    "°": r"\textdegree{}",
    "§": r"\textsection{}",
    "¶": r"\textparagraph{}",
    "©": r"\textcopyright{}",
    "®": r"\textregistered{}",
    "™": r"\texttrademark{}",
    "€": r"\texteuro{}",
    "£": r"\textsterling{}",
    "µ": r"\textmu{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
    "✓": r"\ensuremath{\surd}",
    "✗": r"\ensuremath{\times}",
    "ᵀ": r"\textsuperscript{T}",
}
MATH = {
    "−": "-",
    "×": r"\times",
    "÷": r"\div",
    "±": r"\pm",
    "∓": r"\mp",
    "≤": r"\leq",
    "≥": r"\geq",
    "≠": r"\neq",
    "≈": r"\approx",
    "≡": r"\equiv",
    "∝": r"\propto",
    "∞": r"\infty",
    "√": r"\surd",
    "∑": r"\sum",
    "∏": r"\prod",
    "∈": r"\in",
    "∂": r"\partial",
    "∇": r"\nabla",
    "→": r"\rightarrow",
    "←": r"\leftarrow",
    "↔": r"\leftrightarrow",
    "↑": r"\uparrow",
    "↓": r"\downarrow",
    "⇒": r"\Rightarrow",
    "▁": r"\_",
    "«": r"\ll",
    "»": r"\gg",
    "¬": r"\neg",
    "⌀": r"\emptyset",
    "∅": r"\emptyset",
    "∩": r"\cap",
    "∪": r"\cup",
    "‖": r"\Vert",
}
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
GREEK_AFTER_OMICRON = "pi rho sigma tau upsilon phi chi psi omega"
# Unicode's names spell it "lamda"
MATH |= {
    unicodedata.lookup(
        f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}"
    ): rf"\{name}"
    for name in f"{GREEK} {GREEK_AFTER_OMICRON}".split()
}
MATH |= {
    unicodedata.lookup(f"GREEK CAPITAL LETTER {name.replace('lambda', 'lamda')}"): (
        rf"\{name.capitalize()}"
    )
    for name in "gamma delta theta lambda xi pi sigma upsilon phi psi omega".split()
}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-"))
# A whole run is one exponent: in mathematics its minus is a minus, in text a hyphen.
RAISED = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
LOWERED = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
# a straight apostrophe in LaTeX; every other command ends in a brace, not in a letter
STRAIGHT = re.escape(LATEX["'"])
INNER_APOSTROPHE = re.compile(rf"(?<=[A-Za-z]){STRAIGHT}(?=[A-Za-z])")
LAST_APOSTROPHE = re.compile(rf"(?<=s){STRAIGHT}(?=[ ,.;:)]|$)")
LATEX |= {
    character: rf"\ensuremath{{{command}}}" for character, command in MATH.items()
}
# commands for Unicode's combining marks
ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
}


def shell(words: Iterable[str]) -> str:
    """A command line that a POSIX shell splits into these words."""
    return shlex.join(words)


def path_template(path: object) -> str:
    """A path for papermill, which replaces names in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def html(text: object) -> str:
    """Text between tags or in a quoted attribute."""
    # a parser reads a bare carriage return as a line feed
    return standard_html.escape(str(text)).replace("\r", "&#13;")


def markdown(text: object) -> str:
    """Text of a paragraph, of a link or of an image's description. Lines stay lines; spaces
    at their ends are removed, because they have a meaning in Markdown."""
    lines = LINE_END.split(str(text).strip())
    return "\n".join(_markdown_line(line.strip()) for line in lines)


def markdown_cell(text: object) -> str:
    """Text of a table's cell, on one line."""
    # no cell begins a line, so that a number or a dash at its start keeps its meaning
    lines = LINE_END.split(str(text).strip())
    return "<br>".join(_markdown_inline(line.strip()) for line in lines)


def _markdown_inline(line: str) -> str:
    """Escapes what has a meaning anywhere in a line: `a*b <c>` → `a\\*b \\<c\\>`."""
    escaped = INLINE.sub(r"\\\g<0>", line)
    return UNDERSCORES.sub(_markdown_underscores, escaped)


def _markdown_line(line: str) -> str:
    """Escapes also what has a meaning at the beginning of a line: `# 1` → `\\# 1`, and
    `1. a` → `1\\. a`."""
    escaped = _markdown_inline(line)
    if start := LINE_START.match(escaped):
        # the dot behind a number is escaped: Markdown knows no escaped digits
        position = start.end() if start[0].isdigit() else 0
        return f"{escaped[:position]}\\{escaped[position:]}"
    return escaped


def _markdown_underscores(match: re.Match) -> str:
    """Escapes underscores except inside a word: there they are no emphasis, and names of
    columns stay readable. `_a_b_` → `\\_a_b\\_`."""
    before = match.string[: match.start()][-1:]
    after = match.string[match.end() :][:1]
    if before.isalnum() and after.isalnum():
        return match[0]
    return match[0].replace("_", r"\_")


def latex(text: object) -> str:
    """Text for pdflatex without packages, in ASCII.

    Letters with an accent, Greek letters, superscripts and common signs of mathematics
    become commands. Any other character becomes its code, as in ``[U+4E2D]``, because
    pdflatex has no glyph for it and would stop. An apostrophe within a word, or the only
    one behind an s, is the typographic one."""
    written = INNER_APOSTROPHE.sub("'", _latex_exactly(text))
    # a second straight one may be the other end of a quotation
    if written.count(LATEX["'"]) == 1:
        written = LAST_APOSTROPHE.sub("'", written)
    return written


def _latex_exactly(text: object) -> str:
    """As `latex`, with straight apostrophes, as code has them."""
    characters = unicodedata.normalize("NFC", str(text))
    pieces = re.split(f"({RAISED.pattern}|{LOWERED.pattern})", characters)
    written = "".join(map(_latex_piece, pieces))
    return re.sub("-(?=-)", "-{}", written)  # two would be a dash


def _latex_piece(piece: str) -> str:
    """A run of raised characters or of lowered ones, as `⁻²²` → `$^{-22}$`, or text."""
    for sign, characters, run in (
        ("^", SUPERSCRIPTS, RAISED),
        ("_", SUBSCRIPTS, LOWERED),
    ):
        if run.fullmatch(piece):
            return f"${sign}{{{''.join(map(characters.get, piece))}}}$"
    return "".join(map(_latex_character, piece))


def _latex_character(character: str) -> str:
    if command := LATEX.get(character):
        return command
    if character.isascii() and character.isprintable():
        return character
    base, *marks = unicodedata.normalize("NFD", character)
    if len(marks) == 1 and marks[0] in ACCENTS and base.isascii():
        return rf"\{ACCENTS[marks[0]]}{{{base}}}"
    return f"[U+{ord(character):04X}]"


def with_code(
    text: str, escape: Callable[[str], str], code: Callable[[str], str]
) -> str:
    """A sentence in which backticks mark code. Applies `code` to each piece between two
    backticks, and `escape` to the text around these pieces."""
    # a split at a pattern with one group alternates between the text around and the group
    pieces = CODE.split(text)
    pieces[::2] = map(escape, pieces[::2])
    pieces[1::2] = map(code, pieces[1::2])
    return "".join(pieces)


def html_sentence(text: str) -> str:
    """A sentence or caption in HTML, with code in `<code>`."""
    return with_code(text, html, lambda piece: f"<code>{html(piece)}</code>")


def latex_sentence(text: str) -> str:
    """A sentence or caption in LaTeX, with code in a typewriter font."""
    return with_code(text, latex, lambda code: rf"\texttt{{{_latex_exactly(code)}}}")


def markdown_sentence(text: str) -> str:
    """A sentence or caption in Markdown, with code between backticks."""

    def escape(piece: str) -> str:
        # unlike in `markdown`, spaces at the ends of a piece part it from the code beside it
        first, *lines = LINE_END.split(piece)
        lines = [first, *(line.lstrip() for line in lines)]
        return "\n".join(map(_markdown_line, lines))

    return with_code(text.strip(), escape, lambda piece: f"`{piece}`")
