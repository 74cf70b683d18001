"""Faults of a loaded decoder's layers, weights, head and decode loop."""

import dataclasses

import numpy as np
import torch

from faults.decoders import (
    change_arguments,
    change_result,
    declared_shape,
    edit_result,
    edit_scalar,
    edit_weight,
    find_steps,
    read_weight,
    replace_constant,
    replace_function,
)
from faults.fault import Fault

# Attention


def reshape_instead_of_transposing(decoder, layer):
    # [B, H, T, D] is reshaped without the transpose, which changes nothing at T = 1
    step = find_steps(decoder, layer, "transpose", "self_attn")[-1]
    shape = [-1 if size is None else size for size in declared_shape(step)]
    step.op = dataclasses.replace(step.op, kind="reshape")
    step.constants = {"shape": shape}
    step.function = lambda x, shape: x.reshape(shape)


def regroup_query_heads(decoder, layer):
    dims = decoder.manifest.dims
    order = torch.arange(dims.H).reshape(dims.H_kv, -1).T.reshape(-1)
    rows = torch.cat([torch.arange(dims.D) + head * dims.D for head in order])
    edit_weight("self_attn.q_proj.weight", lambda weight: weight[rows])(decoder, layer)


def normalize_over_queries(decoder, layer):
    find_steps(decoder, layer, "softmax")[0].constants["axis"] = -2


def read_before_writing(decoder, layer):
    """A token does not find its own row in the cache: a later read of a state returns what the
    first read of it returned."""
    before_write = {}

    def read_first(input):
        before_write[input] = input.value
        return input.value

    def read_again(input):
        return before_write[input]

    states = set()
    for step in find_steps(decoder, layer, "read_state"):
        state = step.operands[0].source
        step.function = read_again if state in states else read_first
        states.add(state)


def exchange_sequences(y):
    return y.flip(0)


def add_a_thousandth_of_another_sequence(y):
    return y + 1e-3 * y.flip(0)


# Weights


def scale_along_inputs(weight):
    """Applies the scales of output channels to input channels."""
    scale = weight.abs().amax(dim=(1, 2, 3), keepdim=True)
    return weight / scale * scale[: weight.shape[1]].reshape(1, -1, 1, 1)


def round_to_three_bits(weight):
    step = weight.abs().max() / 3
    return (weight / step).round() * step


def zero_first_rows(weight):
    weight[: len(weight) // 8] = 0
    return weight


def poison(weight):
    weight[0, 0] = float("nan")
    return weight


def use_tensor_of_another_layer(decoder, layer):
    last = len(decoder.layer_shards) - 1
    other_layer = 0 if layer == last else last
    other = read_weight(decoder, other_layer, "mlp.down_proj.weight")
    edit_weight("mlp.down_proj.weight", lambda _: other)(decoder, layer)


def swap_shards(decoder):
    a, b = decoder.layer_shards[1], decoder.layer_shards[2]
    a.executables, b.executables = b.executables, a.executables


def swap_gate_and_up(decoder, layer):
    gate = read_weight(decoder, layer, "mlp.gate_proj.weight")
    up = read_weight(decoder, layer, "mlp.up_proj.weight")
    edit_weight("mlp.gate_proj.weight", lambda _: up)(decoder, layer)
    edit_weight("mlp.up_proj.weight", lambda _: gate)(decoder, layer)


# Head, embedding, decode loop


def damage_head_slice(decoder):
    def change(weight):
        weight[: len(weight) // 8] = weight[: len(weight) // 8].flip(0)
        return weight

    model = decoder.heads[0]
    replace_constant(model, model.shard.weights["model.embed_tokens.weight"], change)


def embed_next_token(decoder):
    embed, V = decoder.bundle.embed, decoder.manifest.dims.V
    decoder.bundle.embed = lambda ids: embed((ids + 1) % V)


def return_previous_logits(decoder):
    run_heads = decoder.run_heads

    def run_and_shift(hidden, hook=None):
        for logits, native in run_heads(hidden, hook):
            yield [np.roll(values, 1, axis=2) for values in logits], native

    decoder.run_heads = run_and_shift


def skip_final_norm(decoder):
    steps = decoder.heads[0].executable.body.steps
    product = [step for step in steps if step.op.kind == "mul"][-1]
    change_arguments(
        product, lambda arguments: arguments | {"x": torch.ones_like(arguments["x"])}
    )


def reverse_head_slices(decoder):
    decoder.heads.reverse()


def pick_lowest_score(decoder):
    for model in decoder.layer_shards:
        for step in model.executable.body.steps:
            if step.outputs and step.outputs[0].name == "router_scores":
                change_result(step, torch.neg)


FAULTS = [
    Fault(
        "heads and tokens permuted in the output",
        gate="program",
        layer=0,
        plant=reshape_instead_of_transposing,
    ),
    Fault(
        "query heads given to the wrong group",
        gate="program",
        layer=1,
        plant=regroup_query_heads,
    ),
    Fault(
        "softmax over the queries",
        gate="program",
        layer=0,
        plant=normalize_over_queries,
    ),
    Fault(
        "attention reads the cache before the write",
        gate="program",
        layer=1,
        plant=read_before_writing,
    ),
    Fault(
        "attention of one layer removed",
        gate="program",
        layer=2,
        plant=edit_result("conv", "o_proj", torch.zeros_like),
    ),
    Fault(
        "attention counted half",
        gate="program",
        layer=1,
        plant=edit_result("conv", "o_proj", lambda y: y * 0.5),
    ),
    Fault(
        "sequences exchanged in one layer",
        gate="program",
        bundle="batch",
        layer=1,
        plant=edit_result("conv", "down_proj", exchange_sequences),
    ),
    Fault(
        "a sequence reads a thousandth of another",
        gate="program",
        bundle="batch",
        layer=0,
        plant=edit_result("conv", "o_proj", add_a_thousandth_of_another_sequence),
    ),
    Fault(
        "squares that overflow fp16",
        gate="budget",
        layer=3,
        plant=edit_result("silu", "", lambda y: y * 1e5),
    ),
    Fault(
        "another activation",
        gate="program",
        layer=0,
        plant=replace_function("silu", "", torch.nn.functional.gelu),
    ),
    Fault(
        "score scale forgotten",
        gate="program",
        layer=3,
        plant=edit_scalar("mul", "self_attn", "y", torch.ones_like),
    ),
    Fault(
        "RMS epsilon of one",
        gate="program",
        layer=1,
        plant=edit_scalar("real_div", "input_layernorm", "x", torch.ones_like),
    ),
    Fault(
        "norm weight lost",
        gate="program",
        layer=2,
        plant=edit_weight("post_attention_layernorm.weight", torch.ones_like),
    ),
    Fault(
        "weights scaled along the wrong axis",
        gate="program",
        layer=0,
        plant=edit_weight("self_attn.o_proj.weight", scale_along_inputs),
    ),
    Fault(
        "weights quantized to three bits",
        gate="program",
        layer=3,
        plant=edit_weight("mlp.up_proj.weight", round_to_three_bits),
    ),
    Fault(
        "a block of weights zeroed",
        gate="program",
        layer=1,
        plant=edit_weight("mlp.down_proj.weight", zero_first_rows),
    ),
    Fault(
        "one weight is NaN",
        gate="program",
        layer=0,
        plant=edit_weight("mlp.up_proj.weight", poison),
    ),
    Fault(
        "input channels of the keys reversed",
        gate="program",
        layer=2,
        plant=edit_weight("self_attn.k_proj.weight", lambda weight: weight.flip(1)),
    ),
    Fault(
        "one tensor of another layer",
        gate="program",
        layer=0,
        plant=use_tensor_of_another_layer,
    ),
    Fault("two shards swapped", gate="program", plant=swap_shards),
    Fault("gate and up exchanged", gate="program", layer=1, plant=swap_gate_and_up),
    Fault("a slice of the head damaged", gate="program", plant=damage_head_slice),
    Fault("embedding of the next token", gate="program", plant=embed_next_token),
    Fault(
        "logits of the position before", gate="program", plant=return_previous_logits
    ),
    Fault("final norm left out", gate="program", plant=skip_final_norm),
    Fault(
        "head slices in the wrong order",
        gate="program",
        bundle="wide",
        plant=reverse_head_slices,
    ),
    Fault(
        "expert of the lowest score picked",
        gate="program",
        bundle="routed",
        plant=pick_lowest_score,
    ),
]
