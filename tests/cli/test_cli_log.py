"""`workbench log --summary` and `workbench diff` on a log: what they print, and how they end."""

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
        log.append(
            "fidelity", cell | {"error": rate / 100, "cosine": 0.9}, tmp_path, run_id
        )
        row = {
            "compress": compress,
            "bundle_hash": compress,
            "verdict": gate["verdict"],
            "config": {"gates": [gate]},
        }
        log.append("runs", ROW | row, tmp_path, run_id)
    return tmp_path


def run(*arguments) -> str:
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_summary_is_sorted_filtered_and_written_in_every_format(root):
    log_dir = ("--log", root)
    rows = json.loads(
        run("log", "--summary", "--sort", "-tokens_per_s", "--json", *log_dir)
    )
    assert [(r["compress"], r["tokens_per_s"], r["verdict"]) for r in rows] == [
        ("lut4", 20.0, "RED"),
        ("fp16", 10.0, "GREEN"),
    ]
    where = ("--where", "compress == 'fp16'")
    text = {
        f: run("log", "--summary", "--format", f, *where, *log_dir)
        for f in ("md", "csv", "tex")
    }
    assert all("fp16" in t and "lut4" not in t for t in text.values())
    assert text["md"].startswith("| model") and text["csv"].startswith("checkpoint,")
    assert (
        json.loads(run("log", "--sort", "-run_id", "--json", *log_dir))[0]["run_id"]
        == "2-b"
    )


def test_diff_draws_and_names_the_gates_that_changed(root, tmp_path):
    found = json.loads(
        run("diff", "1-a", "2-b", "--log", root, "--out", tmp_path / "d", "--json")
    )
    assert found["largest"] == {"layer": 1, "position": 2, "a": 0.1, "b": 0.2}
    assert [(g["gate"], g["a"], g["b"]) for g in found["gates"]] == [
        ("program", "GREEN", "RED")
    ]
    assert {p.rpartition("/")[2] for p in found["figures"]} >= {
        "d.svg",
        "d.pdf",
        "d.png",
    }
    text = run("diff", "1-a", "1-a", "--log", root, "--out", tmp_path / "d")
    assert "no gate changed its verdict" in text


def test_a_log_without_a_fitting_row_says_so(root, tmp_path):
    where = ("--where", "compress == 'lut6'")
    assert (
        run("log", *where, "--log", root)
        == f"no row of runs in the log at {root} fits\n"
    )
    assert run("log", *where, "--log", root, "--json") == "[]\n"


def test_bad_names_are_one_message(root):
    for arguments, message in (
        (("log", "--summary", "--format", "xlsx"), "--format"),
        (("log", "--sort", "speed"), "--sort"),
        (("diff", "1-a", "none"), "a run in the log"),
    ):
        with pytest.raises(InputError, match=message):
            run(*arguments, "--log", root)
