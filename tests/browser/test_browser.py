"""JupyterLab in a real browser: Run All of every notebook ends without an error and changes nothing
that git tracks; the Explorer measures, follows its sliders, splits a clicked layer's error and saves."""

import importlib.util

import pytest
from browser.lab import FLAGS, SIZE, Notebook, Widget, chromium, open_lab, serve
from experiment import small
from tiny import ROOT

from workbench.experiment import notebooks

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        chromium() is None or importlib.util.find_spec("ipympl") is None,
        reason="needs Chromium (apt-get install chromium) and ipympl",
    ),
]


@pytest.fixture(scope="module")
def lab(small_project, forking_python, tmp_path_factory):
    """Opens a notebook by name: lab("05_stateful_kv_cache") → Notebook."""
    from playwright.sync_api import sync_playwright

    with (
        serve(
            small_project, tmp_path_factory.mktemp("home"), forking_python
        ) as address,
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


def test_an_open_notebook_opens_again(lab):
    for _ in range(2):
        notebook = lab("05_stateful_kv_cache")
        assert notebook.page.locator(".jp-Notebook").count() == 1


@pytest.mark.slow("a browser measures a grid")
def test_the_explorer_measures_follows_splits_and_saves(lab, small_project):
    notebook = lab("05_stateful_kv_cache")
    notebook.run_all()
    explorer = Widget(notebook)
    explorer.says(
        "Times: not measured at this setting"
    )  # the run's own errors are there
    explorer.press("Run what is missing")
    explorer.says("measuring int8-channel, max_seq_len 64, no estimate yet")
    explorer.says("Nothing is missing")
    explorer.says("ms per layer")
    explorer.move("max_seq_len", "ArrowLeft")
    for name in ("T", "tensor", "metric"):
        explorer.move(name)
    # another value dims the picture before the kernel answers; the drawn one does not
    assert explorer.opacities_at_another_value() == [1, 0.25, 1]
    # the picture is as wide as the page, which a narrow window cuts
    for width in (900, SIZE["width"]):
        explorer.changes(
            lambda width=width: notebook.page.set_viewport_size(SIZE | {"width": width})
        )
        explorer.fits()
    explorer.click_picture(0.4, 0.4)
    explorer.says("the error that each step adds")
    explorer.says("× the rounding budget")
    explorer.press("Save figure")
    explorer.says("-k-error (svg")
    assert notebook.errors() == []
    saved = (small_project / "build" / "experiments").glob(
        "05*/*/figures/explorer-*-k-error.*"
    )
    assert len([*saved]) == 5  # drawings, data and options
    cut = "all => all.filter(x => x.scrollWidth > x.clientWidth).map(x => x.innerText)"
    assert explorer.box.locator("button").evaluate_all(cut) == []


NAME = "32_fp16_overflow"
GATE = """from workbench.check.gates import Gate
experiment.add_gates([Gate("planted", "{verdict}", 1.0, 1.0, "added by hand")])
experiment.conclude("{answer}")"""


def written(project) -> dict[str, bytes]:
    """The files of the finished run of notebook 32."""
    (folder,) = (project / "build" / "experiments" / NAME).glob("run")
    return {str(path): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.slow("a browser runs a notebook three times")
def test_a_cell_is_corrected_fails_and_is_copied(lab, small_project, monkeypatch):
    notebook = lab(NAME)
    notebook.run_all()
    assert notebook.errors() == []
    # a gate that is RED by mistake, then corrected in the same cell
    report = small_project / "build" / "experiments" / NAME / "run" / "report.md"
    for verdict in ("RED", "GREEN"):
        notebook.edit_cell("conclude", GATE.format(verdict=verdict, answer=verdict))
        notebook.run_cell("conclude")
        assert notebook.errors() == []
        rows = [line for line in report.read_text().splitlines() if "| planted" in line]
        assert len(rows) == 1 and verdict in rows[0]
    # a cell that fails leaves the write-up of the finished run as it was
    before = written(small_project)
    notebook.edit_cell("cell-4", 'raise ValueError("planted")')
    notebook.run_all()
    assert notebook.errors() == ["ValueError: planted"]
    assert written(small_project) == before
    # Duplicate in the file browser: the copy runs by itself, the number means the original
    small.git(small_project, "checkout", "--", "notebooks")
    notebook.page.evaluate(
        f"window.jupyterapp.serviceManager.contents.copy('notebooks/{NAME}.ipynb', "
        "'notebooks').then(() => true)"
    )
    copy = lab(f"{NAME}-Copy1")
    try:
        copy.run_all()
        assert copy.errors() == []
        monkeypatch.chdir(small_project)
        assert notebooks.find_notebook("32").stem == NAME
    finally:
        copy.path.unlink()
