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

import pytest

from workbench import runtime

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# they name the stand-in in rows alone
ROWS = ("test_plugins.py",)
# folders have others of this name
conftest = runpy.run_path(str(TESTS / "conftest.py"))


@pytest.mark.parametrize(
    ("marks", "platform", "expression", "words"),
    [
        ({"mac"}, "linux", "", "no Core ML here"),
        ({"mac"}, "darwin", "", None),
        ({"shim"}, "darwin", "", "nothing stands in"),
        ({"shim"}, "linux", "", None),
        ({"exhaustive"}, "linux", "", "-m exhaustive"),
        ({"exhaustive", "shim"}, "linux", "exhaustive", None),
        (set(), "darwin", "", None),
    ],
)
def test_marks_say_where_a_test_runs(marks, platform, expression, words):
    reason = conftest["reason_to_skip"](marks, platform, expression)
    assert reason is None if words is None else words in reason


def test_the_same_cases_of_a_matrix_run_each_time_and_one_that_is_named_alone():
    def left(names) -> list[str]:
        added = []
        items = [
            SimpleNamespace(
                path=TESTS,
                originalname="test_cells",
                get_closest_marker=lambda _: SimpleNamespace(args=(3,)),
                add_marker=lambda mark, name=name: added.append((name, mark)),
            )
            for name in names
        ]
        conftest["draw_from_matrices"](items)
        assert all(mark == "exhaustive" for _, mark in added)
        return [name for name in names if name not in dict(added)]

    drawn = left("abcdefgh")
    assert len(drawn) == 3 and drawn == left("abcdefgh") and left("a") == ["a"]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_tests_are_skipped_with_that_reason(platform, monkeypatch):
    added = {}

    def item(name: str, fixtures=()):
        marks = [SimpleNamespace(name=name)] if name else []
        return SimpleNamespace(
            iter_markers=lambda: marks,
            get_closest_marker=lambda _: None,
            fixturenames=fixtures,
            path=Path(__file__),
            add_marker=lambda mark: added.setdefault(
                name or fixtures, mark.kwargs["reason"]
            ),
        )

    monkeypatch.setattr(sys, "platform", platform)
    config = SimpleNamespace(getoption=lambda name: "")
    items = [item("mac"), item("shim"), item(""), item("", ("shimmed",))]
    conftest["pytest_collection_modifyitems"](config, items)
    assert set(added) == ({"mac"} if platform == "linux" else {"shim", ("shimmed",)})


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
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    fake = f"import sys; sys.version_info = {(*version, 0, 'final', 0)!r}; exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" -c "{fake}" "$2"\nexit 7\n'
    )
    python.chmod(0o755)
    result = subprocess.run(
        ["make", "-C", tmp_path, "test", f"PYTHON={python}"],
        capture_output=True,
        text=True,
    )
    said = result.stdout + result.stderr
    assert result.returncode and ("make PYTHON=python3.12" in said) == (not accepted)
    assert accepted or f"{version[0]}.{version[1]}" in said
