"""The page of all shipped experiments says what their runs say."""

import json

import pandas as pd
import pytest
from experiment.toy import NAME, example
from tiny import ROOT

from workbench import plots
from workbench.experiment import publish_run
from workbench.experiment.overview import overview, short_answer

SHIPPED = ROOT / "experiments"


def test_the_page_of_experiments_agrees_with_the_shipped_runs(monkeypatch):
    monkeypatch.chdir(ROOT)  # the questions are those of its notebooks
    step = "python tools/experiments_page.py writes it"
    assert (SHIPPED / "README.md").read_text() == overview(SHIPPED), step


def test_a_row_has_question_answer_checkpoint_and_the_first_figure(project):
    run = example()
    run.conclude("Yes.\nA second line.")
    row = publish_run(run.folder).parent.joinpath("README.md").read_text()
    (line,) = [line for line in row.splitlines() if line.startswith("| [07]")]
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    assert cells[:3] == [f"[07]({NAME}/report.md)", "How fast?", "Yes."]
    assert cells[3].startswith("tiny-llama, 20")
    assert f'<img src="{NAME}/figures/times-1.5.svg"' in cells[4]


def test_a_row_has_the_figure_that_the_conclusion_names(project):
    run = example()
    rows = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "hue": "a"})
    axes = {"x": "x", "y": "y", "hue": "hue"}
    run.figure("choice", plots.lines, rows, alt="The choice.", **axes)
    run.conclude("Yes.", picture="choice")
    page = publish_run(run.folder).parent / "README.md"
    (line,) = [row for row in page.read_text().splitlines() if row.startswith("| [07]")]
    assert f'<img src="{NAME}/figures/choice.svg"' in line
    with pytest.raises(ValueError, match="'chosen' is no figure of this run"):
        run.conclude("Yes.", picture="chosen")


def test_publishing_another_answer_changes_the_row_and_no_other(project):
    for answer in ("It is 1.5 times as fast.", "It is 2 times as fast."):
        run = example()
        run.conclude(answer)
        page = publish_run(run.folder).parent / "README.md"
        assert page.read_text().count("times as fast") == 1
        assert answer in page.read_text()
    stored = json.loads((page.parent / NAME / "run.json").read_text())
    assert short_answer(stored["conclusion"]) == answer


@pytest.mark.parametrize(
    ("conclusion", "answer"),
    [
        ("The model keeps its cache.\nAnd more.", "The model keeps its cache."),
        ("Yes. 72 cells were compared with the sequence alone. A third sentence.",)
        + ("Yes. 72 cells were compared with the sequence alone.",),
        ("Without a full stop", "Without a full stop"),
        ("Qwen 2.5 has a mean KL of 0.0046 nats from it. B.",)
        + ("Qwen 2.5 has a mean KL of 0.0046 nats from it.",),
    ],
)
def test_an_answer_is_whole_sentences_of_the_first_line(conclusion, answer):
    assert short_answer(conclusion) == answer
