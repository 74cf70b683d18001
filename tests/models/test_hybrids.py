"""Families whose layers keep a matrix: sequences of a batch at different positions, long decays,
fp16."""

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from workbench.ane import placement
from workbench.check.weights import weights_gate
from workbench.models.checkpoint import Checkpoint

FAMILIES = "qwen3_5_text", "granitemoehybrid"


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [{"tokens": "1-8"}, {"layers_per_shard": 3}])
def test_sequences_at_different_positions_are_as_alone(exports, family, chosen):
    checkpoint = exports.checkpoint(family)
    decoder = exports.decoder(checkpoint, batch=3, **chosen)
    V, lengths = decoder.manifest.dims.V, (5, 14, 2)
    goldens = [
        tiny.golden(exports.hf(checkpoint), tiny.prompt(V, n + 3, n)) for n in lengths
    ]
    decoder.begin()
    prompts = [g.ids[:n] for g, n in zip(goldens, lengths, strict=True)]
    logits = [decoder.prefill(prompts)]
    for step in range(3):
        tokens = [g.ids[n + step] for g, n in zip(goldens, lengths, strict=True)]
        tokens[1] = None if step else tokens[1]  # the second sequence waits
        logits.append(decoder.decode_one_token(tokens))
    for seq in (0, 2):
        rows = np.stack([each[seq] for each in logits])
        assert tiny.relative(rows, goldens[seq].logits[lengths[seq] - 1 :]) < 1e-5
    late = decoder.decode_one_token([None, goldens[1].ids[15], None])[1]
    assert tiny.relative(late, goldens[1].logits[15]) < 1e-5


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_slow_and_fast_decays_are_those_of_hugging_face(exports, tmp_path, family):
    """Half-lives from a hundredth of a token to ten thousand, side by side in one layer."""
    path = tiny.random(tmp_path / "c", family)
    weights = load_file(path / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("A_log"):
            value.copy_(torch.tensor([-6.0, -2.0, 1.0, 3.0]))
        if name.endswith("dt_bias"):
            value.copy_(torch.tensor([-4.0, -1.0, 0.0, 2.0]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    g = tiny.golden(tiny.hf(path), tiny.prompt(163, 30))
    for sizes in ([1], [4, 2]):
        assert (
            tiny.relative(tiny.chained(exports.decoder(path), g.ids, sizes), g.logits)
            < 1e-5
        )
    declared = tiny.chained(exports.decoder(path, "declared"), g.ids, [4])
    assert tiny.relative(declared, g.logits) < 3e-2


WIDE = {
    "lfm2": dict(
        hidden_size=1024, conv_bias=True, layer_types=["conv", "full_attention"]
    ),
    "qwen3_5_text": dict(linear_key_head_dim=128, linear_value_head_dim=128),
    "granitemoehybrid": dict(mamba_n_heads=32, mamba_d_head=32, mamba_expand=16),
}


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("family", WIDE)
def test_a_wide_convolution_is_a_sum_of_shifted_products(exports, family):
    """Lint rule S7: the Neural Engine takes no depthwise convolution of 1024 channels."""
    path = exports.checkpoint(
        family,
        **{
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        }
        | WIDE[family],
    )
    decoder = exports.decoder(path)
    placed = placement.predicted_placement(decoder.bundle)
    assert "S7" not in {rule["id"] for each in placed for rule in each.rules}
    golden = tiny.golden(exports.hf(path), tiny.prompt(decoder.manifest.dims.V, 11))
    for sizes in ([1], [4, 3]):
        assert (
            tiny.relative(tiny.chained(decoder, golden.ids, sizes), golden.logits)
            < 3e-6
        )
    assert weights_gate(decoder.bundle, Checkpoint(path)).verdict == "GREEN"
