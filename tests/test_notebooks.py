"""Notebooks: committed without outputs, one parameters cell, run whole at a small size; a broken callback fails the run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from workbench import log, notebook, report
from workbench.errors import InputError

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "05": {"MAX_SEQ_LEN": 64, "POSITIONS": 12},
    "29": {"MAX_SEQ_LEN": 96},
    "30": {"MAX_SEQ_LEN": 96, "POSITIONS": 8},
    "31": {"POSITIONS": 17, "WORST": 1},
    "32": {"NORMS": [605.0], "QUERY_NORMS": [0, 64, 2048], "TOKENS": 4, "MAX_SEQ_LEN": 16},
    "33": {"CHECKPOINTS": ["data/tiny-llama"], "MAX_SEQ_LEN": 64, "CONTEXTS": [24, 33, 48], "ROUNDS": 1,
           "DIMS": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
                    "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 128}},
    "34": {"MAX_SEQ_LEN": [16, 32], "T": [1, 2], "DEPTH": 4, "N_GEN": 2, "REPETITIONS": 1, "PROMPT": [1, 4, 69, 173]},
    "35": {"MAX_SEQ_LEN": 32, "ROUNDS": 1},
}  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_stripped_with_one_parameters_cell(path):
    subprocess.run([sys.executable, "-m", "nbstripout", "--verify", path], check=True)
    cells = json.loads(path.read_text())["cells"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    for cell in cells:
        assert cell["cell_type"] != "code" or len(cell["source"]) <= 14, "".join(cell["source"])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of what notebooks read, so that running them leaves the checkout alone."""
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "notebooks", copy / "notebooks")
    shutil.copytree(ROOT / "data", copy / "data", ignore=shutil.ignore_patterns("bundles", "golden"))
    return copy


@pytest.mark.parametrize("number", SMALL)
def test_runs_whole_and_ends_in_a_log_row_figures_and_a_report(number, project, monkeypatch):
    monkeypatch.chdir(project)
    found = notebook.run(number, SMALL[number], progress=False)
    assert found["verdict"] == "GREEN"
    assert found["runs"] and found["figures"]
    text = Path(found["report"]).read_text()
    assert report.experiment(number).question in text and "not measured" in text
    for figure in found["figures"]:
        shown = json.loads(Path(figure).with_suffix(".json").read_text())["run_ids"]
        assert set(shown) <= set(log.load("runs")["run_id"])


def test_every_notebook_is_run_here():
    assert {p.stem[:2] for p in NOTEBOOKS} == set(SMALL) == set(report.EXPERIMENTS)


def test_misspelt_parameters_are_refused():
    with pytest.raises(InputError, match="MAX_SEQ_LENGTH"):
        notebook.run("05", {"MAX_SEQ_LENGTH": 64}, progress=False)


def test_an_error_in_a_widget_s_callback_fails_the_notebook(project, tmp_path):
    cells = [
        "from workbench.widgets import Explorer",
        f"explorer = Explorer({{'checkpoint': {str(ROOT / 'data' / 'tiny-llama')!r}, 'run': {{'T': [1, 2]}}}}, root={str(tmp_path)!r})",
        "explorer.stored = None",
        "explorer.controls['T'].value = 2",
        "explorer.check()",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="TypeError"):
        nbclient.NotebookClient(made, resources={"metadata": {"path": str(project)}}).execute()
    assert [bool(c.outputs) for c in made.cells] == [False, False, False, False, True]
