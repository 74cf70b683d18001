"""Write-ups out of the log: the same row gives the same bytes, tables and figures name their rows, and nothing is typed in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import log, plots, report, runs
from workbench.errors import InputError

ROOT = Path(__file__).parents[1]
LOG = ROOT / "experiments" / "log"
SHIPPED = sorted((ROOT / "experiments").glob("*/figures/*.json"))
FRAME = pd.DataFrame({"part": ["a", "b"], "ms": [1.5, np.nan], "count": pd.array([1, None], "Int64"), "run_id": ["r", None]})


def test_an_exhibit_comes_back_as_it_was():
    row = report.exhibit("x", FRAME.assign(inf=[np.inf, 0.1 + 0.2]), "caption", "parts_bar", {"Ts": range(1, 3), "S": np.int64(4)})
    back = report.data_of(row)
    pd.testing.assert_frame_equal(back, FRAME.assign(inf=[np.inf, 0.1 + 0.2]), check_dtype=False)
    assert json.loads(row["options"]) == {"Ts": [1, 2], "S": 4}


@pytest.fixture
def written(tmp_path):
    root = tmp_path / "experiments" / "log"
    rows = [report.exhibit("bars", FRAME.dropna()[["part", "ms"]], "what it shows", "parts_bar"),
            report.exhibit("numbers", FRAME[["part", "ms"]], "100 % of numbers_")]  # fmt: skip
    gates = [{"name": "update", "verdict": "GREEN", "value": 0.99, "threshold": 0.97, "reason": "worst layer 1"}]
    config = {"gates": gates, "conclusion": "It holds.", "parameters": {"CHECKPOINT": "data/tiny-llama"}}
    run_id = runs.record(
        "29", {"command": "notebook 29", "checkpoint": "tiny", "verdict": "GREEN", "config": config}, root=root, exhibits=rows
    )
    return run_id, report.write("29", root)


def test_a_report_says_question_words_tables_figures_verdicts_gaps_and_commands(written):
    run_id, path = written
    text = path.read_text()
    for said in (report.EXPERIMENTS["29"].question, "It holds.", "figures/bars.svg", "what it shows", "worst layer 1",
                 "not measured", "workbench run 29 --set", "workbench report 29", "tables/numbers.tex"):  # fmt: skip
        assert said in text, said
    assert text.count(run_id) >= 3
    latex = (path.parent / "tables" / "numbers.tex").read_text()
    assert r"\toprule" in latex and r"100 \% of numbers\_" in latex and "nan" not in latex.lower()


def test_only_the_newest_run_of_the_notebook_counts(written):
    _, path = written
    root = path.parents[1] / "log"
    later = runs.record("29", {"command": "notebook 29", "config": {"conclusion": "It broke."}}, root=root,
                        exhibits=[report.exhibit("numbers", FRAME, "newer")])  # fmt: skip
    text = report.write("29", root).read_text()
    assert "It broke." in text and "It holds." not in text and "bars.svg" not in text and later in text


def test_an_experiment_without_runs_has_no_report(tmp_path):
    with pytest.raises(InputError, match="no run in the log"):
        report.write("29", tmp_path / "log")


@pytest.fixture(scope="module")
def drawn_again(tmp_path_factory) -> Path:
    """Every exhibit of the shipped log, drawn by another process into a folder per experiment."""
    place = tmp_path_factory.mktemp("drawn")
    code = (
        "import sys; from pathlib import Path; from workbench import report\n"
        "root, place = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "for number in report.EXPERIMENTS:\n"
        "    for row in report.behind(number, root)[1]:\n"
        "        report.export(row, place / number, number)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, LOG, place], check=True, cwd=ROOT, env=environment)
    return place


@pytest.mark.parametrize("number", report.EXPERIMENTS)
def test_every_shipped_figure_and_table_comes_out_of_the_log_byte_for_byte(number, drawn_again):
    place = ROOT / "experiments" / report.experiment(number).name
    shipped = {str(p.relative_to(place)): p for folder in ("figures", "tables") for p in (place / folder).glob("*")}
    again = {str(p.relative_to(drawn_again / number)): p for p in (drawn_again / number).rglob("*") if p.is_file()}
    if not shipped and not again:
        pytest.skip("no run of this notebook is shipped")
    assert set(again) == set(shipped)
    sidecars = [json.loads(path.read_text()) for name, path in shipped.items() if name.endswith(".json")]
    same_writer = all(about["written_by"] == plots.writer() for about in sidecars)
    for name, path in again.items():
        if same_writer or name.endswith((".svg", ".tex")):
            assert path.read_bytes() == shipped[name].read_bytes(), name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parts[-3][:2]}-{p.stem}")
def test_shipped_figures_name_runs_that_the_shipped_log_has(path):
    about = json.loads(path.read_text())
    assert about["alt"] and about["run_ids"]
    assert set(about["run_ids"]) <= set(log.load("runs", root=LOG)["run_id"])


def test_every_plot_can_be_an_exhibit():
    assert all(callable(getattr(plots, name)) for name in plots.__all__)
