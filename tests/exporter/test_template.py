"""Shards written from the program of their shape are the bytes that converting them
gives, in every family and preset."""

from itertools import product

import pytest
import tiny
import torch
from circle import wide
from conversions import convert_shards, export_small, list_files

from workbench import Bundle, Decoder
from workbench.bundle import PRESETS
from workbench.bundle.presets import Preset
from workbench.check.program import program_gate
from workbench.check.weights import weights_gate
from workbench.exporter import make_options, read_plan, shards
from workbench.exporter.weights import weight_sources
from workbench.models.checkpoint import Checkpoint

FOUR = {"num_hidden_layers": 4}
ALTERNATING = FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2}
FEW_EXPERTS = {"num_experts": 2, "num_hidden_layers": 2}
CHOICES = product(tiny.DIMS, PRESETS, ("mask", "slice"), ("bct1", "bc1t"))
MATRIX = [
    (
        family,
        tiny.fit_to_blocks(family, {}, preset),
        {"compress": preset, "kv_write": write, "layout": layout},
    )
    for family, preset, write, layout in CHOICES
]
RING = {"compress": "lut6-g16", "sliding": "ring"}
PAIRS = {"layers_per_shard": 2}
OTHERS = [
    ("llama", {"tie_word_embeddings": False}, {"compress": "int8-tensor"}),
    ("llama", {}, {"compress": "int8-tensor", "tokens": "1,2,4", "kv_write": "slice"}),
    ("llama", {"intermediate_size": 256}, {"compress": "lut6-g16", "tokens": "1,4"}),
    ("qwen3", FOUR, PAIRS | {"compress": "int4-block32"}),
    ("gemma3_text", ALTERNATING, RING | {"compress": "int8-channel"}),
    ("gemma3_text", ALTERNATING, RING | {"tokens": "2,3"}),
    ("zaya", FOUR, PAIRS | {"compress": "lut6-g16"}),
    ("zaya", FOUR, PAIRS | {"tokens": "1,16"}),
    ("zaya", FEW_EXPERTS, {"moe": "routed", "compress": "int8-tensor"}),
    ("zaya", FEW_EXPERTS, {"moe": "routed", "tokens": "1,4"}),
]


@pytest.mark.parametrize("family", tiny.DIMS)
def test_tiny_checkpoints_are_wide_enough_for_other_blocks(
    monkeypatch, tmp_path, family
):
    """Whoever adds a preset of blocks, as a page of docs says, changes no size in a test."""
    preset = Preset("int4-block64", "integer", 4, "per_block", 64)
    monkeypatch.setitem(PRESETS, preset.name, preset)
    sizes = tiny.fit_to_blocks(family, {}, preset.name)
    source = Checkpoint(tiny.random_checkpoint(tmp_path / "c", family, **sizes))
    options = make_options(compress=preset.name)
    plan = read_plan(source, options)
    # `weight_sources` refuses a matrix that blocks do not divide
    weights = [
        weight
        for spec in shards.specs(plan, options)
        for weight in weight_sources(spec, source, plan, options)
    ]
    assert any(weight.preset == preset for weight in weights)


def assert_bytes_of_conversion(source, folder, **options) -> Bundle:
    """Exports a checkpoint in a folder, and asserts that fewer programs were converted than there are
    shards, and that every shard has the bytes of its own conversion. Returns the bundle."""
    bundle = export_small(source, folder / "b", **options)
    converted = {shard.template for shard in bundle.manifest.shards}
    assert len(converted) < len(bundle.manifest.shards)
    assert list_files(bundle) == convert_shards(bundle, source, folder / "again")
    return bundle


@pytest.mark.slow("every shard is converted by itself, beside its template")
def test_a_second_layer_s_shard_is_the_bytes_of_its_conversion(exports, tmp_path):
    """The smallest model with two layers of one shape, in a preset whose weights are several
    arrays."""
    source = exports.checkpoint("llama")
    assert_bytes_of_conversion(source, tmp_path, compress="lut6-g16")


@pytest.mark.slow("every shard is converted by itself, beside its template")
@pytest.mark.matrix(0, wide=4)
@pytest.mark.parametrize(
    "family, changed, options", [*OTHERS, *MATRIX], ids=tiny.case_id
)
def test_every_shard_is_the_bytes_of_its_conversion(
    exports, tmp_path, family, changed, options
):
    source = exports.checkpoint(family, **changed)
    bundle = assert_bytes_of_conversion(source, tmp_path, **options)
    if "," in options.get("tokens", ""):
        for shard in bundle.manifest.shards:
            assert ",".join(map(str, shard.functions.values())) == options["tokens"]


@pytest.mark.slow("exports a bundle and converts each of its shards again")
def test_a_large_vocabulary_is_cut_into_slices_of_two_shapes(
    exports, tmp_path, monkeypatch
):
    assert shards.HEAD_ROWS == 16_384
    monkeypatch.setattr(shards, "HEAD_ROWS", 64)
    source = exports.checkpoint("llama", vocab_size=2 * 64 + 50, num_hidden_layers=1)
    bundle = export_small(source, tmp_path / "b")
    heads = bundle.shards("head")
    assert [head.template for head in heads] == ["head_00", "head_00", "head_02"]
    assert [head.rows for head in heads] == [(0, 64), (64, 128), (128, 178)]
    assert list_files(bundle) == convert_shards(bundle, source, tmp_path / "again")
    g = tiny.golden(exports.hf(source), [63, 64, 177])
    decoder = Decoder(bundle, "portable", precision="exact")
    assert tiny.logits_error(decoder, g, 3) < 2e-6


# Changes of the tensors of one layer; `layer` is the beginning of their names.


def set_norm_to_ones(tensors, layer):
    tensors[f"{layer}.input_layernorm.weight"][:] = 1


def set_biases_to_zero(tensors, layer):
    tensors[f"{layer}.self_attn.k_proj.bias"][:] = 0
    tensors[f"{layer}.self_attn.v_proj.bias"][:] = 0


def make_two_matrices_equal(tensors, layer):
    gate = tensors[f"{layer}.mlp.gate_proj.weight"]
    tensors[f"{layer}.mlp.up_proj.weight"] = gate.clone()


def make_two_matrices_nearly_equal(tensors, layer):
    make_two_matrices_equal(tensors, layer)
    tensors[f"{layer}.mlp.up_proj.weight"][-1, -1] += 6e-8


def make_values_nearly_zero(tensors, layer):
    tensors[f"{layer}.self_attn.q_proj.weight"][0] = torch.tensor(3e-8)
    tensors[f"{layer}.self_attn.k_proj.bias"][:7] = torch.tensor(-2e-8)


# one for each layer of the checkpoint
CHANGES = [
    set_norm_to_ones,
    set_biases_to_zero,
    make_two_matrices_equal,
    make_two_matrices_nearly_equal,
    make_values_nearly_zero,
]


@pytest.mark.parametrize("compress", ["fp16", wide("int8-tensor")])
def test_weights_that_a_converter_would_drop_or_merge_are_stored(
    exports, tmp_path, compress
):
    """coremltools' converter removes a product with ones and a bias of zeros, and merges two equal
    constants. Every shard still has the program of its shape, with every weight."""
    options = {"num_hidden_layers": len(CHANGES), "dtype": "float32"}
    path = tiny.random_checkpoint(tmp_path / "c", "qwen2", **options)
    with tiny.edited_weights(path) as tensors:
        for index, change in enumerate(CHANGES):
            change(tensors, f"model.layers.{index}")
    decoder = exports.decoder(path, compress=compress)
    assert {shard.template for shard in decoder.bundle.shards("layers")} == {
        "layers_00_00"
    }
    assert weights_gate(decoder.bundle, Checkpoint(path)).verdict == "GREEN"
    assert program_gate(decoder, Checkpoint(path)).verdict == "GREEN"


@pytest.mark.slow("programs are converted")
def test_a_conversion_logs_nothing_that_is_harmless(exports, tmp_path, caplog):
    export_small(exports.checkpoint("llama"), tmp_path / "b")
    logged = [record for record in caplog.records if record.name == "coremltools"]
    assert not logged
