"""The conda environment installs this project and nothing of its own, on the same Pythons."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_conda_mirrors_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == [f"python {project['requires-python']}", "pip"]
    assert pip == {"pip": ["-e .[test]"]}


def test_every_dependency_is_pinned_exactly():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        assert "==" in requirement, requirement
