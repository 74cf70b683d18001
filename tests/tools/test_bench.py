"""The benchmarks: every contestant beside its peers, with every sample; ratios do not
follow the machine's bandwidth."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import tiny
import trained

PATH = Path(__file__).parents[2] / "tools" / "bench.py"
SPEC = importlib.util.spec_from_file_location("bench", PATH)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


@pytest.fixture
def short(monkeypatch):
    """Depths that a small cache has, a quick look at the memory, no other library, no
    further process."""
    monkeypatch.setattr(bench, "DEPTHS", (4, 20))
    monkeypatch.setattr(bench, "CALLS", (2,))
    monkeypatch.setattr(bench, "PROMPT_CALLS", (1, 2))
    monkeypatch.setattr(bench, "bandwidth_meter", lambda: lambda: 1e9)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "apart", lambda function, *given: function(*given))


def whole(rows: list[dict], rounds: int) -> dict:
    """Rows by name and peer, of which each with a peer has a sample of every round."""
    found = {(row["name"], row.get("peer")): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        if "peer" in row:
            assert min(row["samples"] + row["peer_samples"]) > 0
            assert len(row["samples"]) == row["n"]
            assert row["n"] == rounds or row["unit"] == "bytes"
    return found


def test_presets_stand_beside_hugging_face_and_the_bandwidth_of_the_run(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, t_max=4)
        for kind in ("fp16", "int8-tensor")
    }
    found = whole(bench.decode_rows(bundles, checkpoint, 2), 2)
    for kind, bundle in bundles.items():
        for depth in bench.DEPTHS:
            assert found[f"{kind} at {depth}", "HF fp16"]["ratio"] > 0
            assert found[f"{kind} at {depth}", "HF fp32"]["ratio"] > 0
            share = found[f"{kind} at {depth}, share of the bandwidth", None]
            assert share["n"] == 2
        assert found[f"{kind} peak", "stored"]["peer_value"] == bundle.bytes
    note = found["fp16 at 4", "int8-tensor"]["note"]
    assert note == "2 of 2 rounds at like bandwidth"
    # of each of 4 contestants at 2 depths in 2 rounds
    assert found["read bandwidth", None]["samples"] == [1e9] * 16


def test_a_sample_has_the_bandwidths_right_before_and_after_its_steps():
    calls, widths = [], iter([50e9, 80e9])

    def contestant(depth):
        calls.append(f"fill to {depth}")
        return lambda: calls.append("step")

    def meter():
        calls.append("meter")
        return next(widths)

    found, around = bench.rate(contestant, 4, meter=meter)
    assert found > 0 and around == 65e9
    steps = ["step"] * bench.STEPS
    assert calls == ["fill to 4", "step", "meter", *steps, "meter"]


def at_bandwidths(speed: float, stored: int, widths: list[float]) -> list:
    """A sample per bandwidth: steps that use the share `speed` of it, within 1 %."""
    noise = np.random.default_rng(stored).uniform(0.99, 1.01, len(widths))
    return [(speed * w * n / stored, w) for w, n in zip(widths, noise, strict=True)]


def test_the_ratio_of_two_presets_does_not_follow_the_bandwidth():
    slow, fast = 50e9, 84e9
    ours = at_bandwidths(0.5, 300, [slow, slow, fast, slow, fast])
    peer = at_bandwidths(0.9, 600, [fast, fast, fast, slow, slow])
    row = bench.paired("lut4", ours, "int8-tensor", peer)
    assert row["ratio"] == pytest.approx((0.5 / 300) / (0.9 / 600), rel=0.02)
    assert len(row["ratios"]) == 2 and row["n"] == len(row["peer_samples"]) == 5
    # the medians' ratio mixes the states
    assert row["value"] / row["peer_value"] < 0.7 * row["ratio"]


def test_rounds_at_other_bandwidths_give_no_ratio_and_are_counted():
    ours, peer = (
        at_bandwidths(0.5, 300, [5e10] * 2),
        at_bandwidths(0.9, 600, [58e9] * 2),
    )
    row = bench.paired("lut4", ours, "int8-tensor", peer)
    assert row["ratio"] is None and row["ratios"] == []
    end = "(no ratio), 0 of 2 rounds at like bandwidth, n = 2"
    assert bench.line(row).endswith(end)


def test_rows_keep_raw_samples_and_say_how_many_times_better():
    row = bench.row("t", [1.0, 2.0, 9.0], "ms", "p", [4.0, 6.0, 5.0])
    assert row["ratio"] == 2.5 and row["peer_samples"] == [4.0, 6.0, 5.0]
    row = bench.row("r", [30.0], "tok/s", "p", [10.0])
    assert row["ratio"] == 3 and row["samples"] == [30.0] and row["n"] == 1


def test_batches_families_prompts_and_growth_have_their_peers(exports, short):
    qwen2 = exports.checkpoint("qwen2")
    batch = exports.bundle(qwen2, batch=2)
    stacks = {
        "batch 2": (batch, qwen2),
        "lfm2": (
            exports.bundle(exports.checkpoint("lfm2")),
            exports.checkpoint("lfm2"),
        ),
    }
    found = whole(bench.beside_own_cache(stacks, 2), 2)
    assert found.keys() == {("batch 2", "HF fp16"), ("lfm2", "HF fp16")}
    bundles = {S: exports.bundle(qwen2, max_seq_len=S) for S in (80, 96)}
    found = whole(bench.prefill_rows({"fp16": bundles[80]}, qwen2, 1), 1)
    assert len(found) == 2 * 3 and ("prompt, fp16, T = 2", "HF bfloat16") in found
    assert len(whole(bench.growth_rows(bundles, 1), 1)) == 3


def test_a_routed_step_reads_one_expert_of_each_layer(exports, short):
    path = exports.checkpoint("zaya")
    pair = [exports.bundle(path, moe=kind) for kind in ("dense", "routed")]
    found = whole(bench.moe_rows(*pair, 1), 1)
    assert found["layers read by a token", "dense"]["ratio"] > 1
    assert found["routed experts", "dense"]["value"] > 0


def test_an_export_stands_beside_the_disk_and_coremltools(tmp_path, short):
    dims = {
        k: v for k, v in bench.TINY.items() if "expert" not in k and "rout" not in k
    }
    source = tiny.random(tmp_path / "c", "qwen2", **dims)
    found = whole(bench.export_rows(source, tmp_path / "work", "int8-tensor", 1), 1)
    peers = {peer for _, peer in found}
    assert peers == {"disk", "coremltools for each layer", "stored"}
    assert not (tmp_path / "work").exists()


def test_what_is_measured_runs_in_a_process_of_its_own():
    assert bench.apart(os.getpid) != os.getpid()


def test_validation_log_and_reuse_have_their_peers(exports, tmp_path, short):
    path = exports.checkpoint("qwen2")
    found = whole(bench.validate_rows(exports.bundle(path), path, 6, 1), 1)
    assert len(found) == 2
    assert len(whole(bench.log_rows(tmp_path, 20, 1), 1)) == 2
    decoder = trained.decoder(exports, "tiny-llama", precision="declared")
    found = whole(bench.reuse_rows(decoder, [20, 60], 2), 2)
    assert {name for name, _ in found} >= {"warm after 20", "hot after 60"}
    assert found["snapshot, q4", "fp16"]["ratio"] > 2


def test_a_gguf_that_is_written_opens(exports, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    bench.write_gguf(exports.checkpoint("qwen2"), "Q8_0", path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
