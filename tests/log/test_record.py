"""A run with its tables, packed logs, and rows that name neither host nor folder."""

import getpass
import json
import socket
from pathlib import Path

import pandas as pd
import pytest

from workbench import log
from workbench.log import runs
from workbench.log.anonymous import anonymize, identifiers
from workbench.log.runs import summary_columns

PLAIN = "12 tok/s, ratio 1/2, T = 1 / 2, and/or, data/tiny-llama, …/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no such file: /Users/jane/models/config.json", "no such file: …/config.json"),
        ("open('/Users/jane doe/my models/x.bin') failed", "open('…/x.bin') failed"),
        ("E5RT: file:///private/var/xy/a.mlmodelc/b.mil:12", "E5RT: …/b.mil:12"),
        ("~/models/llama and ~jane", "…/llama and ~jane"),
        ("path=/opt/x/y, then", "path=…/y, then"),
        (f"{Path.home()}/a/b", "…/b"),
        *((text, text) for text in (PLAIN, "https://a.com/b/c", "tcp://host:8786")),
    ],
)
def test_an_absolute_path_keeps_its_name_only(text, said):
    assert anonymize(text) == said
    assert anonymize(said) == said


def test_what_is_nested_is_reached_and_what_is_no_text_is_left(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-mac.local")
    paths = ["/Users/j/x", {"b": Path("/Users/j/y")}]
    value = {"a": paths, "n": 3, "none": None, "t": ("janes-mac.local: /Users/j/z",)}
    said = {"a": ["…/x", {"b": "…/y"}], "n": 3, "none": None, "t": ("…: …/z",)}
    assert anonymize(value) == said
    assert anonymize("max_seq_len of Jane", names={"jane", "max"}) == "max_seq_len of …"
    monkeypatch.setattr(getpass, "getuser", lambda: {}["no name"])
    assert identifiers() <= {Path.home().name}


def sample(phase: str, value: float, warmup=False) -> dict:
    return {"phase": phase, "value": value, "unit": "ms", "warmup": warmup}


def update(cosine: float | None) -> dict:
    columns = {"layer": 0, "tensor": "update", "mode": "isolated"}
    return columns | {"cosine": cosine}


def test_logits_have_one_layer_in_the_log(tmp_path):
    layers = pd.array([0, None], "Int64")
    rows = pd.DataFrame([update(0.9), update(0.8)]).assign(layer=layers)
    log.record({"command": "x"}, tmp_path, fidelity=rows)
    assert log.load("fidelity", tmp_path)["layer"].tolist() == [0, -1]


def test_a_row_sums_up_its_tables_when_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "coremltools")
    samples = [sample("call", 9.0, True), *(sample("call", v) for v in (1, 2, 4))]
    samples += [sample("tokens_per_s", 500.0)]
    fidelity = [update(0.9), update(0.99), update(0.1) | {"mode": "chained"}]
    run_id = log.record(
        {"command": "x", "config": {"path": "/Users/jane/models/mine"}},
        tmp_path,
        samples=pd.DataFrame(samples),
        fidelity=pd.DataFrame(fidelity),
        layers=None,
    )
    (row,) = log.load("runs", tmp_path).to_dict("records")
    assert (row["run_id"], row["status"], row["command"]) == (run_id, "ok", "x")
    times = {"call_ms": 2.0, "tokens_per_s": 500.0}
    assert times.items() <= row.items()
    assert (row["worst_cosine"], row["worst_update"]) == (0.9, pytest.approx(0.1))
    assert json.loads(row["config"]) == {"path": "…/mine"}
    here = log.environment()
    assert row["software"] == here["software"]
    assert json.loads(row["versions"]) == here["versions"]
    assert len(log.load("samples", tmp_path)) == 5
    assert log.load("layers", tmp_path).empty


def test_what_was_not_measured_or_is_not_finite_has_no_sum():
    columns = summary_columns(fidelity=pd.DataFrame([update(0.9), update(None)]))
    assert pd.isna(columns["worst_update"]) and pd.isna(columns["worst_cosine"])
    columns = summary_columns(samples=pd.DataFrame([sample("call", 1.0)]))
    assert pd.isna(columns["tokens_per_s"])


def test_a_run_is_listed_last(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(runs, "append", lambda table, *_: written.append(table))
    rows = {"layers": pd.DataFrame([{"layer": 0}])}
    log.record({}, tmp_path, **rows, fidelity=pd.DataFrame([update(1.0)]))
    assert written == ["layers", "fidelity", "runs"]


def test_a_run_that_cannot_be_listed_leaves_no_row_in_any_table(tmp_path, monkeypatch):
    append = runs.append

    def fails(table, *arguments):
        if table == "runs":
            raise OSError(28, "No space left on device")
        return append(table, *arguments)

    monkeypatch.setattr(runs, "append", fails)
    with pytest.raises(OSError, match="No space"):
        log.record({}, tmp_path, layers=pd.DataFrame([{"layer": 0}]))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("newest", ["20990101T000000000000Z-ffffffff", "zz", "9" * 30])
def test_a_run_is_the_newest_though_the_clock_was_set_back(tmp_path, newest):
    log.append("runs", {"status": "ok"}, tmp_path, newest)
    first, second = (log.record({}, tmp_path) for _ in range(2))
    assert first < second
    if newest.startswith("2099"):
        assert newest < first
