"""Decode speeds: every contestant in one interleaved run, beside its peers, with every sample."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from workbench.benchmarks import bandwidth, decode, llama_cpp, stopwatch
from workbench.cli.bench import _markdown, row_line


@pytest.fixture
def short(monkeypatch):
    """Steps on one core at depths that a small cache has, a fast look at the memory, no other
    library."""
    # a bench gives torch all cores for as long as the process lives, and idle threads spin
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    monkeypatch.setattr(decode, "DEPTHS", (4, 20))
    monkeypatch.setattr(decode, "bandwidth_meter", lambda: lambda: 1e9)
    monkeypatch.setattr(llama_cpp, "available", lambda: False)


def test_presets_stand_beside_hugging_face_and_the_bandwidth_of_the_run(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, t_max=4)
        for kind in ("fp16", "int8-tensor")
    }
    rows = decode.bench_decode(bundles, checkpoint, rounds=2)
    found = {(row["name"], row["peer"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 2 + 2 + 2 * 2 + 1 + 3 * 2
    for kind in bundles:
        for depth in decode.DEPTHS:
            for peer in ("HF fp16", "HF fp32"):
                row = found[f"{kind} at {depth}", peer]
                assert (
                    row["n"] == len(row["peer_samples"]) == 2
                    and min(row["samples"]) > 0
                )
            share = found[f"{kind} at {depth} bandwidth share", None]
            assert share["n"] == 2 and share["bandwidths"] == [1e9, 1e9]
        stored = sum(shard.bytes for shard in bundles[kind].manifest.shards)
        assert found[f"{kind} floor", None]["value"] == 1e9 / stored
        assert (
            found[f"{kind} peak memory", "stored"]["peer_value"] == bundles[kind].bytes
        )
    assert (
        found["fp16 at 4", "int8-tensor"]["note"]
        == "2 of 2 rounds at like bandwidth, 1.0 to 1.0 GB/s"
    )
    # of each of 4 contestants at 2 depths in 2 rounds
    assert found["read bandwidth", None]["samples"] == [1e9] * 16
    table = _markdown(rows).splitlines()
    assert len(table) == 2 + 2 * 2 + 2 * 2 + 1 + 3 * 2
    assert table[2].startswith("| fp16 at 4 | ") and table[2].count("×") == 3


def test_a_sample_has_the_bandwidths_right_before_and_after_its_steps():
    calls = []

    def contestant(depth):
        calls.append(f"fill to {depth}")
        return lambda: calls.append("step")

    def meter():
        calls.append("meter")
        return 50e9 if calls.count("meter") == 1 else 80e9

    rate, around = decode._rate_and_bandwidth(contestant, 4, meter)
    assert rate > 0 and around == 65e9
    steps = ["step"] * decode.STEPS
    assert calls == ["fill to 4", "step", "meter", *steps, "meter"]


def two_states(
    speed: float, stored: int, states: list[float]
) -> list[bandwidth.Sample]:
    """A sample per state: steps that use the share `speed` of its bandwidth, within 1 %."""
    noise = np.random.default_rng(stored).uniform(0.99, 1.01, len(states))
    return [(speed * s * n / stored, s) for s, n in zip(states, noise, strict=True)]


def test_share_and_ratio_do_not_depend_on_the_state_of_the_memory():
    slow, fast = 50e9, 84e9
    ours = two_states(0.5, 300, [slow, slow, fast, slow, fast])
    peer = two_states(0.9, 600, [fast, fast, fast, slow, slow])
    share = bandwidth.share_row("lut4 at 64", ours, 300)
    assert share["unit"] == "%" and share["value"] == pytest.approx(50, rel=0.01)
    assert share["bandwidths"] == [slow, slow, fast, slow, fast]
    row = bandwidth.paired_row("lut4 at 64", ours, "int8-tensor", peer)
    assert row["ratio"] == pytest.approx((0.5 / 300) / (0.9 / 600), rel=0.02)
    assert len(row["ratios"]) == 2 and row["n"] == len(row["peer_samples"]) == 5
    assert row["note"] == "2 of 5 rounds at like bandwidth, 50.0 to 84.0 GB/s"
    # the medians' ratio mixes the states
    assert row["value"] / row["peer_value"] < 0.7 * row["ratio"]


def test_rounds_at_other_bandwidths_give_no_ratio_and_are_counted():
    ours, peer = two_states(0.5, 300, [50e9] * 2), two_states(0.9, 600, [58e9] * 2)
    row = bandwidth.paired_row("lut4 at 64", ours, "int8-tensor", peer)
    note = "0 of 2 rounds at like bandwidth"
    assert row["ratio"] is None and row["ratios"] == [] and row["note"] == note
    rows = [row, bandwidth.bandwidth_row([50e9, 58e9])]
    assert _markdown(rows).splitlines()[2:] == [
        f"| lut4 at 64 | {row['value']:.4g} tok/s | "
        f"int8-tensor {row['peer_value']:.4g} (no ratio, {note}) | 2 |",
        "| read bandwidth | 5.4e+10 B/s | 50.0 to 58.0 GB/s | 2 |",
    ]
    assert row_line(row).endswith(f", ratio –, {note}, n = 2")
    assert row_line(rows[1]).endswith("B/s    50.0 to 58.0 GB/s, n = 2")


def test_batches_and_families_stand_beside_their_own_model(exports, short):
    stacks = {
        family: (
            exports.bundle(exports.checkpoint(family), **options),
            exports.checkpoint(family),
        )
        for family, options in (("qwen2", {"batch": 2}), ("lfm2", {}))
    }
    rows = decode.bench_families(stacks, rounds=2)
    assert [(row["name"], row["peer"], row["n"]) for row in rows] == [
        ("qwen2", "HF fp16", 2),
        ("lfm2", "HF fp16", 2),
    ]
    assert all(min(row["samples"] + row["peer_samples"]) > 0 for row in rows)


def test_an_interrupt_keeps_the_samples_of_those_who_had_their_turn():
    calls = []

    def sample(key, last):
        calls.append(key)
        if len(calls) > last:
            raise KeyboardInterrupt
        return len(calls)

    samplers = {key: lambda key=key: sample(key, 3) for key in "ab"}
    assert stopwatch.in_turn(samplers, 9) == {"a": [1, 3], "b": [2]}
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        stopwatch.in_turn({key: lambda key=key: sample(key, 1) for key in "ab"}, 9)


def test_every_tensor_of_a_checkpoint_has_a_name_in_a_gguf(exports):
    names = []
    for file in exports.checkpoint("qwen2").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += [llama_cpp._name(name) for name in tensors.keys()]
    assert len(set(names)) == len(names) and "blk.1.attn_q.bias" in names
    assert {"token_embd.weight", "output_norm.weight", "blk.0.ffn_down.weight"} <= set(
        names
    )


def test_a_gguf_that_is_written_opens(exports, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    llama_cpp._write(exports.checkpoint("qwen2"), "Q8_0", path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
