"""What single families need: a class of experts that adds nothing, a stream beyond fp16."""

import numpy as np
import tiny
from safetensors.torch import load_file, save_file

from workbench import Decoder
from workbench.models import zaya

DECLARED = 0.999  # cosine in fp16


def test_the_skip_class_adds_nothing(exports, tmp_path, monkeypatch):
    """Older forks return x · p for it; transformers' implementation returns 0."""
    path = tiny.random(tmp_path / "c", "zaya", num_hidden_layers=2)
    weights = load_file(path / "model.safetensors")
    for i in range(2):
        weights[f"model.layers.{i}.mlp.gate.balancing_biases"][-1] = 0.05
    save_file(weights, path / "model.safetensors")
    g = tiny.golden(tiny.hf(path), tiny.prompt(109, 23))

    def also_x(self, x, probabilities, scores, dense=zaya.Mixture.dense):
        skip = (scores.argmax(1, keepdim=True) == self.experts.count).to(x.dtype)
        return dense(self, x, probabilities, scores) + x * skip * probabilities[:, -1:]

    sound = tiny.chained(exports.decoder(path), g.ids, [4])
    monkeypatch.setattr(zaya.Mixture, "dense", also_x)
    forked = tiny.chained(exports.decoder(path, layers_per_shard=2), g.ids, [4])
    assert (
        tiny.relative(sound, g.logits) < 3e-6 < 1e-3 < tiny.relative(forked, g.logits)
    )


def test_a_stream_that_outgrows_fp16_is_scaled_and_exact(exports, tmp_path):
    """Peaks of 61,040 (1B) and 292,969 (4B) are reported for Gemma 3; fp16 ends at 65,504."""
    path = tiny.random(tmp_path / "c", "gemma3_text")
    weights = load_file(path / "model.safetensors")
    for i in range(2):
        weights[f"model.layers.{i}.post_feedforward_layernorm.weight"][7] = 30_000
    save_file(weights, path / "model.safetensors")
    g = tiny.golden(tiny.hf(path), tiny.prompt(107, 12))
    assert np.abs(g.outputs[1]).max() > 65504
    bundle = exports.bundle(path)
    exponent = bundle.manifest.residual_exponent
    assert exponent >= 2 and bundle.manifest.embedding.scale == 64**0.5 * 2.0**-exponent
    exact, declared = (
        Decoder(bundle, "portable", precision, fast=True)
        for precision in ("exact", "declared")
    )
    assert tiny.relative(tiny.chained(exact, g.ids, [4]), g.logits) < 3e-6
    assert tiny.cosine(tiny.chained(declared, g.ids, [4]), g.logits) > DECLARED
    hidden = declared.advance(declared.fresh(), [g.ids[:4]])[0][0].T * 2.0**exponent
    assert tiny.cosine(hidden, g.outputs[-1, :4]) > DECLARED
