"""`workbench log`: what it prints of a log and of two of its runs, and how it ends."""

import json

import pytest
from typer.testing import CliRunner

from workbench import log
from workbench.cli.app import app
from workbench.errors import InputError

ROW = {
    "status": "ok",
    "checkpoint": "tiny",
    "checkpoint_hash": "c",
    "runtime": "portable",
}


@pytest.fixture
def root(tmp_path):
    for run_id, compress, rate in (("1-a", "fp16", 10.0), ("2-b", "lut4", 20.0)):
        sample = {
            "phase": "tokens_per_s",
            "unit": "tok/s",
            "n_gen": 8,
            "T": 1,
            "value": rate,
        }
        cell = {
            "tensor": "update",
            "mode": "isolated",
            "layer": 1,
            "position": 2,
            "T": 1,
        }
        gate = {
            "name": "program",
            "verdict": "GREEN" if rate < 15 else "RED",
            "value": rate,
        }
        log.append("samples", sample, tmp_path, run_id)
        more = {"tokens_per_s": rate, "values": compress, "machine": "x"}
        log.append(
            "fidelity", cell | {"error": rate / 100, "cosine": 0.9}, tmp_path, run_id
        )
        row = {
            "compress": compress,
            "bundle_hash": compress,
            "verdict": gate["verdict"],
            "config": {"gates": [gate]},
        }
        log.append("runs", ROW | row | more, tmp_path, run_id)
    return tmp_path


def run(*arguments) -> str:
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_is_sorted_filtered_and_at_most_a_hundred_columns_wide(root):
    log_dir = ("--log", root)
    rows = json.loads(run("log", "--sort", "-tokens_per_s", "--json", *log_dir))
    assert [(r["compress"], r["tokens_per_s"], r["verdict"]) for r in rows] == [
        ("lut4", 20.0, "RED"),
        ("fp16", 10.0, "GREEN"),
    ]
    text = run("log", *log_dir)
    assert "checkpoint tiny" in text and max(map(len, text.splitlines())) <= 100
    *_, before, last = text.splitlines()
    assert before.split()[:2] == ["a", "fp16"] and last.split()[:2] == ["b", "lut4"]
    where = ("--where", "compress == 'fp16'")
    assert "lut4" not in run("log", *where, *log_dir)
    rows = json.loads(run("log", "--rows", "--sort", "-run_id", "--json", *log_dir))
    assert rows[0]["run_id"] == "2-b" and rows[0]["checkpoint_hash"] == "c"


def test_two_runs_side_by_side_name_errors_and_gates_that_changed(root):
    found = json.loads(run("log", "a", "b", "--log", root, "--json"))
    (error,) = found["errors"]
    assert (error["layer"], error["position"]) == (1, 2)
    assert (error["a"], error["b"]) == (0.1, 0.2)
    assert found["gates"] == [{"gate": "program", "a": "GREEN", "b": "RED"}]
    text = run("log", "a", "b", "--log", root)
    assert "compress fp16 lut4" in text and "gate program" in text
    assert "no setting differs" in run("log", "a", "1-a", "--log", root)


def test_a_log_without_a_fitting_row_says_so(root):
    where = ("--where", "compress == 'lut6'")
    found = run("log", *where, "--log", root)
    assert found == f"no run in the log at {root} fits\n"
    assert run("log", *where, "--log", root, "--json") == "[]\n"


def test_a_log_is_packed_and_taken_in_once(root, tmp_path):
    out = tmp_path / "x" / "log.zip"
    assert json.loads(run("log", "--pack", out, "--log", root, "--json"))["runs"] == 2
    for count in (2, 0):
        text = run("log", "--unpack", out, "--log", tmp_path / "other")
        assert text.startswith(f"{count} new runs")


def test_bad_names_are_one_message(root):
    for arguments, message in (
        (("log", "--sort", "speed"), "--sort"),
        (("log", "a"), "two runs"),
        (("log", "a", "none"), "a run in the log"),
    ):
        with pytest.raises(InputError, match=message):
            run(*arguments, "--log", root)
