"""Decode speeds: every contestant in one interleaved run, beside its peers, with every sample."""

import pytest
import torch
from safetensors import safe_open

from workbench.benchmarks import decode, llama_cpp, stopwatch
from workbench.cli.bench import _markdown


@pytest.fixture
def short(monkeypatch):
    """Steps on one core at depths that a small cache has, a fast look at the memory, no other
    library."""
    # a bench gives torch all cores for as long as the process lives, and idle threads spin
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    monkeypatch.setattr(decode, "DEPTHS", (4, 20))
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(llama_cpp, "available", lambda: False)


def test_presets_stand_beside_hugging_face_and_the_bandwidth_of_the_run(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, t_max=4)
        for kind in ("fp16", "int4-block32")
    }
    rows = decode.bench_decode(bundles, checkpoint, rounds=2)
    found = {(row["name"], row["peer"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 2 + 1 + 3 * 2
    for kind in bundles:
        for depth in decode.DEPTHS:
            for peer in ("HF fp16", "HF fp32"):
                row = found[f"{kind} at {depth}", peer]
                assert (
                    row["n"] == len(row["peer_samples"]) == 2
                    and min(row["samples"]) > 0
                )
        stored = sum(shard.bytes for shard in bundles[kind].manifest.shards)
        assert found[f"{kind} floor", None]["value"] == 1e9 / stored
        assert (
            found[f"{kind} peak memory", "stored"]["peer_value"] == bundles[kind].bytes
        )
    assert found["read bandwidth", None]["samples"] == [1e9, 1e9]
    table = _markdown(rows).splitlines()
    assert len(table) == 2 + 2 * 2 + 1 + 3 * 2
    assert table[2].startswith("| fp16 at 4 | ") and table[2].count("×") == 2


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
