"""Shards written from the program of their shape are the bytes that converting them
gives, in every family and preset."""

from collections import Counter

import pytest
import tiny
import torch
from conversions import contents, conversions, files, small
from safetensors.torch import load_file, save_file

from workbench import Decoder
from workbench.bundle import PRESETS
from workbench.export import shards

FOUR = {"num_hidden_layers": 4}
ALTERNATING = FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2}
FEW_EXPERTS = {"num_experts": 2, "num_hidden_layers": 2}
MATRIX = [
    (family, {}, {"compress": preset, "kv_write": write, "layout": layout})
    for family in tiny.DIMS
    for preset in PRESETS
    for write in ("mask", "slice")
    for layout in ("bct1", "bc1t")
]
OTHERS = [
    ("llama", {"tie_word_embeddings": False}, {"compress": "int8-tensor"}),
    ("llama", {}, {"compress": "int8-tensor", "tokens": "1,2,4", "kv_write": "slice"}),
    ("llama", {"intermediate_size": 256}, {"compress": "lut4", "tokens": "1,4"}),
    ("qwen3", FOUR, {"compress": "int4-block32", "layers_per_shard": 2}),
    ("gemma3_text", ALTERNATING, {"compress": "int8-channel", "sliding": "ring"}),
    (
        "gemma3_text",
        ALTERNATING,
        {"compress": "lut4", "sliding": "ring", "tokens": "2,3"},
    ),
    ("zaya", FOUR, {"compress": "lut6", "layers_per_shard": 2}),
    ("zaya", FOUR, {"tokens": "1,16", "layers_per_shard": 2}),
    ("zaya", FEW_EXPERTS, {"compress": "int8-tensor", "moe": "routed"}),
    (
        "zaya",
        FEW_EXPERTS,
        {"compress": "int4-block32", "moe": "routed", "tokens": "1,4"},
    ),
]


def templates(bundle) -> dict[str, str]:
    """Shard → the shard whose shape was converted for it."""
    return {shard.name: shard.template for shard in bundle.manifest.shards}


def label(value) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.mark.slow("every shard is converted by itself, beside its template")
@pytest.mark.matrix(3, wide=8)
@pytest.mark.parametrize("family, changed, options", [*OTHERS, *MATRIX], ids=label)
def test_every_shard_is_the_bytes_of_its_conversion(
    exports, tmp_path, family, changed, options
):
    source = exports.checkpoint(family, **changed)
    made = small(source, tmp_path / "b", **options)
    assert len(set(templates(made).values())) < len(made.manifest.shards)
    assert files(made) == conversions(made, source, tmp_path / "again")
    if "," in options.get("tokens", ""):
        for shard in made.manifest.shards:
            assert ",".join(map(str, shard.functions.values())) == options["tokens"]


def test_a_large_vocabulary_is_cut_into_slices_of_two_shapes(
    exports, tmp_path, monkeypatch
):
    assert shards.HEAD_ROWS == 16_384
    monkeypatch.setattr(shards, "HEAD_ROWS", 64)
    source = exports.checkpoint("llama", vocab_size=2 * 64 + 50, num_hidden_layers=1)
    made = small(source, tmp_path / "b")
    assert templates(made) == {
        "layers_00_00": "layers_00_00",
        "head_00": "head_00",
        "head_01": "head_00",
        "head_02": "head_02",
    }
    assert [head.rows for head in made.shards("head")] == [
        (0, 64),
        (64, 128),
        (128, 178),
    ]
    assert files(made) == conversions(made, source, tmp_path / "again")
    g = tiny.golden(exports.hf(source), [63, 64, 177])
    decoder = Decoder(made, "portable", precision="exact")
    assert tiny.relative(tiny.chained(decoder, g.ids, [3]), g.logits) < 2e-6


def ones(t, at):
    t[f"{at}.input_layernorm.weight"][:] = 1


def no_bias(t, at):
    t[f"{at}.self_attn.k_proj.bias"][:] = 0
    t[f"{at}.self_attn.v_proj.bias"][:] = 0


def equal(t, at):
    t[f"{at}.mlp.up_proj.weight"] = t[f"{at}.mlp.gate_proj.weight"].clone()


def nearly_equal(t, at):
    equal(t, at)
    t[f"{at}.mlp.up_proj.weight"][-1, -1] += 6e-8


def double(t, at):
    t[f"{at}.self_attn.v_proj.weight"] = 2 * t[f"{at}.self_attn.k_proj.weight"]


def tiny_values(t, at):
    t[f"{at}.self_attn.q_proj.weight"][0] = torch.tensor(3e-8)
    t[f"{at}.self_attn.k_proj.bias"][:7] = torch.tensor(-2e-8)


def odd(path, *tricks):
    """A float32 checkpoint of as many layers as tricks, which give them what a converter treats
    specially; None: an ordinary layer."""
    tiny.random(path, "qwen2", num_hidden_layers=len(tricks), dtype="float32")
    tensors = load_file(path / "model.safetensors")
    for layer, trick in enumerate(tricks):
        if trick:
            trick(tensors, f"model.layers.{layer}")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


TRICKS = [None, ones, no_bias, equal, nearly_equal, double, tiny_values]


@pytest.mark.wide
def test_weights_that_a_converter_would_drop_or_merge_are_stored(tmp_path):
    """coremltools removes a product with ones and a bias of zeros, and keeps one of two
    equal constants. A shard has the program of its shape all the same: every constant
    that both have holds the same bytes, and what a conversion lacks is dropped or
    merged."""
    checkpoint = odd(tmp_path / "c", *TRICKS)
    made = small(checkpoint, tmp_path / "b", compress="int8-tensor")
    conversions(made, checkpoint, tmp_path / "again")
    kinds = None
    for shard in made.shards("layers"):
        ours, stored = contents(made.package(shard))
        theirs, converted = contents(tmp_path / "again" / shard.path)
        assert kinds in (None, ours)  # one program for all
        kinds = ours
        assert {n: stored[n] for n in converted if n in stored} == {
            n: values for n, values in converted.items() if n in stored
        }
        for name in shard.weights.values():  # all that the manifest names is there
            assert stored[name]
        # a conversion has no operation that the shard lacks
        assert not Counter(theirs) - Counter(ours)
    assert made.manifest.shards[0].files != made.manifest.shards[1].files
