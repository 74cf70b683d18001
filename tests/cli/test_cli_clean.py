"""`workbench clean` lists what can be made again and removes nothing else."""

import json
from pathlib import Path

import pytest

from workbench import InputError
from workbench.cli import app
from workbench.files import locked
from workbench.sweep.caches import KINDS, cache_entries, remove


def invoke(*arguments: str):
    from typer.testing import CliRunner

    return CliRunner().invoke(app.app, ["clean", *arguments])


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with one cache of each kind, and files that are no cache."""
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\n')
    for path, size in (
        ("data/bundles/tiny-1/bundle.json", 10),
        ("data/bundles/tiny-1/layers_00.mlpackage/weight.bin", 90),
        ("data/bundles/.tiny-1.compiled/a.mlmodelc/weight.bin", 50),
        ("data/bundles/.tiny-2.partial/identity.json", 20),
        ("data/golden/tiny.safetensors", 30),
        ("data/evaluations/tiny-1.rows", 32),
        ("data/tiny/model.safetensors", 1000),
        ("build/own/bundle.json", 1000),
        ("build/.own.compiled/a.mlmodelc/weight.bin", 70),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(bytes(size))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(project: Path) -> set[str]:
    return {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()}


def test_sizes_come_first_and_nothing_is_removed_unasked(project):
    before, result = files(project), json.loads(invoke("--json").stdout)
    sizes = {entry["kind"]: entry["bytes"] for entry in result["entries"]}
    others = {"compiled": 50, "evaluations": 32, "goldens": 30, "unfinished": 20}
    assert sizes == {"bundles": 100} | others
    assert (
        sizes.keys() == KINDS.keys()
        and result["bytes"] == 232
        and not result["removed"]
    )
    assert files(project) == before


def test_what_is_asked_for_is_removed_and_nothing_else(project):
    before = files(project)
    assert invoke("compiled", "goldens", "--folder", "build", "--yes").exit_code == 0
    assert before - files(project) == {
        "data/bundles/.tiny-1.compiled/a.mlmodelc/weight.bin",
        "build/.own.compiled/a.mlmodelc/weight.bin",
        "data/golden/tiny.safetensors",
    }


def test_all_caches_go_and_what_no_command_makes_again_stays(project):
    assert invoke("--folder", "build", "--yes").exit_code == 0
    assert files(project) == {
        "pyproject.toml",
        "data/tiny/model.safetensors",
        "build/own/bundle.json",
    }
    assert "nothing to remove" in invoke().stdout


def test_an_export_that_is_under_way_keeps_its_folder(project):
    (unfinished,) = (e for e in cache_entries(project) if e.kind == "unfinished")
    with (
        locked(unfinished.path),
        pytest.raises(InputError, match="an export is writing to it"),
    ):
        remove(unfinished)
    assert unfinished.path.is_dir()
