"""The program's own gate, in every preset: no fault hides behind what compression costs, no sound
bundle is RED."""

import json
import shutil

import numpy as np
import pytest
import torch
from circle import wide
from faults import host, steps, wrap
from safetensors.torch import load_file, save_file

from workbench import Decoder
from workbench.bundle.names import ATTN_MASK
from workbench.check import program
from workbench.check.reach import plan_reach
from workbench.models.checkpoint import Checkpoint

PRESETS = ("fp16", "int8-tensor", "int8-channel", "int4-block32", "lut4")
S = 64


def verdicts(decoder, checkpoint) -> dict[str, str]:
    gate = program.program_gate(decoder, checkpoint, Ts=[1, 4])
    return {gate.name: gate.verdict}


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
    reached = plan_reach(decoder.manifest)
    assert errors["position"].max() == decoder.options.max_seq_len - 1
    assert len(set(reached.starts)) == (
        1 if options.get("kv_write") == "slice" else decoder.options.batch
    )


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
        errors = program.program_errors(decoder, Checkpoint(path), Ts=[4])
        assert errors["ratio"].max() > program.LIMIT * (1 if biased else 3), name
        step.constants["x"] = value


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("compress", ("fp16", "int8-tensor", "lut4"))
def test_a_massive_activation_is_no_fault(
    exports, tiny_llama, tmp_path_factory, compress
):
    path = exports.root / "massive"
    if not path.exists():
        shutil.copytree(tiny_llama.path, path)
        weights = load_file(path / "model.safetensors")
        row = weights["model.embed_tokens.weight"][
            json.loads((path / "config.json").read_text())["bos_token_id"]
        ]
        row[3], row[40] = 1500, -820
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    decoder = exports.decoder(path, compress=compress, max_seq_len=S)
    assert set(verdicts(decoder, Checkpoint(path)).values()) == {"GREEN"}


@pytest.mark.wide
def test_24_random_layers_are_no_fault(exports):
    path = exports.checkpoint("llama", num_hidden_layers=24)
    decoder = exports.decoder(path, compress="int8-tensor", layers_per_shard=4)
    assert set(verdicts(decoder, Checkpoint(path)).values()) == {"GREEN"}


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


def future_left_visible(decoder):
    host(decoder, lambda made, *_: made[ATTN_MASK].fill(0))


def test_a_token_that_changes_the_past_is_red(llama_bundle, tiny_llama):
    decoder = Decoder(llama_bundle, "portable", "exact")
    assert verdicts(decoder, tiny_llama) == {"program": "GREEN"}
    future_left_visible(decoder)
    assert verdicts(decoder, tiny_llama) == {"program": "RED"}


def test_a_sequence_that_reads_another_is_red(exports):
    path = exports.checkpoint("llama")
    decoder = exports.decoder(path, batch=2)
    wrap(steps(decoder, 0, "conv", "o_proj")[0], after=lambda y: y + 1e-3 * y.flip(0))
    assert verdicts(decoder, Checkpoint(path)) == {"program": "RED"}


def last_position_clamped(made, *_):
    made["pos"] = np.minimum(made["pos"], S - 2)


def ring_written_one_row_late(made, *_):
    made["kv_write_mask_local"] = np.roll(made["kv_write_mask_local"], 1, axis=2)


def tail_of_dummy_columns(made, offsets, counts, T):
    tail = np.arange(T) == (T - np.array([2, 1]))[:, None]
    made["tail_select"] = np.float32(np.repeat(tail[None], len(offsets), 0))


@pytest.mark.parametrize(
    "family, options, change",
    [
        ("qwen3", {"kv_write": "slice"}, last_position_clamped),
        ("gemma3_text", {"sliding": "ring"}, ring_written_one_row_late),
        ("zaya", {"tokens": "4"}, tail_of_dummy_columns),
    ],
)
def test_other_addresses_of_the_host_are_red(exports, family, options, change):
    path = exports.checkpoint(family)
    decoder = exports.decoder(path, max_seq_len=S, **options)
    host(decoder, change)
    assert program.program_gate(decoder, Checkpoint(path)).verdict == "RED"


def test_head_slices_in_the_wrong_order_are_red(exports):
    path = exports.checkpoint("llama", vocab_size=16_500)  # two slices
    decoder = exports.decoder(path)
    decoder.heads.reverse()
    gate = program.program_gate(decoder, Checkpoint(path))
    assert gate.verdict == "RED" and "logits" in gate.reason
