"""Rows of fidelity carry the version of what they mean; readers leave out rows that mean
something else and say so."""

import pandas as pd

from workbench import log


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
