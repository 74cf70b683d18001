"""Leaving out any one vector of a layer's parameters is seen: its update falls below the gates.

The modules run as they are traced, without an export, so that each ingredient costs milliseconds.
What is left out is left out here alone.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from workbench import Decoder
from workbench.bundle import Options
from workbench.bundle.names import HIDDEN, ROUTER_STATE, ROUTER_STATE_OUT, X
from workbench.decode import Host
from workbench.export import read_plan, shards
from workbench.models import moe
from workbench.models.checkpoint import Checkpoint

# gates on the cosine of an update, in float32 and in fp16
EXACT, DECLARED = (0.999999, 0.999)
WIDTH = 4  # columns of every call; every second call has one garbage column


class Eager:
    """The layers of a checkpoint as modules, fed like shards of one layer each."""

    def __init__(self, path):
        source, options = Checkpoint(path), Options(max_seq_len=32)
        plan = read_plan(source, options)
        self.specs = [s for s in shards.specs(plan, options) if s.kind == "layers"]
        self.stacks = [tiny.build(s, source, plan, options)[0] for s in self.specs]
        self.host = Host(
            SimpleNamespace(
                options=options, rope=plan.rope, layers=plan.layers, shards=self.specs
            )
        )

    def cosine(self, g: tiny.Golden) -> float:
        """The worst cosine of an update over layers and positions; layers are fed the golden's
        inputs, but hand their own router state on."""
        made = np.zeros_like(g.outputs)
        for stack in self.stacks:
            for buffer in (stack.get_buffer(name) for name in self.specs[0].buffers):
                buffer.zero_()
        for a, b in tiny.tiles(len(g.ids), [WIDTH, WIDTH - 1]):
            io = self.host.inputs(np.array([a]), np.array([b - a]), WIDTH)
            for i, (spec, stack) in enumerate(
                zip(self.specs, self.stacks, strict=True)
            ):
                io[X] = np.full((1, g.inputs.shape[2], WIDTH, 1), 3.0, np.float32)
                io[X][0, :, : b - a, 0] = g.inputs[i, a:b].T
                with torch.no_grad():
                    tensors = stack(
                        *(torch.as_tensor(io[name]) for name in spec.inputs)
                    )
                out = dict(zip(spec.outputs, tensors, strict=True))
                made[i, a:b] = out[HIDDEN][0, :, : b - a, 0].T
                io[ROUTER_STATE] = out.get(ROUTER_STATE_OUT)
        return tiny.cosine(made - g.inputs, g.updates)


@pytest.fixture(scope="module")
def goldens(exports):
    """Family → its layers and a prompt's golden."""
    made = {}

    def get(family):
        path = exports.checkpoint(family)
        if family not in made:
            model = exports.hf(path)
            made[family] = tiny.golden(model, tiny.prompt(model.config.vocab_size, 23))
        return Eager(path), made[family]

    return get


@pytest.mark.parametrize("family", ["zaya", "gemma3_text"])
def test_nothing_left_out_passes_the_exact_gate(goldens, family):
    eager, g = goldens(family)
    assert eager.cosine(g) > EXACT


# Parameters set to what would leave them without effect.
NEUTRAL = {
    "zaya": {
        "input_layernorm.weight": 1,
        "post_attention_layernorm.weight": 1,
        "qk_norm.temp": 1,
        "conv_qk_depthwise.bias": 0,
        "conv_qk_grouped.bias": 0,
        "post_attention_residual_scale.hidden_states_scale": 1,
        "post_attention_residual_scale.hidden_states_bias": 0,
        "post_attention_residual_scale.residual_scale": 1,
        "post_attention_residual_scale.residual_bias": 0,
        "post_mlp_residual_scale.hidden_states_scale": 1,
        "post_mlp_residual_scale.hidden_states_bias": 0,
        "post_mlp_residual_scale.residual_scale": 1,
        "post_mlp_residual_scale.residual_bias": 0,
        "gate.down_proj.bias": 0,
        "gate.router_states_scale": 1,
        "router_mlp.norm.weight": 1,
        "router_mlp.fc1.bias": 0,
        "router_mlp.fc2.bias": 0,
        "gate.balancing_biases": 0,
    },
    "gemma3_text": {
        f"{name}.weight": 1
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "q_norm",
            "k_norm",
        )
    },
}


def leave_out_parameter(eager: Eager, name: str, value: float) -> None:
    found = [
        p
        for stack in eager.stacks
        for n, p in stack.named_parameters()
        if n.endswith(name)
    ]
    assert found
    for parameter in found:
        parameter.data.fill_(value)


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "family, name", [(f, n) for f, names in NEUTRAL.items() for n in names]
)
def test_every_vector_of_parameters_counts(goldens, family, name):
    eager, g = goldens(family)
    leave_out_parameter(eager, name, NEUTRAL[family][name])
    assert eager.cosine(g) < DECLARED


def test_the_skip_class_adds_nothing(exports, tmp_path):
    """Older forks return x · p for it; transformers' implementation returns 0."""
    path = tiny.random(tmp_path / "c", "zaya", num_hidden_layers=2)
    weights = load_file(path / "model.safetensors")
    for i in range(2):
        weights[f"model.layers.{i}.mlp.gate.balancing_biases"][-1] = 0.05
    save_file(weights, path / "model.safetensors")
    g = tiny.golden(tiny.hf(path), tiny.prompt(109, 23))
    eager, skipped = Eager(path), []

    def also_x(original):
        def forward(self, x, probabilities, scores):
            skip = (scores.argmax(1, keepdim=True) == self.experts.count).float()
            skipped.append(float(skip.sum()))
            return (
                original(self, x, probabilities, scores)
                + x * skip * probabilities[:, -1:]
            )

        return forward

    assert eager.cosine(g) > EXACT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.Mixture, "dense", also_x(moe.Mixture.dense))
        assert eager.cosine(g) < DECLARED
    assert 0 < sum(skipped) < 2 * 23


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
