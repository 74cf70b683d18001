"""What is installed: ranges in pyproject.toml, exact versions in requirements.lock, which `make` and
conda install; nothing is declared that nothing imports. And git ignores what running the project
writes."""

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import packages_distributions

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_structure import names_imported
from tiny import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXT = (ROOT / "requirements.lock").read_text()
LOCK = dict(re.findall(r"^([^#\s]+)==(\S+)$", TEXT, re.MULTILINE))
NOT_IMPORTED = {
    "accelerate": "transformers reads GGUF files with it, and lm-eval its models",
    "ipykernel": "notebooks run in it; version 7 misses requests",
    "jinja2": "transformers renders chat templates with it",
    "jupyterlab": "`make lab`",
    "peft": "lm-eval's class for Hugging Face's models imports it",
    "pytest-xdist": "`make test`",
    "ruff": "the formatter",
    "tabulate": "pandas writes tables of reports with it",
}


def requirements(lines) -> dict[str, Requirement]:
    """Requirements by canonical name, without the project itself."""
    by_name = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name != "workbench":
            by_name[name] = requirement
    return by_name


def imported(*folders: str) -> set[str]:
    """The distributions that Python files of these folders import, at any depth."""
    owners = packages_distributions()
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {
        canonicalize_name(owner)
        for path in paths
        for name in names_imported(path.read_text(), path.parent.name)
        for owner in owners.get(name.partition(".")[0], [])
    }


def test_conda_installs_the_packages_of_the_notebooks_and_the_lock():
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == [f"python {PROJECT['requires-python']}", "pip"]
    constraint, *names, whole = pip["pip"]
    assert constraint == "--constraint requirements.lock"
    assert whole == "-e .[test]"
    named = "jupyterlab coremltools torch matplotlib pandas ipywidgets"
    assert set(names) == set(named.split())


def test_every_requirement_has_one_version_in_the_lock():
    for lines in (PROJECT["dependencies"], *EXTRAS.values()):
        for name, requirement in requirements(lines).items():
            assert requirement.specifier, f"{name} has no range"
            assert requirement.specifier.contains(LOCK[name]), name
    assert "--constraint requirements.lock" in (ROOT / "Makefile").read_text()
    # it names no index
    assert "://" not in TEXT and "--" not in TEXT


def test_what_is_declared_is_imported_and_what_is_imported_is_declared():
    declared = requirements(PROJECT["dependencies"])
    here = imported("workbench", "miltorch")
    optional = requirements(EXTRAS["cluster"] + EXTRAS["harness"])
    assert here - {"workbench", "setuptools"} <= declared.keys() | optional.keys()
    used = here | imported("tests", "docs", "tools")
    for lines in (PROJECT["dependencies"], EXTRAS["cluster"], EXTRAS["test"]):
        for name, requirement in requirements(lines).items():
            if requirement.marker and not requirement.marker.evaluate():
                continue  # of another system
            assert name in used or name in NOT_IMPORTED, f"nothing imports {name}"
    assert not NOT_IMPORTED.keys() & used


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_git_sees_shipped_results_and_nothing_that_running_writes(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    shipped = "05_x/report.md", "05_x/figures/a.svg", "log/shipped/runs/a.parquet"
    shipped = [f"experiments/{file}" for file in shipped]
    written = ["experiments/log/runs/a.parquet", "build/experiments/05_x/a/report.md"]
    git = ["git", "-C", tmp_path, "-c", "core.excludesFile="]
    subprocess.run([*git, "init", "-q"], check=True)
    command = [*git, "check-ignore", *shipped, *written]
    assert subprocess.check_output(command, text=True).splitlines() == written
