"""The benchmarks: every contestant beside its peers, with every sample."""

import importlib.util
import os
from pathlib import Path

import pytest
import tiny

pytestmark = pytest.mark.wide
PATH = Path(__file__).parents[2] / "tools" / "bench.py"
SPEC = importlib.util.spec_from_file_location("bench", PATH)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


@pytest.fixture
def short(monkeypatch):
    """Depths that a small cache has, no other library, no further process."""
    monkeypatch.setattr(bench, "DEPTHS", (4, 20))
    monkeypatch.setattr(bench, "PROMPT_CALLS", (1, 2))
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "apart", lambda function, *given: function(*given))


def whole(rows: list[dict], rounds: int) -> dict:
    """Rows by name and peer, each with a sample of every round."""
    found = {(row["name"], row["peer"]): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        assert min(row["samples"] + row["peer_samples"]) > 0
        assert len(row["samples"]) == rounds or row["unit"] == "bytes"
    return found


def test_presets_and_prompts_stand_beside_hugging_face(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, tokens="1-4")
        for kind in ("fp16", "int8-tensor")
    }
    sides = bench.contestants(bundles, checkpoint)
    found = whole(bench.decode_rows(*sides, 2), 2)
    for kind in bundles:
        for depth in bench.DEPTHS:
            assert found[f"{kind} at {depth}", f"HF float16 at {depth}"]["ratio"] > 0
            assert found[f"{kind} at {depth}", f"HF float32 at {depth}"]["ratio"] > 0
    found = whole(bench.prompt_rows(*sides, 1), 1)
    assert len(found) == 2 * 2 * 3 and ("prompt, fp16, T = 2", "HF bfloat16") in found


def test_rows_keep_raw_samples_and_say_how_many_times_better():
    row = bench.row("t", [1.0, 2.0, 9.0], "ms", "p", [4.0, 6.0, 5.0])
    assert row["ratio"] == 2.5 and row["peer_samples"] == [4.0, 6.0, 5.0]
    row = bench.row("r", [30.0], "tok/s", "p", [10.0])
    assert row["ratio"] == 3 and row["samples"] == [30.0]


def test_an_export_stands_beside_coremltools_own(tmp_path, short):
    dims = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    dims |= {"num_key_value_heads": 2, "vocab_size": 64}
    sources = [
        tiny.random(tmp_path / f"c{L}", "qwen2", num_hidden_layers=L, **dims)
        for L in (1, 2)
    ]
    rows = bench.export_rows(*sources, tmp_path / "work", "int8-tensor", 1)
    # of tiny layers it may be below zero
    rows = [row for row in rows if row["name"] != "a further layer"]
    assert len(whole(rows, 1)) == 3
    assert not (tmp_path / "work").exists()


def test_validation_and_log_have_their_peers(exports, tmp_path, short):
    path = exports.checkpoint("qwen2")
    found = whole(bench.validate_rows(exports.bundle(path), path, 6, 1), 1)
    assert len(found) == 2
    assert len(whole(bench.log_rows(tmp_path, 1, 20), 1)) == 2


def test_what_is_measured_runs_in_a_process_of_its_own():
    assert bench.apart(os.getpid) != os.getpid()


def test_a_gguf_that_is_written_opens(exports, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    bench.write_gguf(exports.checkpoint("qwen2"), "Q8_0", path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
