"""The program's own gate, in every preset: no fault hides behind what compression costs, no sound
bundle is RED."""

import shutil

import pytest
import torch
from circle import wide
from safetensors.torch import load_file, save_file

from workbench.check import program
from workbench.models.checkpoint import Checkpoint

S = 64


def epsilons(decoder):
    """The step of every norm that divides its epsilon, all layers and the head, once each."""
    norms = {}
    for model in (*decoder.layers, *decoder.heads):
        for step in model.executable.body.steps:
            if step.op.kind == "real_div" and isinstance(
                step.constants.get("x"), torch.Tensor
            ):
                norms.setdefault(model.shard.modules[step.outputs[0][0]], step)
    return norms


DRAWS = [
    ("llama", {"compress": "fp16", "layers_per_shard": 2}),
    ("qwen2", {"compress": "int8-tensor", "batch": 3, "layout": "bc1t"}),
    ("qwen3", {"compress": "lut4", "tokens": "4", "kv_write": "slice", "batch": 2}),
    (
        "gemma3_text",
        {
            "compress": "int4-block32",
            "sliding": "ring",
            "batch": 2,
            "layers_per_shard": 3,
        },
    ),
    ("zaya", {"compress": "int8-channel", "batch": 2}),
    ("zaya", {"compress": "fp16", "moe": "routed", "batch": 2}),
    ("llama", {"compress": "lut6", "max_seq_len": 5, "tokens": "1-2"}),
]


@pytest.mark.parametrize(
    "family, options",
    [DRAWS[0], DRAWS[3], *(wide(*draw) for draw in DRAWS[1:3] + DRAWS[4:])],
)
def test_sound_bundles_are_green_with_room(exports, family, options):
    path = exports.checkpoint(family)
    decoder = exports.decoder(path, **{"max_seq_len": S} | options)
    errors = program.program_errors(decoder, Checkpoint(path))
    assert errors["ratio"].max() < program.LIMIT / 4
    last = errors.groupby("seq")["position"].max()
    assert last[0] == decoder.options.max_seq_len - 1
    B = decoder.options.batch
    assert len(set(last)) == (1 if options.get("kv_write") == "slice" else B)


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("family, options", [DRAWS[2], DRAWS[3], DRAWS[5]])
def test_every_epsilon_of_every_norm_is_seen(exports, family, options):
    """Ten times as large, and left out; Gemma has six norms a layer. What ZAYA's router norm reads
    has biases, which no scaled input makes small: there a hundred times the epsilon is what
    shows."""
    path = exports.checkpoint(family)
    decoder = exports.decoder(path, **{"max_seq_len": S} | options)
    norms = epsilons(decoder)
    assert len(norms) > 8
    for number, (name, step) in enumerate(norms.items()):
        value = step.constants["x"]
        biased = name.endswith("router_mlp.norm")
        step.constants["x"] = value * (100 if biased else 10 if number % 2 else 0)
        errors = program.program_errors(decoder, Checkpoint(path))
        assert errors["ratio"].max() > program.LIMIT * (1 if biased else 3), name
        step.constants["x"] = value


def test_scores_that_pass_the_mask_are_red(exports):
    path = exports.root / "biased"
    if not path.exists():
        shutil.copytree(exports.checkpoint("qwen2"), path)
        weights = load_file(path / "model.safetensors")
        for name in ("q_proj", "k_proj"):
            weights[f"model.layers.1.self_attn.{name}.bias"][:] = (
                200.0 if name == "q_proj" else -200.0
            )
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    decoder = exports.decoder(path, max_seq_len=S)
    gate = program.program_gate(decoder, Checkpoint(path))
    assert gate.verdict == "RED" and "layer 1" in gate.reason
