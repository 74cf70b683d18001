"""Runs of before the two verdicts get both, from the gates that they keep."""

import json

from workbench import log
from workbench.log.definitions import UNDECIDED


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
