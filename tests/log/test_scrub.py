"""Rows say nothing of the host and the folders they were made in."""

import json
import socket
from pathlib import Path

import pytest

from workbench import log, sweep
from workbench.log.scrub import SOURCE, scrubbed
from workbench.sweep import cell, execute, process, runs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "no such file: /Users/jane/models/llama/config.json",
            "no such file: …/config.json",
        ),
        ("open('/Users/jane doe/my models/x.bin') failed", "open('…/x.bin') failed"),
        (
            "E5RT: file:///private/var/folders/xy/T/a.mlmodelc/model.mil:12",
            "E5RT: …/model.mil:12",
        ),
        ("~/models/llama and ~jane", "…/llama and ~jane"),
        ("path=/opt/x/y, then", "path=…/y, then"),
        (f"{SOURCE}/data/tiny-llama", "data/tiny-llama"),
        (
            f"in '{SOURCE}/workbench/sweep/cell.py', line 3",
            "in 'workbench/sweep/cell.py', line 3",
        ),
        (str(SOURCE), "."),
        (f"{SOURCE}-old/secret/name", "…/name"),
        (f"{Path.home()}/a/b", "…/b"),
        (
            "12 tok/s, ratio 1/2, T = 1 / 2, and/or, data/tiny-llama, …/x",
            "12 tok/s, ratio 1/2, T = 1 / 2, and/or, data/tiny-llama, …/x",
        ),
        (
            "see https://github.com/apple/coremltools/issues/2549",
            "see https://github.com/apple/coremltools/issues/2549",
        ),
        ("tcp://scheduler:8786", "tcp://scheduler:8786"),
    ],
)
def test_an_absolute_path_keeps_its_name_only(text, said):
    assert scrubbed(text) == said
    assert scrubbed(said) == said


def test_what_is_nested_is_reached_and_what_is_no_text_is_left(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-mac.local")
    found = scrubbed(
        {
            "a": ["/Users/j/x", {"b": Path("/Users/j/y")}],
            "n": 3,
            "none": None,
            "t": ("janes-mac.local: /Users/j/z",),
        }
    )
    assert found == {"a": ["…/x", {"b": "…/y"}], "n": 3, "none": None, "t": ("…: …/z",)}


def test_a_failed_cell_s_row_names_neither_host_nor_folder(tmp_path, monkeypatch):
    """As it comes out of `cell.run_cell`, whatever the child wrote on its stderr."""
    grid = sweep.make_grid(
        {
            "checkpoint": str(SOURCE / "data" / "tiny-llama"),
            "export": {"max_seq_len": [16]},
        }
    )
    said = f"exit code 1: FileNotFoundError: '{tmp_path}/private/model.mil' on {socket.gethostname()}"
    monkeypatch.setattr(
        process,
        "call",
        lambda *_, **__: process.Outcome(None, said, (said, "/Users/jane/x")),
    )
    job = execute._job(
        next(sweep.cells(grid)),
        grid,
        execute._source(grid, None, tmp_path),
        tmp_path / "bundles",
    )
    run_id = log.adopt(cell.run_cell(job), tmp_path / "log")
    (row,) = log.load("runs", tmp_path / "log", {"run_id": run_id}).to_dict("records")
    text = json.dumps(row, default=str, ensure_ascii=False)
    for secret in (str(tmp_path), "/Users", str(Path.home()) + "/", str(SOURCE)):
        assert secret not in text, secret
    assert (
        socket.gethostname()
        not in json.dumps({**row, "platform": "", "chip": ""}, default=str)
        or len(socket.gethostname()) < 4
    )
    assert (
        "…/model.mil" in row["reason"]
        and json.loads(row["config"])["measured"]["worker"] == 0
    )


def test_a_notebook_s_parameters_are_scrubbed_too(tmp_path):
    config = {
        "parameters": {"CHECKPOINT": "/Users/jane/models/mine"},
        "conclusion": "It holds.",
    }
    runs.record_run("29", {"command": "notebook 29", "config": config}, root=tmp_path)
    assert json.loads(log.load("runs", tmp_path)["config"][0])["parameters"] == {
        "CHECKPOINT": "…/mine"
    }
