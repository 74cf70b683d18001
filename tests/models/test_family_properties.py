"""Properties of single families: ZAYA's class of experts that adds nothing, and Gemma 3's residual
stream beyond fp16."""

import numpy as np
import tiny

from workbench import Decoder
from workbench.check.golden import make_golden
from workbench.models.checkpoint import Checkpoint


def test_the_skip_class_adds_nothing(exports, tmp_path):
    """For this class of experts older forks of ZAYA return x · p; transformers returns 0."""
    path = tiny.random_checkpoint(tmp_path / "c", "zaya", num_hidden_layers=2)
    with tiny.edited_weights(path) as weights:
        for i in range(2):
            weights[f"model.layers.{i}.mlp.gate.balancing_biases"][-1] = 0.05
    g = exports.golden(path, 23)
    assert tiny.logits_error(exports.decoder(path), g, 4) < tiny.EXACT_LIMIT


def test_a_stream_that_outgrows_fp16_is_scaled_and_exact(exports, tmp_path):
    """Peaks of 61,040 (1B) and 292,969 (4B) are reported for Gemma 3; fp16 ends at 65,504."""
    path = tiny.random_checkpoint(tmp_path / "c", "gemma3_text")
    with tiny.edited_weights(path) as weights:
        for i in range(2):
            weights[f"model.layers.{i}.post_feedforward_layernorm.weight"][7] = 30_000
    g = exports.golden(path, 12)
    reference = make_golden(Checkpoint(path), g.ids)
    assert np.abs(reference["hidden.1"]).max() > 65504  # the largest fp16
    declared = Decoder(exports.bundle(path), "portable", fast=True)
    exponent = declared.manifest.residual_exponent
    scale = declared.manifest.embedding.scale
    assert exponent >= 2 and scale == 64**0.5 * 2.0**-exponent
    assert tiny.logits_error(exports.decoder(path), g, 4) < tiny.EXACT_LIMIT
    assert tiny.logits_error(declared, g, 4) < tiny.DECLARED_LIMIT
