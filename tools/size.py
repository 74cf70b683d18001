"""Counts the tokens of the project's files by room. Run in a checkout:

    python tools/size.py [--json] [--at COMMIT] [FOLDER ...]

Tokens of Python are those of `tokenize`, without comments, docstrings, line ends and
indentation. A string of more than 200 characters, which may hold code of another
language, counts the words and signs in it. The same words and signs are counted in
YAML, CSV and JavaScript files, and notebooks count the tokens of their code cells.
Documents (Markdown) are counted in words of their prose."""

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

LONG_STRING = 200  # characters
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COUNTED_BY_WORDS = (".yaml", ".yml", ".csv", ".js")
FOLDERS = ("miltorch", "workbench", "plugins", "tools", "tests", "notebooks")


def count_words(text: str) -> int:
    """The number of words and of single signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def docstring_places(tree: ast.AST) -> set[tuple[int, int]]:
    """The (line, column) at which each docstring starts."""
    places = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                places.add((docstring.lineno, docstring.col_offset))
    return places


class Size(NamedTuple):
    """The size of a source."""

    tokens: int
    lines: int
    """Those with at least one token."""


def measure_python(source: str) -> Size:
    """The size of a Python source."""
    docstrings = docstring_places(ast.parse(source))
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SKIPPED or token.start in docstrings:
            continue
        is_long = token.type == tokenize.STRING and len(token.string) > LONG_STRING
        tokens += count_words(token.string) if is_long else 1
        lines.add(token.start[0])
    return Size(tokens, len(lines))


def measure_notebook(text: str) -> Size:
    """The size of a notebook's code cells."""
    sources = [
        "".join(cell["source"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "code"
    ]
    # magics such as %matplotlib and !pip are no Python
    sources = [re.sub(r"(?m)^\s*[%!].*", "pass", source) for source in sources]
    sizes = [measure_python(source) for source in sources]
    return Size(sum(size.tokens for size in sizes), sum(size.lines for size in sizes))


def room_of(path: PurePosixPath) -> str:
    """The first two folders of a path, or the first alone where it has no rooms; files right
    in a package share its root."""
    has_rooms = path.parts[0] not in ("miltorch", "notebooks", "tools")
    folders = len(path.parts) - 1
    depth = min(folders, 2) if has_rooms else 1
    return "/".join(path.parts[:depth])


def run_git(*arguments: str) -> str:
    """What a git command prints.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_files(commit: str, folders: list[str]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yields the path and the text of each tracked file that is counted.

    Args:
        commit: whose files are read; "": those of the work tree.
    """
    listing = ["ls-tree", "-r", "--name-only", commit] if commit else ["ls-files", "--"]
    for name in run_git(*listing, *folders).splitlines():
        path = PurePosixPath(name)
        if path.suffix not in (".py", ".ipynb", ".md", *COUNTED_BY_WORDS):
            continue
        if commit:
            yield path, run_git("show", f"{commit}:{name}")
        elif Path(name).exists():  # not removed since the last commit
            yield path, Path(name).read_text()


def measure_file(suffix: str, text: str) -> Size | None:
    """The size of a file's code; None for a document."""
    if suffix == ".py":
        return measure_python(text)
    if suffix == ".ipynb":
        return measure_notebook(text)
    if suffix in COUNTED_BY_WORDS:
        return Size(count_words(text), len(text.splitlines()))
    return None


def count_rooms(commit: str, folders: list[str]) -> dict[str, Counter]:
    """Tokens, lines of code and files of each room."""
    rooms: dict[str, Counter] = {}
    for path, text in read_files(commit, folders):
        size = measure_file(path.suffix, text)
        if size:
            room = rooms.setdefault(room_of(path), Counter())
            room.update(tokens=size.tokens, lines=size.lines, files=1)
    return rooms


def count_prose(commit: str) -> int:
    """Words of README.md and of the pages in docs."""
    pages = read_files(commit, ["README.md", "docs"])
    return sum(len(text.split()) for path, text in pages if path.suffix == ".md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--at", default="", help="a commit; otherwise the work tree")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rooms = count_rooms(arguments.at, arguments.folders)
    packages = Counter()
    for room, counts in rooms.items():
        packages[room.split("/")[0]] += counts["tokens"]
    if arguments.json:
        result = {
            "packages": packages,
            "rooms": rooms,
            "words": count_prose(arguments.at),
        }
        print(json.dumps(result, indent=2))
        return
    print(f"{'room':28}{'files':>6}{'lines':>8}{'tokens':>9}{'a line':>8}")
    for room, counts in sorted(rooms.items()):
        density = counts["tokens"] / max(counts["lines"], 1)
        numbers = f"{counts['files']:6}{counts['lines']:8}{counts['tokens']:9,}"
        print(f"{room:28}{numbers}{density:8.1f}")
    print()
    for package, tokens in packages.items():
        print(f"{package:28}{tokens:23,}")
    print(f"{'README and docs, words':28}{count_prose(arguments.at):23,}")


if __name__ == "__main__":
    main()
