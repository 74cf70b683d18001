"""Compressed weights: what a bundle says it holds is what it computes with, and only matrices are compressed."""

import numpy as np
import pytest
import tiny
import torch

from workbench import InputError
from workbench.export import export
from workbench.models.checkpoint import Checkpoint

PRESETS = {"int8-tensor": 8, "int8-channel": 8, "int4-block32": 4, "lut4": 4, "lut6": 6}  # bits per weight
SIZE = {"num_hidden_layers": 1, "vocab_size": 320}


def held(decoder) -> dict[str, torch.Tensor]:
    """Checkpoint tensor → its value as the bundle holds it."""
    found = {}
    for model in decoder.layers + decoder.heads:
        for tensor, constant in model.shard.weights.items():
            found[tensor] = torch.from_numpy(model.constant(constant)) - model.shard.offsets.get(tensor, 0.0)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_compressed_bundle_computes_with_the_weights_it_names(exports, preset):
    checkpoint = exports.checkpoint("llama", tie_word_embeddings=False, **SIZE)
    decoder, model, source = exports.decoder(checkpoint, compress=preset), tiny.hf(checkpoint), Checkpoint(checkpoint)
    with torch.no_grad():
        for name, value in held(decoder).items():
            parameter = model.get_parameter(name)
            parameter.copy_(value.reshape(parameter.shape))
            same = torch.equal(parameter, source.tensor(name))
            assert same == ("norm" in name), name
    g = tiny.golden(model, tiny.prompt(320, 10))
    assert tiny.relative(tiny.chained(decoder, g.ids, [4]), g.logits) < 3e-6


@pytest.mark.parametrize("preset", PRESETS)
def test_compression_makes_the_package_smaller(exports, preset):
    checkpoint = exports.checkpoint("llama", tie_word_embeddings=False, **SIZE)
    plain, small = (exports.bundle(checkpoint, compress=c).shards("head")[0].bytes for c in ("fp16", preset))
    weights = 320 * 64
    assert plain - small > 0.8 * weights * (16 - PRESETS[preset]) / 8


def test_routers_kernels_and_vectors_of_zaya_stay_fp16(exports):
    checkpoint = exports.checkpoint("zaya", num_hidden_layers=1)
    source = Checkpoint(checkpoint)
    for name, value in held(exports.decoder(checkpoint, compress="int8-channel")).items():
        original = source.tensor(name)
        kept = ".gate." in name or "conv_qk" in name or original.dim() < 2
        same = np.array_equal(value.reshape(original.shape), original)
        assert same == kept, name


def test_a_width_that_blocks_do_not_divide_is_refused_by_name(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", intermediate_size=80, **SIZE)
    with pytest.raises(InputError, match="down_proj.weight.*80 inputs.*multiple of 32"):
        export(checkpoint, tmp_path / "b", progress=False, max_seq_len=16, compress="int4-block32")
