"""JupyterLab in a real browser: Run All of every notebook ends without an error and changes nothing
that git tracks; the Explorer measures, follows its sliders, splits a clicked layer's error and saves."""

import importlib.util

import pytest
from browser.lab import FLAGS, SIZE, Notebook, Widget, chromium, open_lab, serve
from experiment import small
from tiny import ROOT

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        chromium() is None or importlib.util.find_spec("ipympl") is None,
        reason="needs Chromium (apt-get install chromium) and ipympl",
    ),
]


@pytest.fixture(scope="module")
def lab(small_project, forks, tmp_path_factory):
    """Opens a notebook by name: lab("05_stateful_kv_cache") → Notebook."""
    from playwright.sync_api import sync_playwright

    with (
        serve(small_project, tmp_path_factory.mktemp("home"), forks) as address,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = open_lab(browser.new_page(viewport=SIZE), address)
        yield lambda name: Notebook(page, small_project / "notebooks" / f"{name}.ipynb")
        browser.close()


@pytest.mark.slow("a browser runs a whole notebook")
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
)
def test_a_notebook_runs_whole_and_leaves_git_as_it_was(name, lab, small_project):
    notebook = lab(name)
    notebook.run_all()
    assert notebook.errors() == []
    # the last thing that a conclusion writes
    assert [*(small_project / "build" / "experiments" / name).glob("*/report.md")]
    assert small.changes(small_project) == ""


@pytest.mark.slow("a browser measures a grid")
def test_the_explorer_measures_follows_splits_and_saves(lab, small_project):
    notebook = lab("05_stateful_kv_cache")
    notebook.run_all()
    explorer = Widget(notebook)
    explorer.says("No times yet")  # the run's own errors are there
    explorer.press("Run what is missing")
    explorer.says("measuring int8-channel, max_seq_len 64, about")
    explorer.says("Nothing is missing")
    explorer.says("ms per layer")
    explorer.move("max_seq_len", "ArrowLeft")
    for name in ("T", "tensor", "metric"):
        explorer.move(name)
    explorer.click_picture(0.4, 0.4)
    explorer.says("relative RMS that each step adds")
    explorer.says("× the rounding floor")
    explorer.press("Save figure")
    explorer.says("-k-error (svg")
    assert notebook.errors() == []
    saved = (small_project / "build" / "experiments").glob(
        "05*/*/figures/explorer-*-k-error.*"
    )
    assert len([*saved]) == 5  # drawings, data and options
    cut = "all => all.filter(x => x.scrollWidth > x.clientWidth).map(x => x.innerText)"
    assert explorer.box.locator("button").evaluate_all(cut) == []
