"""JupyterLab in a real browser: Run All of every notebook ends without an error and changes nothing
that git tracks; the Explorer measures, follows its sliders, splits a clicked layer's error and saves.

Screenshots stay in build/screens."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest
from browser.lab import (
    FLAGS,
    SIZE,
    Notebook,
    changes,
    chromium,
    commit,
    open_lab,
    serve,
)
from experiment import small

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        chromium() is None or importlib.util.find_spec("ipympl") is None,
        reason="needs Chromium (apt-get install chromium) and ipympl",
    ),
]
ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screens"
EXPLORER = """from workbench import Experiment, widgets
experiment = Experiment("34_x", {"CHECKPOINT": "tiny-llama"})
grid = {"checkpoint": "data/tiny-llama", "experiment": "34", "validate_ids": [1, 4, 69, 173],
        "export": {"max_seq_len": [16, 32], "tokens": ["1-2"]},
        "run": {"T": [1, 2], "n_gen": 2, "repetitions": 3}}
explorer = widgets.Explorer(grid, experiment)
explorer"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout whose notebooks have small parameters."""
    copy = small.project(tmp_path_factory.mktemp("project"))
    commit(copy)
    return copy


@pytest.fixture(scope="module")
def lab(project, forks, tmp_path_factory):
    """Opens a notebook by name: lab("05_stateful_kv_cache") → Notebook."""
    from playwright.sync_api import sync_playwright

    with (
        serve(project, tmp_path_factory.mktemp("home"), forks) as address,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = open_lab(browser.new_page(viewport=SIZE), address)
        yield lambda name: Notebook(
            page, project / "notebooks" / f"{name}.ipynb", SHOTS
        )
        browser.close()


def written(project: Path, name: str, *cells: str) -> str:
    """A notebook of these cells, beside the others."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": kernel},  # or a dialog asks for it
    )
    nbformat.write(made, project / "notebooks" / f"{name}.ipynb")
    return name


@pytest.mark.slow("a browser runs a whole notebook")
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
)
def test_a_notebook_runs_whole_and_leaves_git_as_it_was(name, lab, project):
    notebook = lab(name)
    notebook.run_all()
    notebook.shoot()
    assert not notebook.errors(), notebook.errors()
    (run,) = (project / "build" / "experiments" / name).glob("*/run.json")
    assert json.loads(run.read_text())["conclusion"]
    assert (run.parent / "report.md").is_file()
    assert changes(project) == []


@pytest.mark.slow("a browser measures a grid")
def test_the_explorer_measures_follows_splits_and_saves(lab, project):
    notebook = lab(written(project, "explorer", EXPLORER))
    notebook.run_all()
    explorer = notebook.widget("explorer")
    explorer.says("Not measured at this setting")
    explorer.press("Run what is missing")
    explorer.says("measuring fp16, max_seq_len 16: about")
    explorer.says("Nothing is missing")
    explorer.says("ms per layer")
    for name in ("T", "max_seq_len", "tensor", "metric"):
        explorer.move(name)
    explorer.click_picture(0.4, 0.4)
    explorer.says("relative RMS that each step adds")
    explorer.says("quantization")
    explorer.says("× the rounding floor")
    explorer.press("Save figure")
    explorer.says("saved explorer-k-error-32-2-")
    notebook.shoot()
    assert not notebook.errors(), notebook.errors()
    saved = project / "build" / "experiments" / "34_x" / "tiny-llama" / "figures"
    assert {p.suffix for p in saved.glob("explorer-k-error-32-2-*")} == {
        *(".json", ".parquet", ".pdf", ".png", ".svg")
    }
    wide = (
        "[...b.querySelectorAll('button')].filter(x => x.scrollWidth > x.clientWidth)"
    )
    assert explorer.box.evaluate(f"b => {wide}.map(x => x.innerText)") == []


def test_a_cell_that_fails_is_seen(lab, project):
    notebook = lab(written(project, "broken", "1 / 0", "2"))
    notebook.run_all()
    assert "ZeroDivisionError" in notebook.errors()[0]
