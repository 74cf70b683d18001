"""ZAYA1 at the dimensions of the 8B checkpoint's layers."""

import pytest
import tiny

FULL = {
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "moe_intermediate_size": 2048,
    "router_hidden_size": 256,
    "num_hidden_layers": 1,
    "vocab_size": 1009,
}


@pytest.mark.wide
@pytest.mark.slow("writes and runs a gigabyte of weights")
def test_a_layer_of_full_size_decodes_as_hugging_face(tmp_path):
    exports = tiny.Exports(tmp_path)  # a gigabyte: not kept for the session
    checkpoint = exports.checkpoint("zaya", **FULL)
    g = exports.golden(checkpoint, 9)
    exports.models.clear()
    exact, declared = (
        exports.decoder(checkpoint, precision) for precision in ("exact", "declared")
    )
    for size in (1, 2, 3, 4):
        assert tiny.logits_error(exact, g, size, width=4) < 1e-5
    assert tiny.logits_error(declared, g, 4) < 1.5e-2
