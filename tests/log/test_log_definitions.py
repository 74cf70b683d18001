"""Rows of fidelity carry the version of what they mean; readers leave out rows that mean
something else and say so. Runs of before the two verdicts get both."""

import json

import pandas as pd

from workbench import log
from workbench.log.verdicts import UNDECIDED


def rows(definition: int | None, count: int = 1) -> list[dict]:
    """A chained and an isolated update."""
    row = {"layer": 0, "tensor": "update", "cosine": 0.9, "definition": definition}
    return [row | {"mode": mode} for mode in ("chained", "isolated")] * count


def test_a_row_that_is_written_has_the_present_definition(tmp_path):
    plain = pd.DataFrame(rows(None)).drop(columns="definition")
    log.record({}, tmp_path, fidelity=plain)
    stored = log.load("fidelity", tmp_path)
    assert stored["definition"].eq(log.DEFINITION).all() and len(stored) == 2


def test_rows_whose_meaning_changed_are_left_out_and_counted(tmp_path):
    log.append("fidelity", rows(None, 3), tmp_path, "1")
    log.append("fidelity", rows(log.DEFINITION), tmp_path, "2")
    current, words = log.select_current(log.load("fidelity", tmp_path))
    assert current.groupby(["run_id", "mode"]).size().to_dict() == {
        ("1", "isolated"): 3,
        ("2", "chained"): 1,
        ("2", "isolated"): 1,
    }
    assert words.startswith("3 rows of 1 runs were left out") and "again" in words


def test_rows_of_a_later_definition_are_refused(tmp_path):
    log.append("fidelity", rows(log.DEFINITION + 1), tmp_path, "1")
    current, words = log.select_current(log.load("fidelity", tmp_path))
    assert current.empty and words.startswith("2 rows")


def test_rows_of_the_present_definition_need_no_word(tmp_path):
    log.append("fidelity", rows(log.DEFINITION), tmp_path, "1")
    stored = log.load("fidelity", tmp_path)
    current, words = log.select_current(stored)
    assert current.equals(stored) and words is None


def config(**verdicts) -> dict:
    return {"gates": [{"name": n, "verdict": v} for n, v in verdicts.items()]}


def test_an_older_run_gets_both_verdicts_from_its_gates(tmp_path):
    rows = [
        ("RED", config(program="GREEN", max_kl="RED"), "GREEN", "OVER"),
        ("GREEN", config(program="GREEN", max_kl="GREEN"), "GREEN", "WITHIN"),
        ("RED", config(program="RED", max_kl="RED"), "RED", "not_run"),
        ("GREEN", config(program="GREEN"), "GREEN", "not_run"),
        ("RED", {}, "RED", UNDECIDED),
        ("GREEN", {}, "GREEN", "not_run"),
    ]
    for number, (verdict, stored, _, _) in enumerate(rows):
        row = {"status": "ok", "verdict": verdict, "config": stored}
        log.append("runs", row, tmp_path, str(number))
    runs = log.load("runs", tmp_path)
    assert runs["verdict"].tolist() == [row[2] for row in rows]
    assert runs["quality"].tolist() == [row[3] for row in rows]
    over = log.load("runs", tmp_path, {"quality": "OVER"})
    assert over["run_id"].tolist() == ["0"]
    assert json.loads(over["config"][0])["gates"]


def test_a_run_that_states_its_quality_keeps_it(tmp_path):
    row = {"status": "ok", "verdict": "GREEN", "quality": "OVER"}
    log.append("runs", row | {"config": config(max_kl="WITHIN")}, tmp_path, "1")
    (run,) = log.load("runs", tmp_path).to_dict("records")
    assert (run["verdict"], run["quality"]) == ("GREEN", "OVER")
