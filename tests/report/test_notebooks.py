"""Notebooks: committed without outputs, one parameters cell; run headless at a small size where no
browser can do it."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from browser.lab import changes, chromium, commit
from typer.testing import CliRunner

from workbench import log, report, sweep
from workbench.cli.app import app
from workbench.errors import InputError
from workbench.report import notebook
from workbench.report.lab import without_outputs
from workbench.sweep import runs

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "05": {
        "MAX_SEQ_LEN": 64,
        "T_MAX": 2,
        "POSITIONS": 12,
        "PRESETS": ["fp16", "int8-tensor"],
    },
    "29": {"MAX_SEQ_LEN": 96},
    "30": {
        "MAX_SEQ_LEN": 96,
        "T_MAX": 2,
        "PROMPTS": [[42, 100, 200], [2, 42]],
        "PRESETS": ["fp16", "int8-tensor"],
        "POSITIONS": 8,
        "STATES": ["separate"],
        "DEPTHS": [4],
        "N_GEN": 2,
    },
    "31": {"POSITIONS": 17, "WORST": 1},
    "32": {
        "NORMS": [605.0],
        "QUERY_NORMS": [0, 64, 2048],
        "TOKENS": 4,
        "MAX_SEQ_LEN": 16,
    },
    "33": {
        "CHECKPOINTS": ["data/tiny-llama"],
        "MAX_SEQ_LEN": 64,
        "CONTEXTS": [24, 33, 48],
        "ROUNDS": 1,
        "DIMS": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 1,
            "vocab_size": 128,
        },
    },
    "34": {
        "MAX_SEQ_LEN": [16, 32],
        "T": [1, 2],
        "COMPRESS": ["int8-tensor"],
        "LAYERS_PER_SHARD": [1, 4],
        "KV_WRITE": ["mask"],
        "LAYOUT": ["bct1"],
        "DEPTH": 4,
        "N_GEN": 2,
        "REPETITIONS": 1,
        "ROUNDS": 1,
        "PROMPT": [1, 4, 69, 173],
    },
    "35": {"MAX_SEQ_LEN": 32, "ROUNDS": 1},
    "36": {"ZIP": "data/first-light/simulated-mac.zip"},
    "37": {"STYLES": ["CoreML-LLM, one package"], "LAYERS": 2},
    "38": {
        "MAX_SEQ_LEN": 48,
        "TOKENS": 24,
        "ROUNDS": 2,
        "HALF_LIVES": [8, 512, 8192],
        "DRIFT_TOKENS": [64, 512],
        "SEEDS": 2,
        "LENGTHS": [128, 4096],
    },
    "40": {"POSITIONS": 6, "FAULTS": False},
}


def test_notebooks_are_committed_stripped():
    subprocess.run(
        [sys.executable, "-m", "nbstripout", "--verify", *NOTEBOOKS], check=True
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_as_jupyter_writes_it_with_one_parameters_cell(path):
    text = path.read_text()
    assert text == nbformat.writes(nbformat.reads(text, as_version=4)) + "\n"
    cells = json.loads(text)["cells"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    for cell in cells:
        lines = 20 if "parameters" in cell["metadata"].get("tags", []) else 14
        assert cell["cell_type"] != "code" or len(cell["source"]) <= lines, "".join(
            cell["source"]
        )
        # the log that is shipped holds results whose bundles nobody has exported here: `bundle_for`
        # makes what is missing
        assert "Bundle.open(" not in "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_begins_with_a_question_and_ends_with_the_answer(path):
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert re.match(r"# \d\d · [^\n]+\?\n", texts[0])
    assert (
        sum(
            bool(re.search(r"^## (Answer|Conclusion)$", text, re.MULTILINE))
            for text in texts
        )
        == 1
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of what notebooks read, so that running them leaves the checkout alone."""
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "notebooks", copy / "notebooks")
    shutil.copytree(
        ROOT / "data", copy / "data", ignore=shutil.ignore_patterns("bundles", "golden")
    )
    commit(copy)
    return copy


@pytest.mark.skipif(
    chromium() is not None,
    reason="the same notebooks run in the browser: tests/browser",
)
@pytest.mark.parametrize("number", SMALL)
def test_runs_whole_and_ends_in_a_log_row_figures_and_a_report(
    number, project, monkeypatch
):
    if number == "40" and find_spec("coreai_torch") is None:
        pytest.skip("needs the extra: workbench[coreai]")
    monkeypatch.chdir(project)
    found = notebook.run_notebook(number, SMALL[number], progress=False)
    assert found["verdict"] == "GREEN"
    assert found["runs"] and found["figures"]
    assert report.experiment(number).question in Path(found["report"]).read_text()
    assert changes(project) == []


def test_notebook_05_takes_functions_and_a_prefill_bundle(project, monkeypatch, forked):
    monkeypatch.chdir(project)
    changed = {
        "FUNCTIONS": [1, 4],
        "T_MAX": 4,
        "PREFILL": {"t_max": 8, "states": "packed"},
    }
    found = notebook.run_notebook("05", SMALL["05"] | changed, progress=False)
    assert found["verdict"] == "GREEN"
    run = log.load("runs").set_index("run_id").loc[found["runs"][-1]]
    gates = {
        g["name"] for g in json.loads(run["config"])["gates"] if g["verdict"] == "GREEN"
    }
    assert run["functions"] == "[1, 4]"
    assert {"handover_rows", "handover_continues", "same_for_every_T"} <= gates


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes notebook 29 of a project of its own, which the working directory is then in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(*cells: str) -> None:
        first = [
            nbformat.v4.new_markdown_cell("# 29"),
            nbformat.v4.new_code_cell(
                "N = 1\nEXTRACT = False", metadata={"tags": ["parameters"]}
            ),
        ]
        made = nbformat.v4.new_notebook(
            cells=[*first, *map(nbformat.v4.new_code_cell, cells)]
        )
        nbformat.write(made, tmp_path / "notebooks" / "29_zaya_probe.ipynb")

    return write


RECORD = """from workbench.sweep import runs
runs.record_run('29', {'command': 'notebook 29', 'verdict': VERDICT, 'checkpoint': 'c', 'config': {'conclusion': f'N is {N}'}})"""


def test_a_headless_run_sets_parameters_and_gives_verdict_runs_and_report(written):
    written(RECORD.replace("VERDICT", "'RED'"))
    found = notebook.run_notebook("29", {"N": 7}, progress=False)
    assert (found["verdict"], len(found["runs"]), found["figures"]) == ("RED", 1, [])
    assert "N is 7" in Path(found["report"]).read_text()
    assert nbformat.read(found["executed"], as_version=4).cells[2].execution_count == 2


def test_the_verdict_of_a_run_is_its_own(written):
    runs.record_run(
        "29",
        {
            "command": "notebook 29",
            "verdict": "RED",
            "checkpoint": "other",
            "bundle_hash": "b",
            "config": {},
        },
    )
    written(RECORD.replace("VERDICT", "'GREEN'"))
    assert notebook.run_notebook("29", progress=False)["verdict"] == "GREEN"


def test_a_run_reports_on_itself_even_where_the_log_holds_later_ones(written, tmp_path):
    later = "29991231T000000000000Z-00000000"  # a clock that was wrong, on this machine or another
    log.append(
        "runs",
        {
            "experiment": "29",
            "status": "ok",
            "command": "notebook 29",
            "checkpoint": "c",
            "config": {"conclusion": "later"},
        },
        run_id=later,
    )
    written(RECORD.replace("VERDICT", "'GREEN'"))
    found = notebook.run_notebook("29", {"N": 7}, progress=False)
    assert "N is 7" in Path(found["report"]).read_text() and later not in found["runs"]


def test_progress_counts_the_cells_that_run(written, capsys):
    written("", "1", RECORD.replace("VERDICT", "'GREEN'"))
    notebook.run_notebook("29")
    assert "100%" in capsys.readouterr().err


REFUSAL = """from workbench.errors import InputError
raise InputError("prompt: found", "300 tokens; needs more. Next: x", "at most 256\\nlines", "export again.")"""


def test_an_input_error_in_a_cell_is_the_same_error_here_and_one_message_in_the_notebook(
    written, tmp_path
):
    written(REFUSAL, "2")
    with pytest.raises(InputError) as refused:
        notebook.run_notebook("29", progress=False)
    known = InputError(
        "prompt: found",
        "300 tokens; needs more. Next: x",
        "at most 256\nlines",
        "export again.",
    )
    assert str(refused.value) == str(known)
    executed = nbformat.read(
        tmp_path / "build" / "notebooks" / "29_zaya_probe.ipynb", as_version=4
    )
    (shown,) = executed.cells[2].outputs
    assert shown["traceback"] == [
        "InputError: prompt: found\n"
        "  found      300 tokens; needs more. Next: x\n"
        "  needs      at most 256\nlines\n"
        "  next step  export again"
    ]


@pytest.mark.parametrize(
    "cell,last",
    [
        ("x = 1\nx / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "died"),
    ],
)
def test_any_other_failure_names_notebook_cell_and_error_and_exits_3(
    cell, last, written, tmp_path
):
    written("1", cell, "2")
    found = CliRunner().invoke(app, ["run", "29"])
    assert found.exit_code == 3 and isinstance(found.exception, SystemExit)
    (said,) = [
        line for line in found.stderr.splitlines() if line.startswith("workbench:")
    ]
    assert (
        "29_zaya_probe" in said
        and "cell [3]" in said
        and last in said
        and "Traceback" not in found.stderr
    )
    executed = Path("build") / "notebooks" / "29_zaya_probe.ipynb"
    assert str(executed) in said and executed.exists()


def test_every_notebook_is_run_here():
    assert {p.stem[:2] for p in NOTEBOOKS} == set(SMALL) == set(report.EXPERIMENTS)


@pytest.mark.parametrize(("extract", "rounds"), [(True, {0}), (False, {0, 1, 2})])
def test_an_extract_of_notebook_34_is_four_cells_in_one_round(
    extract, rounds, monkeypatch
):
    monkeypatch.chdir(ROOT)
    (path,) = (p for p in NOTEBOOKS if p.stem.startswith("34"))
    code = [
        c.source
        for c in nbformat.read(path, as_version=4).cells
        if c.cell_type == "code"
    ]
    names = {}
    exec("\n".join([*code[:2], f"EXTRACT = {extract}", *code[2:5]]), names)
    cells = [
        list(sweep.cells(sweep.make_grid(names[name]))) for name in ("growth", "choice")
    ]
    assert {cell.round for cell in cells[0]} == rounds
    keys = {cell.key("c") for part in cells for cell in part}
    assert len(keys) == (4 if extract else 3 * (9 + 16 - 1))


def test_the_last_lines_of_a_run_say_verdict_and_how_to_go_on(written):
    written(RECORD.replace("VERDICT", "'GREEN'"))
    for extract, step in (("false", "make lab"), ("true", "workbench run 29")):
        found = CliRunner().invoke(app, ["run", "29", "--set", f"EXTRACT={extract}"])
        assert found.exit_code == 0, found.output
        verdict, go_on = found.stdout.splitlines()[-2:]
        assert verdict == "verdict  GREEN" and go_on.startswith(f"go on    {step}")
        assert "log row 2" not in found.stdout
    found = CliRunner().invoke(app, ["run", "29", "--set", "EXTRACTS=true"])
    assert isinstance(found.exception, InputError)


def test_misspelt_parameters_are_refused():
    with pytest.raises(InputError, match="MAX_SEQ_LENGTH"):
        notebook.run_notebook("05", {"MAX_SEQ_LENGTH": 64}, progress=False)


def test_jupyter_saves_a_notebook_as_it_was_and_keeps_the_outputs_apart(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    before = NOTEBOOKS[0].read_text()
    executed = nbformat.reads(before, as_version=4)
    executed.metadata.language_info |= {
        "version": "3.11.7",
        "pygments_lexer": "ipython3",
    }
    for count, cell in enumerate(
        (c for c in executed.cells if c.cell_type == "code"), 1
    ):
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", text="seen")]
    model = {"type": "notebook", "content": json.loads(nbformat.writes(executed))}
    files = SimpleNamespace(root_dir=str(tmp_path / "notebooks"))
    without_outputs(model=model, path=NOTEBOOKS[0].name, contents_manager=files)
    assert nbformat.writes(nbformat.from_dict(model["content"])) + "\n" == before
    copy = nbformat.read(
        tmp_path / "build" / "notebooks" / NOTEBOOKS[0].name, as_version=4
    )
    assert copy.cells[1].outputs[0].text == "seen"
