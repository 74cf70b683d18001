"""Every notebook in JupyterLab: Run All ends without an error, widgets follow, figures are on disk
and in the log.

Screenshots stay in build/screens. Without Chromium the notebooks run headless in
tests/report/test_notebooks.py instead.
"""

import json
import re
import shutil
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from browser.lab import (
    FLAGS,
    SIZE,
    Notebook,
    Widget,
    changes,
    chromium,
    commit,
    open_lab,
    serve,
)
from report.test_notebooks import SMALL
from safetensors.numpy import load_file, save_file

from workbench import log, report
from workbench.models import checkpoint
from workbench.report.notebook import set_parameters

pytestmark = pytest.mark.skipif(
    chromium() is None,
    reason="no Chromium here: install it (apt-get install chromium) to test the notebooks in a browser",
)
ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screens"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of what notebooks read, with the notebooks at test size."""
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(
        ROOT / "data", copy / "data", ignore=shutil.ignore_patterns("bundles", "golden")
    )
    (copy / "notebooks").mkdir()
    for source in (ROOT / "notebooks").glob("*.ipynb"):
        found = nbformat.read(source, as_version=4)
        set_parameters(found, SMALL[source.stem[:2]])
        nbformat.write(found, copy / "notebooks" / source.name)
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


def opened(lab, name: str) -> Notebook:
    notebook = lab(name)
    notebook.run_all()
    notebook.shoot()
    assert not notebook.errors(), notebook.errors()
    for cell in notebook.save().cells:
        if "study.figure(" in cell.source:
            assert any(
                "image/png" in output.get("data", {}) for output in cell.outputs
            ), cell.source
    return notebook


def plotted(project: Path, number: str, checkpoint: str = "*") -> pd.DataFrame:
    """The figures of an experiment's own write-ups: each in three formats, with a text alternative
    and runs that the log has."""
    root, name = project / "experiments" / "log", report.experiment(number).name
    paths = sorted(
        (project / "experiments" / name).glob(f"{checkpoint}/figures/*.json")
    )
    sidecars = [json.loads(path.read_text()) | {"stem": path.stem} for path in paths]
    known = set(log.load("runs", root=root)["run_id"])
    for path, about in zip(paths, sidecars):
        assert about["alt"] and set(about["run_ids"]) <= known
        assert all(
            path.with_suffix(f".{suffix}").stat().st_size > 1000
            for suffix in ("svg", "pdf", "png")
        )
    return pd.DataFrame(sidecars)


def move(notebook: Notebook, project: Path) -> None:
    """Moves every control of every widget: what is shown follows. In the Explorer a cell is pointed
    at and chosen, what is missing run and cancelled, what is shown saved; the Planner runs to its
    end."""
    for kind in ("planner", "explorer", "compare"):
        if not (widget := notebook.widget(kind)):
            continue
        moved = set()
        while left := [name for name in widget.controls() if name not in moved]:
            widget.move(left[0])
            moved.add(left[0])
        assert len(moved) >= {"planner": 5, "explorer": 6, "compare": 2}[kind], moved
        if kind == "explorer":
            cell_is_the_log_s(widget, project)
            run_and_cancel(widget)
            widget.press("Save figure")
            widget.box.locator("text=saved explorer-update").wait_for()
        if kind == "planner":
            widget.press("Run what is missing")
            widget.box.locator("button:has-text('Nothing is missing')").wait_for()
    assert not notebook.errors(), notebook.errors()
    if notebook.seconds:
        notebook.shoot("-moved")


def cell_is_the_log_s(explorer: Widget, project: Path) -> None:
    """The cell under the pointer has the figures of a row of the log, and stays when it is
    clicked."""
    shown = explorer.text_at(0.4, 0.25)
    place = re.match(r"layer (\d+), position (\d+) .*T = (\d+): ", shown).groups()
    where = dict(zip(("layer", "position", "T"), map(int, place)))
    where |= {"tensor": "update", "mode": "isolated"}
    rows = log.load("fidelity", root=project / "experiments" / "log", where=where)
    figures = [
        f"relative error {row['error']:.4g}, 1 − cosine {1 - row['cosine']:.4g}"
        for row in rows.to_dict("records")
    ]
    assert any(text in shown for text in figures), (shown, figures)
    assert explorer.text_at(0.01, 0.01) == ""  # beside the cells, and none is chosen
    explorer.changes(lambda: explorer.click_picture(0.4, 0.25), "a cell")
    assert explorer.text_at(0.01, 0.01) == shown


def run_and_cancel(explorer: Widget) -> None:
    """Run counts what it does, Cancel ends it and keeps what was finished."""
    explorer.press("Run what is missing")
    explorer.box.locator("text=/^\\d+ of \\d+: /").wait_for()
    start = time.monotonic()
    explorer.press("Cancel")
    explorer.box.locator("text=cancelled; what was finished is kept").wait_for()
    explorer.notebook.seconds["Cancel"] = [time.monotonic() - start]


def write_seconds(name: str, seconds: dict[str, list[float]]) -> None:
    """Adds the seconds from each action to its picture to build/response.json, with their median,
    and prints that."""
    path = ROOT / "build" / "response.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    answers = sum(
        (values for action, values in seconds.items() if action != "Cancel"), []
    )
    known[name] = {
        "median_s": statistics.median(answers),
        "n": len(answers),
        "s": seconds,
    }
    path.write_text(json.dumps(known, indent=1))
    print(
        f"{name}: {known[name]['median_s']:.2f} s from an action to its picture, n = {len(answers)}"
    )


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
)
def test_a_notebook_runs_whole_and_its_widgets_follow(name, lab, project):
    if name.startswith("40") and find_spec("coreai_torch") is None:
        pytest.skip("needs the extra: workbench[coreai]")
    notebook = opened(lab, name)
    move(notebook, project)
    if notebook.seconds:
        write_seconds(name, notebook.seconds)
    assert len(plotted(project, name[:2]))
    (written_up,) = (project / "experiments" / name).glob("*/report.md")
    assert report.experiment(name[:2]).question in written_up.read_text()
    # neither shipped results nor notebooks, saved with their outputs
    assert changes(project) == []


def written(project: Path, name: str, *cells: str) -> str:
    """A notebook of these cells, beside the others."""
    # or a dialog asks for it
    kernel = {
        "kernelspec": {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
    }
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel
    )
    nbformat.write(made, project / "notebooks" / f"{name}.ipynb")
    return name


EXPLORER = """from workbench.widgets import Explorer
explorer = Explorer({"checkpoint": "data/tiny-llama", "experiment": "34", "validate_ids": [1, 4, 69, 173],
                     "export": {"max_seq_len": [16], "t_max": [2]}, "run": {"T": [1, 2], "n_gen": 2, "repetitions": 1}})
explorer"""


def test_run_makes_what_is_missing_save_keeps_it_and_a_failing_callback_is_seen(
    lab, project
):
    notebook = opened(lab, written(project, "run_button", EXPLORER))
    explorer = notebook.widget("explorer")
    explorer.changes(lambda: explorer.press("Run what is missing"), "Run")
    explorer.box.locator("button:has-text('Nothing is missing')").wait_for()
    cell_is_the_log_s(explorer, project)
    sharp = explorer.picture.evaluate("image => image.naturalWidth / image.width")
    assert sharp >= 2 and not notebook.page.locator(".workbench-still:visible").count()
    explorer.press("Save figure")
    explorer.box.locator("text=saved explorer-update-S16-T1-fp16").wait_for()
    notebook.shoot()
    assert "explorer-update-S16-T1-fp16-declared" in set(plotted(project, "34")["stem"])
    notebook.execute("explorer.tables = None")
    with pytest.raises(AssertionError, match="TypeError"):
        explorer.changes(lambda: explorer.move_slider("T"))


def test_a_cell_that_fails_is_seen(lab, project):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        opened(lab, written(project, "broken", "1 / 0", "2"))


def test_a_checkpoint_never_seen_goes_to_a_heatmap_with_no_code(lab, project):
    """A Llama of odd sizes in several files, without a tokenizer: its path is all that is typed."""
    stranger = project / "data" / "stranger"
    checkpoint.random(
        stranger,
        "llama",
        hidden_size=72,
        intermediate_size=100,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        num_hidden_layers=2,
        vocab_size=211,
    )
    tensors = load_file(stranger / "model.safetensors")
    (stranger / "model.safetensors").unlink()
    index = {
        name: f"model-{i % 3 + 1:05}-of-00003.safetensors"
        for i, name in enumerate(tensors)
    }
    for part in set(index.values()):
        save_file(
            {name: tensors[name] for name in tensors if index[name] == part},
            stranger / part,
        )
    (stranger / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    found = nbformat.read(
        project / "notebooks" / "05_stateful_kv_cache.ipynb", as_version=4
    )
    set_parameters(found, {"CHECKPOINT": "data/stranger"})
    nbformat.write(found, project / "notebooks" / "stranger.ipynb")
    notebook = opened(lab, "stranger")
    shown = plotted(project, "05", "stranger").set_index("stem").loc["fidelity"]
    run = log.load(
        "runs", root=project / "experiments" / "log", where={"run_id": shown["run_ids"]}
    )
    assert set(run["checkpoint"]) == {"stranger"}
    explorer = notebook.widget("explorer")
    cell_is_the_log_s(explorer, project)
    explorer.move("T")
