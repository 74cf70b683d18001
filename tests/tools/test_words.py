"""The counter of vague names and of comments."""

import subprocess
import sys
from pathlib import Path

import pytest
import words

TOOL = Path(words.__file__)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = other.made = 1", ["found", "made"]),
        ("for a, (b, *c) in rows: pass", ["a", "b", "c"]),
        ("with open(path) as (file, _): pass", ["file", "_"]),
        ("x = {k: v for k, v in rows if (n := k)}", ["x", "k", "v", "n"]),
        ("def f(a, /, b, *c, d, **e): lambda g: g", list("abcdeg")),
        ("class C:\n    held: int = 0", ["held"]),
        ("try: pass\nexcept OSError as error: pass", ["error"]),
        ("import a.b as c\nfrom d import e as f, g", ["c", "f"]),
        ("match x:\n    case {'k': [a, *b]}: pass", ["a", "b"]),
        ("match x:\n    case [1] as c: pass\n    case _: pass", ["c"]),
        ("@pytest.fixture(scope='module')\ndef made(): pass", ["made"]),
        ("def made(): pass\nfound(held=1)[own].kept", []),
    ],
)
def test_every_binding_is_counted_and_no_use(source, names):
    assert sorted(name for _, name in words.bindings(source)) == sorted(names)


def test_vague_names_are_whole_words():
    assert words.is_vague("found") and words.is_vague("_found")
    assert not words.is_vague("found_at") and not words.is_vague("founder")


def test_comments_are_counted_behind_code_and_alone_but_not_in_strings():
    source = '# why\n\nfound = 1  # here\ntext = "# no comment"\n'
    assert words.count(source) == {"bindings": 2, "vague": 1, "lines": 3, "comments": 2}


def test_the_list_names_file_line_and_name(tmp_path):
    (tmp_path / "a.py").write_text("first = 1\nsecond.found = (\n    2\n)\n")
    for command in (["init", "--quiet"], ["add", "a.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    command = [sys.executable, TOOL, "--list", "."]
    lines = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert lines == "a.py:2:found\n"
