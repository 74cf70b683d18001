"""Tests that a command selects run: one that is named, whatever its circle, and of a matrix at least
one case that fits `-k`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
FILE = """
import pytest

@pytest.mark.exhaustive
def test_exhaustive(): pass

@pytest.mark.wide
class TestWide:
    def test_wide(self): pass

@pytest.mark.matrix(2, wide=3)
@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_matrix(family, size): pass

def test_matrix_else(): pass
"""
MARKERS = "slow(reason) wide exhaustive matrix(n,wide=0) mac shim".split()


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    lines = "\n  ".join(MARKERS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n  {lines}\n")
    (tmp_path / "test_some.py").write_text(FILE)
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """The names of the tests that pass, and the lines that count what was left out."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    # no process for forks is started, and no other plugin is imported
    environment = os.environ | {"WORKBENCH_TEST_FORKS": "unused"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True
    )
    lines = ended.stdout.splitlines()
    passed = [line.split("::", 1)[1].split()[0] for line in lines if " PASSED" in line]
    return passed, [line for line in lines if line.startswith("more tests")]


@pytest.mark.parametrize(
    "name",
    ["test_exhaustive", "TestWide::test_wide", "test_matrix[llama-7]", "TestWide"],
)
def test_a_test_that_is_named_runs_whatever_its_circle(project, name):
    passed, _ = run(project, f"test_some.py::{name}")
    assert len(passed) == 1 and passed[0].startswith(name)


def test_all_cases_of_a_matrix_that_is_named_run(project):
    passed, _ = run(project, "test_some.py::test_matrix")
    assert len(passed) == 20


@pytest.mark.parametrize("word", ["llama", "qwen", "7"])
def test_cases_of_a_matrix_are_drawn_from_those_that_fit(project, word):
    passed, counted = run(project, "-k", word)
    fits = 2 if word == "7" else 10
    assert len(passed) == 2 and all(word in name for name in passed)
    parts = "more tests fit -k: 5 with -m exhaustive, 3 with -m wide"
    assert counted == ([parts] if fits == 10 else [])


@pytest.mark.parametrize(("circle", "count"), [("exhaustive", 7), ("wide", 5)])
def test_a_circle_runs_the_fitting_cases_that_are_drawn_too(project, circle, count):
    passed, _ = run(project, "-m", circle, "-k", "llama")
    assert len(passed) == count


def test_without_a_selection_each_circle_runs_its_own(project):
    passed, counted = run(project)
    assert len(passed) == 3 and "test_matrix_else" in passed and not counted
    assert len(run(project, "-m", "wide")[0]) == 4
    assert len(run(project, "-m", "exhaustive")[0]) == 16


def test_files_that_start_processes_kernels_pools_or_sockets_are_in_the_list_of_those():
    """`pytest @tests/waiting.txt` runs the tests that could wait for ever."""
    starts = re.compile(
        r"subprocess\.(?:run|Popen|check_)|\bprocess\.call\(|\bsweep\.sweep\(|Popen\("
        r"|socket\.socket\(|run_notebook\(|ProcessPool|KernelManager"
        r"|def \w+\([^)]*\b(?:forking_python|swept)\b"
    )
    folder = CONFTEST.parent
    listed = (folder / "waiting.txt").read_text().split()
    assert len(set(listed)) == len(listed)
    assert all((folder.parent / name).exists() for name in listed)
    paths = [
        path for path in folder.rglob("test_*.py") if starts.search(path.read_text())
    ]
    names = {path.relative_to(folder.parent).as_posix() for path in paths}
    assert names <= set(listed)
