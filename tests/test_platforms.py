"""Which tests run on which platform, and on what: portable by default, Core ML's own on a Mac, what
the shim plays elsewhere; and the Pythons that the Makefile takes."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from workbench import runtime

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# they name the stand-in in rows alone
ROWS = ("test_plugins.py",)
# folders have others of this name
conftest = runpy.run_path(str(TESTS / "conftest.py"))


def item(name: str, *marks: str, fixtures=(), matrix=None):
    """A test as pytest collects it."""
    kept = {mark: SimpleNamespace(name=mark) for mark in marks}

    def add(mark):
        name = mark if isinstance(mark, str) else mark.name
        kept[name] = SimpleNamespace(name=name)

    return SimpleNamespace(
        name=name,
        path=Path("file"),
        originalname="test_cells",
        fixturenames=fixtures,
        get_closest_marker=lambda _: matrix,
        iter_markers=lambda: list(kept.values()),
        add_marker=add,
    )


def collected(items: list, expression: str = "") -> list[str]:
    """Names of the tests that stay under `-m expression`, without pytest's own choice."""
    config = Mock()
    config.getoption = {"markexpr": expression, "shuffle": None}.get
    conftest["pytest_collection_modifyitems"](config, items)
    return [item.name for item in items]


def test_each_circle_runs_what_is_marked_for_it():
    marks = {"plain": (), "w": ("wide",), "e": ("exhaustive",)}
    marks["both"] = "wide", "exhaustive"
    for circle, ran in (
        ("", ["plain"]),
        ("wide", ["plain", "w"]),
        ("exhaustive", ["plain", "e", "both"]),
    ):
        items = [item(name, *own) for name, own in marks.items()]
        assert collected(items, circle) == ran


def test_the_same_cases_of_a_matrix_run_each_time_and_one_that_is_named_alone():
    matrix = pytest.mark.matrix(3, wide=2).mark

    def ran(names, expression="") -> list[str]:
        return collected([item(name, matrix=matrix) for name in names], expression)

    drawn = ran("abcdefgh")
    assert len(drawn) == 3 and drawn == ran("abcdefgh") and ran("a") == ["a"]
    assert len(ran("abcdefgh", "wide")) == 5
    assert len(ran("abcdefgh", "exhaustive")) == 6


@pytest.mark.parametrize(
    ("platform", "skipped"), [("linux", {"mac"}), ("darwin", {"shim", "shimmed"})]
)
def test_tests_that_a_platform_cannot_run_are_skipped(platform, skipped, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    items = [item(name, name) for name in ("mac", "shim", "plain")]
    items += [item("shimmed", fixtures=("shimmed",))]
    collected(items)
    for each in items:
        marks = {mark.name for mark in each.iter_markers()}
        assert ("skip" in marks) == (each.name in skipped)


def test_auto_is_portable_in_tests_on_a_mac_too(monkeypatch):
    assert os.environ["WORKBENCH_RUNTIME"] == "portable"
    monkeypatch.setattr(runtime, "coreml_available", lambda: True)
    assert runtime.resolve() == "portable"
    monkeypatch.delenv("WORKBENCH_RUNTIME")
    assert runtime.resolve() == "coreml"


def test_every_file_that_uses_the_shim_is_marked():
    """macOS refuses the shim and the stand-in, so that such a test must not run there."""
    uses = re.compile(r"shim\.install\(|[\"']stand-in")
    unmarked = [
        path.name
        for path in sorted(TESTS.rglob("test_*.py"))
        if uses.search(text := path.read_text())
        and "mark.shim" not in text
        and "shimmed" not in text
        and path.name not in (Path(__file__).name, *ROWS)
    ]
    assert unmarked == []


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize(
    ("version", "accepted"),
    [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)],
)
def test_make_takes_the_pythons_that_have_wheels_and_says_what_to_type(
    version, accepted, tmp_path
):
    """A Python that only answers which version it is."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = {(*version, 0, 'final', 0)!r}; exec(sys.argv[1])"
    code = f'[ "$1" = -c ] && exec "{sys.executable}" -c "{code}" "$2"'
    python.write_text(f"#!/bin/sh\n{code}\nexit 7\n")
    python.chmod(0o755)
    command = ["make", "-C", tmp_path, "test", f"PYTHON={python}"]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert result.returncode and ("make PYTHON=python3.12" in said) == (not accepted)
    assert accepted or f"{version[0]}.{version[1]}" in said
