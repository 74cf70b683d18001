"""The conda environment installs this project and nothing of its own, on the same Pythons, with the
same pins; and git ignores what running the project writes."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def test_conda_mirrors_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == [f"python {project['requires-python']}", "pip"]
    *pins, whole = pip["pip"]
    assert whole == "-e .[test]"
    assert set(pins) <= set(project["dependencies"])
    assert {
        "jupyterlab",
        "coremltools",
        "torch",
        "matplotlib",
        "pandas",
        "ipywidgets",
    } <= {pin.split("==")[0] for pin in pins}


def test_every_dependency_is_pinned_exactly():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [
        *project["dependencies"],
        *project["optional-dependencies"]["test"],
    ]:
        assert "==" in requirement, requirement


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_git_sees_shipped_results_and_nothing_that_running_writes(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    place = "experiments/05_stateful_kv_cache"
    shipped = [
        "experiments/log/shipped/runs/a.parquet",
        f"{place}/report.md",
        f"{place}/figures/a.svg",
        f"{place}/tables/a.tex",
    ]
    written = [
        "experiments/log/runs/a.parquet",
        "experiments/log/runs/.gathered",
        "experiments/log/shipped/runs/.gathered",
        "experiments/log/shipped/runs/.gathered.3f",
        f"{place}/tiny-llama/report.md",
        f"{place}/tiny-llama/figures/a.svg",
        f"{place}/tiny-llama/tables/a.tex",
        f"{place}/a+b/report.md",
    ]
    for name in (*shipped, *written):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    git = ["git", "-C", tmp_path, "-c", "core.excludesFile="]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(listed.stdout.splitlines()) == {".gitignore", *shipped}
