"""Counts vague names and comments in the project's Python files. Run in a checkout:

    python tools/words.py [--list] [--json] [--at COMMIT] [FOLDER ...]

A vague name says how a value came about instead of what the value is, as `found` or `made`. The
table has a line for each folder: the names that its files bind, how many of them are vague, how
many lines hold more than blanks, and how many of these lines hold a comment. `--list` prints every
vague binding as FILE:LINE:NAME instead.

Each of these counts as one binding, every time: a target of an assignment, of a loop, of `with`,
of a comprehension, of `except` or of a pattern; a name or an attribute alike, and a field of a
class; a parameter of a function or of a lambda; a function that is a fixture of pytest; a name
after `as` in an import. A leading underscore is ignored. Names that only contain a vague word, as
`found_at`, and functions other than fixtures are not counted as vague."""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator

from size import read_files

VAGUE = frozenset(
    "own found made each how about known held kept apart moved asked handed shown looks wanted "
    "taken gone".split()
)
FOLDERS = ("miltorch", "workbench", "tests", "tools", "plugins", "data")


def is_fixture(node: ast.FunctionDef) -> bool:
    """Whether a decorator of a function names pytest's `fixture`."""
    return any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)


def bindings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of every binding of a file, see above."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                # the line of the attribute itself, where an expression spans several
                yield node.end_lineno, name
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) if is_fixture(node):
                yield node.lineno, name


def is_vague(name: str) -> bool:
    """Whether a name, without underscores around it, is in `VAGUE`."""
    return name.strip("_") in VAGUE


def comment_lines(source: str) -> int:
    """Lines that hold a comment, behind code or alone."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def count(source: str) -> Counter:
    """The figures of one file."""
    names = [name for _, name in bindings(source)]
    return Counter(
        bindings=len(names),
        vague=sum(map(is_vague, names)),
        lines=sum(bool(line.strip()) for line in source.splitlines()),
        comments=comment_lines(source),
    )


def sources(commit: str, folder: str) -> Iterator[tuple[str, str]]:
    """The path and the text of every Python file of a folder."""
    for path, text in read_files(commit, [folder]):
        if path.suffix == ".py":
            yield str(path), text


def print_vague_bindings(commit: str, folders: list[str]) -> None:
    """Prints FILE:LINE:NAME of every vague binding."""
    for folder in folders:
        for path, text in sources(commit, folder):
            for line, name in sorted(bindings(text)):
                if is_vague(name):
                    print(f"{path}:{line}:{name}")


def count_folders(commit: str, folders: list[str]) -> dict[str, Counter]:
    """The figures of each folder, see `count`."""
    figures = {}
    for folder in folders:
        figures[folder] = Counter(bindings=0, vague=0, lines=0, comments=0)
        for _, text in sources(commit, folder):
            figures[folder].update(count(text))
    return figures


def print_table(figures: dict[str, Counter]) -> None:
    """Prints a line for each folder."""
    print(f"{'folder':28}{'bindings':>10}{'vague':>7}{'share':>8}{'comments':>10}")
    for folder, counts in figures.items():
        vague = counts["vague"] / max(counts["bindings"], 1)
        comments = counts["comments"] / max(counts["lines"], 1)
        numbers = f"{counts['bindings']:10,}{counts['vague']:7,}{vague:8.2%}"
        print(f"{folder:28}{numbers}{comments:10.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--at", default="", help="a commit; otherwise the work tree")
    parser.add_argument("--list", action="store_true", help="print vague bindings")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()

    if arguments.list:
        print_vague_bindings(arguments.at, arguments.folders)
        return
    figures = count_folders(arguments.at, arguments.folders)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        print_table(figures)


if __name__ == "__main__":
    main()
