"""The program's own gate: no fault hides behind what compression costs. test_faults has sound
bundles, which are GREEN."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tiny import edited_weights

from workbench.bundle import Options
from workbench.check.program import LIMIT, program_gate, program_unit
from workbench.check.stretches import plan_positions
from workbench.models.checkpoint import Checkpoint

DRAWS = [
    ("qwen3", {"compress": "lut6-g16", "tokens": "4", "kv_write": "slice", "batch": 2}),
    (
        "gemma3_text",
        {"compress": "int4-block32", "sliding": "ring", "layers_per_shard": 3},
    ),
    ("zaya", {"compress": "fp16", "moe": "routed", "batch": 2}),
]


def find_epsilon_steps(decoder):
    """Path of a norm's module, in a layer or the head → the step whose operand `x` is a factor of
    the norm's epsilon."""
    norms = {}
    for model in (*decoder.layer_shards, *decoder.heads):
        for step in model.executable.body.steps:
            value = step.constants.get("x")
            if step.op.kind == "real_div" and isinstance(value, torch.Tensor):
                norms.setdefault(model.shard.modules[step.outputs[0].name], step)
    return norms


@pytest.mark.slow("asks the gate once for each norm")
@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("family, options", DRAWS)
def test_every_epsilon_of_every_norm_is_seen(exports, family, options):
    """Epsilons in turn are left out and made 10 times as large; Gemma has six norms a layer. ZAYA's
    router norm reads a sum with biases, which stay large where inputs are small, so that only 100
    times its epsilon shows."""
    checkpoint = Checkpoint(exports.checkpoint(family))
    decoder = exports.decoder(checkpoint.path, max_seq_len=64, **options)
    assert program_gate(decoder, checkpoint).verdict == "GREEN"
    norms = find_epsilon_steps(decoder)
    assert len(norms) > 8
    for number, (name, step) in enumerate(norms.items()):
        value = step.constants["x"]
        if name.endswith("router_mlp.norm"):
            factor, least_ratio = 100, 1
        else:
            factor, least_ratio = (10 if number % 2 else 0), 3
        step.constants["x"] = value * factor
        gate = program_gate(decoder, checkpoint)
        assert gate.value > least_ratio * gate.threshold, name
        step.constants["x"] = value


def test_scores_that_pass_the_mask_are_red(exports, tmp_path):
    path = shutil.copytree(exports.checkpoint("qwen2"), tmp_path / "biased")
    with edited_weights(path) as weights:
        for name, bias in (("q_proj", 200.0), ("k_proj", -200.0)):
            weights[f"model.layers.1.self_attn.{name}.bias"][:] = bias
    decoder = exports.decoder(path, max_seq_len=64)
    gate = program_gate(decoder, Checkpoint(path))
    assert gate.verdict == "RED" and "layer 1" in gate.reason


def test_what_moves_the_stream_adds_to_what_an_error_is_held_against():
    size = np.array([1.0, 2])
    unit = program_unit(64)
    assert (unit(size, size) > unit(0 * size, size)).all()
    assert (unit(0 * size, size) >= size).all()
    # longer sums differ more
    assert (program_unit(4096)(size, size) > unit(size, size)).all()


@pytest.mark.parametrize("C", [64, 576, 4096])
def test_sums_in_another_order_stay_within_what_one_step_of_their_terms_explains(C):
    """Sums of C products, their terms added one after another, followed by a function that
    makes a difference 100 times as large."""
    rng = np.random.default_rng(C)
    x = np.float32(rng.standard_normal(C))
    matrix = np.float32(rng.standard_normal((64, C)))
    amplification = 100

    def amplified(sums):
        return np.float64(sums) * amplification - (amplification - 1) * exact

    exact = np.float64(matrix) @ np.float64(x)
    sequential = np.cumsum(matrix * x, axis=1, dtype=np.float32)[:, -1]
    nudged = np.float64(matrix) @ (x * (1 + rng.choice([-1, 1], C) * 2.0**-23))
    perturbed = np.sqrt(np.mean((amplified(nudged) - exact) ** 2, keepdims=True))
    size = np.sqrt(np.mean(exact**2, keepdims=True))
    distance = np.sqrt(np.mean((amplified(sequential) - exact) ** 2, keepdims=True))
    ratio = distance / program_unit(C)(perturbed, size)
    assert ratio < LIMIT < distance / size


@given(integers(1, 300), integers(1, 300), integers(1, 3), sampled_from("-,"))
def test_a_call_of_t_max_tokens_is_among_the_computed_positions(a, b, batch, kind):
    T, S = sorted((a, b))
    tokens = f"1{kind}{T}" if T > 1 else "1"
    options = Options(max_seq_len=S, tokens=tokens, batch=batch)
    sizes = plan_positions(SimpleNamespace(options=options))
    assert max(sizes.start, sizes.end) >= T
    assert sizes.start <= min(sizes.end_starts)
    assert max(sizes.end_starts) + sizes.end == S
