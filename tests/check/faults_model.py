"""Faults of layers, weights and the decode loop: see `faults`."""

import dataclasses

import numpy as np
import torch
from faults import constant, function, held, replace, result, scalars, steps, wrap
from registry import in_memory

# Attention


@in_memory("program")
def heads_and_tokens_permuted_in_the_output(decoder):
    # experiment 26: [B, H, T, D] reshaped without the transpose, invisible at T = 1
    step = steps(decoder, 0, "transpose", "self_attn")[-1]
    (_, declared), *_ = step.op.outputs
    step.op = dataclasses.replace(step.op, kind="reshape")
    step.constants = {"shape": [-1 if n is None else n for n in declared.shape]}
    step.function = lambda x, shape: x.reshape(shape)


@in_memory("program")
def query_heads_given_to_the_wrong_group(decoder):
    dims = decoder.manifest.dims
    order = torch.arange(dims.H).reshape(dims.H_kv, -1).T.reshape(-1)
    rows = torch.cat([torch.arange(dims.D) + head * dims.D for head in order])
    constant(decoder, 1, "self_attn.q_proj.weight", lambda w: w[rows])


@in_memory("program")
def softmax_over_the_queries(decoder):
    steps(decoder, 0, "softmax")[0].constants["axis"] = -2


@in_memory("program")
def attention_reads_the_cache_before_the_write(decoder):
    # the current token's own row is missing from what it attends to
    before = {}

    def remember(input):
        before[input] = input.value
        return input.value

    names = set()
    for step in steps(decoder, 1, "read_state"):
        name = step.operands[0][1]
        step.function = (lambda input: before[input]) if name in names else remember
        names.add(name)


# Steps of layers

in_memory(
    "program",
    attention_of_one_layer_removed=(2, "conv", "o_proj", torch.zeros_like),
    attention_counted_half=(1, "conv", "o_proj", lambda y: y * 0.5),
)(result)
in_memory(
    "program",
    "batch",
    sequences_exchanged_in_one_layer=(1, "conv", "down_proj", lambda y: y.flip(0)),
    a_sequence_reads_a_thousandth_of_another=(
        0,
        "conv",
        "o_proj",
        lambda y: y + 1e-3 * y.flip(0),
    ),
)(result)
in_memory("budget", squares_that_overflow_fp16=(3, "silu", "", lambda y: y * 1e5))(
    result
)
in_memory("program", another_activation=(0, "silu", "", torch.nn.functional.gelu))(
    function
)
in_memory(
    "program",
    score_scale_forgotten=(3, "mul", "self_attn", "y", torch.ones_like),
    rms_epsilon_of_one=(1, "real_div", "input_layernorm", "x", torch.ones_like),
)(scalars)

# Weights


def scaled_along_inputs(w):
    """Scales of output channels applied to input channels."""
    scale = w.abs().amax(dim=(1, 2, 3), keepdim=True)
    return w / scale * scale[: w.shape[1]].reshape(1, -1, 1, 1)


def coarse(w):
    step = w.abs().max() / 3
    return (w / step).round() * step


def first_rows_zero(w):
    w[: len(w) // 8] = 0
    return w


def poisoned(w):
    w[0, 0] = float("nan")
    return w


in_memory(
    "program",
    norm_weight_lost=(2, "post_attention_layernorm.weight", torch.ones_like),
    weights_scaled_along_the_wrong_axis=(
        0,
        "self_attn.o_proj.weight",
        scaled_along_inputs,
    ),
    weights_quantized_to_three_bits=(3, "mlp.up_proj.weight", coarse),
    a_block_of_weights_zeroed=(1, "mlp.down_proj.weight", first_rows_zero),
    one_weight_is_nan=(0, "mlp.up_proj.weight", poisoned),
    key_weights_transposed=(2, "self_attn.k_proj.weight", lambda w: w.flip(1)),
)(constant)


@in_memory("program")
def one_tensor_of_another_layer(decoder):
    other = held(decoder, 3, "mlp.down_proj.weight")
    constant(decoder, 0, "mlp.down_proj.weight", lambda _: other)


@in_memory("program")
def two_shards_swapped(decoder):
    a, b = decoder.layers[1], decoder.layers[2]
    a.executables, b.executables = b.executables, a.executables


@in_memory("program")
def gate_and_up_exchanged(decoder):
    names = "mlp.gate_proj.weight", "mlp.up_proj.weight"
    gate, up = (held(decoder, 1, name) for name in names)
    for name, other in zip(names, (up, gate)):
        constant(decoder, 1, name, lambda _, other=other: other)


# Head, embedding, decode loop


@in_memory("program")
def a_slice_of_the_head_damaged(decoder):
    def flipped(weight):
        weight[: len(weight) // 8] = weight[: len(weight) // 8].flip(0)
        return weight

    model = decoder.heads[0]
    replace(model, model.shard.weights["model.embed_tokens.weight"], flipped)


@in_memory("program")
def embedding_of_the_next_token(decoder):
    embed, V = decoder.bundle.embed, decoder.manifest.dims.V
    decoder.bundle.embed = lambda ids: embed((ids + 1) % V)


@in_memory("program")
def logits_of_the_position_before(decoder):
    logits = decoder.logits
    decoder.logits = lambda hidden: np.roll(logits(hidden), 1, axis=1)


@in_memory("program")
def final_norm_left_out(decoder):
    step = [s for s in decoder.heads[0].executable.body.steps if s.op.kind == "mul"][-1]
    wrap(step, before=lambda given: given | {"x": torch.ones_like(given["x"])})


@in_memory("program", "wide")
def head_slices_in_the_wrong_order(decoder):
    decoder.heads.reverse()


@in_memory("program", "routed")
def expert_of_the_lowest_score_picked(decoder):
    for model in decoder.layers:
        for step in model.executable.body.steps:
            if step.outputs and step.outputs[0][0] == "router_scores":
                wrap(step, after=torch.neg)
