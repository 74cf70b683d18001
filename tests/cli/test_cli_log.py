"""`workbench log` and `sweep`: the table, two runs side by side, packing, a bundle without a
grid."""

import re
from itertools import product

import pytest
from in_process import cli, invoke

from workbench import log

ROW = {"status": "ok", "checkpoint": "tiny", "checkpoint_hash": "c"}
ROW |= {"runtime": "portable", "machine": "x"}


@pytest.fixture
def root(tmp_path):
    """A log of two runs: fp16 is slow and GREEN, lut4 fast and RED."""
    for run_id, compress, rate, verdict in (
        ("1-a", "fp16", 10.0, "GREEN"),
        ("2-b", "lut4", 20.0, "RED"),
    ):
        sample = {"phase": "tokens_per_s", "unit": "tok/s", "n_gen": 8, "T": 1}
        log.append("samples", sample | {"value": rate}, tmp_path, run_id)
        gate = {"name": "program", "verdict": verdict, "value": rate}
        row = {"compress": compress, "bundle_hash": compress, "verdict": verdict}
        row |= {"config": {"gates": [gate]}, "tokens_per_s": rate, "values": compress}
        log.append("runs", ROW | row, tmp_path, run_id)
    return tmp_path


def run(*arguments) -> str:
    return cli(*arguments, raises=True).stdout


def test_the_table_is_sorted_filtered_and_at_most_a_hundred_columns_wide(root):
    log_dir = ("--log", root)
    rows = invoke("log", "--sort", "-tokens_per_s", *log_dir)
    assert [(r["compress"], r["verdict"]) for r in rows] == [
        ("lut4", "RED"),
        ("fp16", "GREEN"),
    ]
    text = run("log", *log_dir)
    assert "checkpoint tiny" in text and max(map(len, text.splitlines())) <= 100
    assert "slowest" not in text  # of one run
    *_, before, last = text.splitlines()
    assert before.split()[:2] == ["a", "fp16"] and last.split()[:2] == ["b", "lut4"]
    assert "lut4" not in run("log", "--where", "compress == 'fp16'", *log_dir)
    rows = invoke("log", "--rows", "--sort", "-run_id", *log_dir)
    assert rows[0]["run_id"] == "2-b" and rows[0]["checkpoint_hash"] == "c"
    nothing = ("log", "--where", "compress == 'lut6'", *log_dir)
    assert f"no run of the log at {root} fits" in run(*nothing)
    assert run(*nothing, "--json") == "[]\n"


def test_two_runs_side_by_side_name_gates_that_changed(root):
    comparison = invoke("log", "compare", "a", "b", "--log", root)
    assert comparison["changed_gates"] == [
        {"gate": "program", "a": "GREEN", "b": "RED"}
    ]
    assert comparison.keys() > {"settings", "measures", "alike"}
    text = run("log", "compare", "a", "b", "--log", root)
    lines = [line.split() for line in text.splitlines()]
    assert ["compress", "fp16", "lut4"] in lines
    assert ["program", "GREEN", "RED"] in lines


def test_a_bundle_is_swept_without_a_grid_and_ends_with_the_table(
    exports, tmp_path, calls_here
):
    bundle = exports.bundle("llama")
    options = "--T", "1,2", "--depth", "4", "-r", "2", "--log", tmp_path
    output = run("sweep", bundle.root, *options)
    assert re.search(r"cells +4\nmeasured now +4", output) and "tok/s" in output
    runs = log.load("runs", tmp_path)
    cells = set(zip(runs["T"], runs["depth"], runs["round"]))
    assert len(runs) == 4 and cells == {*product((1, 2), [4], (0, 1))}
