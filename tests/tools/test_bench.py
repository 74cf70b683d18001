"""The benchmarks time every contestant beside its peers and keep every sample."""

import os
import statistics

import bench
import pytest

pytestmark = pytest.mark.wide


@pytest.fixture
def short(monkeypatch):
    """Sets depths that fit a small cache, without other libraries and child processes."""
    monkeypatch.setattr(bench, "DEPTHS", (4, 20))
    monkeypatch.setattr(bench, "PROMPT_CALLS", (1, 2))
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(
        bench, "run_in_process", lambda function, *arguments: function(*arguments)
    )


def whole(rows: list[dict], rounds: int) -> dict:
    """Returns rows by name, after checks that each has a sample of every round and the median."""
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert min(row["samples"]) > 0 and len(row["samples"]) == rounds
        assert row["median"] == statistics.median(row["samples"])
    return by_name


@pytest.mark.slow("three models of Hugging Face and two bundles decode")
def test_presets_and_prompts_stand_beside_hugging_face(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, tokens="1-4")
        for kind in ("fp16", "int8-tensor")
    }
    rows = whole(bench.decode_rows(bundles, checkpoint, 2), 2)
    names = *bundles, "HF float16", "HF float32", "HF bfloat16"
    assert rows.keys() == {f"{name} at {n}" for name in names for n in bench.DEPTHS}
    rows = whole(bench.prompt_rows(bundles, checkpoint, 1), 1)
    assert len(rows) == 2 * 2 + 3 and {"fp16, T = 2", "HF bfloat16"} <= rows.keys()


@pytest.mark.slow("exports with the workbench and with coremltools")
def test_an_export_stands_beside_coremltools_own(exports, tmp_path, short):
    source = exports.checkpoint("qwen2", num_hidden_layers=1)
    rows = bench.export_rows(source, tmp_path / "work", "int8-tensor", 1)
    assert len(whole(rows, 1)) == 4
    assert not (tmp_path / "work").exists()


def test_a_rate_is_tokens_over_their_time(monkeypatch):
    """One step of eight is slow, which a median of the steps would hide."""
    times = iter([0.1] * 7 + [1.3])
    monkeypatch.setattr(bench, "seconds", lambda step: next(times))
    contestant = lambda: None, lambda ids: None
    assert bench.decode_rate(4, contestant) == pytest.approx(8 / 2.0)


def test_validation_and_log_have_their_peers(exports, tmp_path, short):
    path = exports.checkpoint("qwen2")
    rows = whole(bench.validate_rows(exports.bundle(path), path, 6, 1), 1)
    assert len(rows) == 3
    assert whole(bench.log_rows(tmp_path, 1, 20), 1).keys() == {"load", "pandas"}


def test_what_is_measured_runs_in_a_process_of_its_own():
    assert bench.run_in_process(os.getpid) != os.getpid()
