"""Three texts that `tools/bits.py` measures on, made of public packages:

    python tools/held_out_texts.py FOLDER

`FOLDER/prose.txt` is the text of the English Debian Administrator's Handbook (Debian package
debian-handbook), `FOLDER/manual.txt` the user manual of Vim (package vim-runtime), and
`FOLDER/code.txt` the source of this Python's module `email`. A text is the first `LENGTH`
characters. `bits.py` stores its SHA-256, by which two machines are known to have the same texts.
"""

import argparse
import email
import hashlib
from html.parser import HTMLParser
from pathlib import Path

HANDBOOK = Path("/usr/share/doc/debian-handbook/html/en-US")
VIM = Path("/usr/share/vim")
LENGTH = 120_000
"""Characters of a text: SmolLM2's tokenizer makes more than 4,352 tokens of each, the 17
windows of `bits.py`."""


class Paragraphs(HTMLParser):
    """The text of the paragraphs of a page, which are `<div class="para">`."""

    def __init__(self):
        super().__init__()
        self.open_divs: list[bool] = []  # whether each is a paragraph, outermost first
        self.paragraphs: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "div":
            return
        is_paragraph = ("class", "para") in attrs
        self.open_divs.append(is_paragraph)
        if is_paragraph:
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        if tag == "div":
            self.open_divs.pop()

    def handle_data(self, data):
        if any(self.open_divs):
            self.paragraphs[-1] += data


def read_paragraphs(page: Path) -> str:
    """The paragraphs of an HTML page, an empty line between two."""
    parser = Paragraphs()
    parser.feed(page.read_text(encoding="utf-8"))
    lines = (" ".join(paragraph.split()) for paragraph in parser.paragraphs)
    return "\n\n".join(line for line in lines if line)


def read_prose() -> str:
    return "\n\n".join(map(read_paragraphs, sorted(HANDBOOK.glob("sect.*.html"))))


def read_manual() -> str:
    pages = sorted(VIM.glob("vim*/doc/usr_[0-4]*.txt"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def read_code() -> str:
    files = sorted(Path(email.__file__).parent.rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    readers = {"prose": read_prose, "manual": read_manual, "code": read_code}
    texts = {name: read()[:LENGTH] for name, read in readers.items()}
    # before any is written, so that the files of a folder belong together
    for name, text in texts.items():
        if len(text) < LENGTH:
            parser.error(
                f"{name}: found {len(text)} characters; needs {LENGTH}; run: apt-get "
                "install debian-handbook vim-runtime"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        print(f"{path}  {len(text)} characters  SHA-256 {sha256}")


if __name__ == "__main__":
    main()
