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


def item(name: str, *marks: str, fixtures=(), **matrix):
    """A test as pytest collects it; `matrix`: the mark's `n` and `wide`."""
    kept = [SimpleNamespace(name=mark) for mark in marks]
    args = (matrix.pop("n"),) if matrix else ()
    mark = SimpleNamespace(name="matrix", args=args, kwargs=matrix) if args else None
    return SimpleNamespace(
        name=name,
        path=Path(name.partition(":")[0]),
        originalname="test_cells",
        fixturenames=fixtures,
        get_closest_marker=lambda _: mark,
        iter_markers=lambda: kept,
        add_marker=lambda added: kept.append(
            SimpleNamespace(name=added) if isinstance(added, str) else added.mark
        ),
        reasons=lambda: [m.kwargs["reason"] for m in kept if m.name == "skip"],
    )


def collected(items: list, expression: str = "", seed: str | None = None) -> list[str]:
    """Names of the tests that stay under `-m expression`, without pytest's own choice."""
    options = {"markexpr": expression, "shuffle": seed}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption=options.get, hook=hook)
    conftest["pytest_collection_modifyitems"](config, items)
    return [item.name for item in items]


def test_each_circle_runs_what_is_marked_for_it():
    def some() -> list:
        both = item("both", "wide", "exhaustive")
        return [item("plain"), item("w", "wide"), item("e", "exhaustive"), both]

    assert collected(some()) == ["plain"]
    assert collected(some(), "wide") == ["plain", "w"]
    assert collected(some(), "exhaustive") == ["plain", "e", "both"]


def test_the_same_cases_of_a_matrix_run_each_time_and_one_that_is_named_alone():
    def ran(names, expression="") -> list[str]:
        items = [item(f"file:{name}", n=3, wide=2) for name in names]
        return [name[-1] for name in collected(items, expression)]

    drawn = ran("abcdefgh")
    assert len(drawn) == 3 and drawn == ran("abcdefgh") and ran("a") == ["a"]
    assert len(ran("abcdefgh", "wide")) == 5
    assert len(ran("abcdefgh", "exhaustive")) == 6


def test_a_seed_gives_one_order_in_which_the_tests_of_a_file_stay_together():
    names = [f"{file}:{number}" for file in "abcdef" for number in range(5)]

    def order(seed) -> list[str]:
        return collected([item(name) for name in names], seed=seed)

    assert order("1") == order("1") != order("2")
    assert sorted(order("1")) == names and order("1") != names
    files = [name[0] for name in order("1")]
    assert sum(a != b for a, b in zip(files, files[1:])) == 5


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_tests_that_a_platform_cannot_run_are_skipped_with_the_reason(
    platform, monkeypatch
):
    monkeypatch.setattr(sys, "platform", platform)
    items = [item("mac", "mac"), item("shim", "shim"), item("plain")]
    items += [item("shimmed", fixtures=("shimmed",))]
    collected(items)
    skipped = {each.name: each.reasons() for each in items if each.reasons()}
    if platform == "linux":
        assert skipped == {"mac": ["only a Mac can show it: there is no Core ML here"]}
    else:
        assert set(skipped) == {"shim", "shimmed"}


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
