"""Hybrid families: layers whose state is a matrix, with slow and fast decays, and wide convolutions."""

import pytest
import tiny
import torch

from workbench.ane import placement
from workbench.check.weights import weights_gate
from workbench.models.checkpoint import Checkpoint

FAMILIES = "qwen3_5_text", "granitemoehybrid"


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_slow_and_fast_decays_are_those_of_hugging_face(exports, tmp_path, family):
    """Half-lives from a hundredth of a token to ten thousand, side by side in one layer."""
    path = tiny.random_checkpoint(tmp_path / "c", family)
    values = {"A_log": [-6.0, -2.0, 1.0, 3.0], "dt_bias": [-4.0, -1.0, 0.0, 2.0]}
    with tiny.edited_weights(path) as weights:
        for name, tensor in weights.items():
            if spread := values.get(name.rpartition(".")[2]):
                tensor.copy_(torch.tensor(spread))
    g, exact = exports.golden(path, 30), exports.decoder(path)
    for sizes in ([1], [4, 2]):
        assert tiny.logits_error(exact, g, *sizes) < tiny.MATRIX_EXACT_LIMIT
    declared = exports.decoder(path, "declared")
    assert tiny.logits_error(declared, g, 4) < tiny.MATRIX_DECLARED_LIMIT


WIDE = {
    "lfm2": {"hidden_size": 1024, "conv_bias": True},
    "qwen3_5_text": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "granitemoehybrid": {"mamba_n_heads": 32, "mamba_d_head": 32, "mamba_expand": 16},
}


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("family", WIDE)
def test_a_wide_convolution_is_a_sum_of_shifted_products(exports, family):
    """Lint rule S7 of data/sources/ane_rules.csv: the Neural Engine takes no depthwise convolution
    of 1024 channels."""
    kinds = tiny.DIMS[family]["layer_types"][:2]
    two = {"num_hidden_layers": 2, "layer_types": kinds}
    path = exports.checkpoint(family, **two, **WIDE[family])
    decoder, g = exports.decoder(path), exports.golden(path, 11)
    placed = placement.predicted_placement(decoder.bundle)
    findings = [finding for shard in placed for finding in shard.findings]
    assert "S7" not in {finding.rule.id for finding in findings}
    for sizes in ([1], [4, 3]):
        assert tiny.logits_error(decoder, g, *sizes) < tiny.EXACT_LIMIT
    assert weights_gate(decoder.bundle, Checkpoint(path)).verdict == "GREEN"
