"""Faults of layers, weights and the decode loop: see `faults`."""

import dataclasses

import numpy as np
import torch
from faults import altered, changed, constant, fault, replace, steps, wrap

# Attention


@fault("program")
def heads_and_tokens_permuted_in_the_output(decoder):
    # experiment 26: [B, H, T, D] reshaped without the transpose, invisible at T = 1
    step = [s for s in steps(decoder, 0, "transpose", "self_attn")][-1]
    (_, declared), *_ = step.op.outputs
    step.op = dataclasses.replace(step.op, kind="reshape")
    step.constants = {"shape": [-1 if n is None else n for n in declared.shape]}
    step.function = lambda x, shape: x.reshape(shape)


altered("attention_of_one_layer_removed", 2, "conv", "o_proj", after=torch.zeros_like)


@fault("program")
def query_heads_given_to_the_wrong_group(decoder):
    heads, groups = decoder.manifest.dims.H, decoder.manifest.dims.H_kv
    order = torch.arange(heads).reshape(groups, -1).T.reshape(-1)
    D = decoder.manifest.dims.D
    rows = torch.cat([torch.arange(D) + h * D for h in order])
    constant(decoder, 1, "self_attn.q_proj.weight", lambda w: w[rows])


@fault("program")
def score_scale_forgotten(decoder):
    for step in steps(decoder, 3, "mul", "self_attn"):
        if "y" in step.constants and step.constants["y"].numel() == 1:
            step.constants["y"] = torch.ones_like(step.constants["y"])


@fault("program")
def softmax_over_the_queries(decoder):
    steps(decoder, 0, "softmax")[0].constants["axis"] = -2


@fault("program")
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


# Weights


@fault("program")
def one_tensor_of_another_layer(decoder):
    other = decoder.layers[3].executable
    name = decoder.layers[3].shard.weights["model.layers.3.mlp.down_proj.weight"]
    constant(
        decoder, 0, "mlp.down_proj.weight", lambda w: other.constants[name].clone()
    )


@fault("program")
def two_shards_swapped(decoder):
    a, b = decoder.layers[1], decoder.layers[2]
    a.executables, b.executables = b.executables, a.executables


@fault("program")
def gate_and_up_exchanged(decoder):
    kept = {}
    constant(decoder, 1, "mlp.gate_proj.weight", lambda w: kept.setdefault("gate", w))
    model = decoder.layers[1]
    up = model.executable.constants[
        model.shard.weights["model.layers.1.mlp.up_proj.weight"]
    ].clone()
    constant(decoder, 1, "mlp.up_proj.weight", lambda w: kept["gate"].clone())
    constant(decoder, 1, "mlp.gate_proj.weight", lambda w: up)


changed("norm_weight_lost", 2, "post_attention_layernorm.weight", torch.ones_like)


@fault("program")
def weights_scaled_along_the_wrong_axis(decoder):
    # per-channel scales applied to inputs instead of outputs
    def wrong(w):
        scale = w.abs().amax(dim=(1, 2, 3), keepdim=True)
        return (
            w
            / scale
            * scale.mean()
            * scale.flatten()[: w.shape[1]].reshape(1, -1, 1, 1)
            / scale.mean()
        )

    constant(decoder, 0, "self_attn.o_proj.weight", wrong)


@fault("program")
def weights_quantized_to_three_bits(decoder):
    def coarse(w):
        step = w.abs().max() / 3
        return (w / step).round() * step

    constant(decoder, 3, "mlp.up_proj.weight", coarse)


@fault("program")
def a_block_of_weights_zeroed(decoder):
    def zero(w):
        w[: w.shape[0] // 8] = 0
        return w

    constant(decoder, 1, "mlp.down_proj.weight", zero)


@fault("program")
def one_weight_is_nan(decoder):
    def poison(w):
        w[0, 0] = float("nan")
        return w

    constant(decoder, 0, "mlp.up_proj.weight", poison)


changed("key_weights_transposed", 2, "self_attn.k_proj.weight", lambda w: w.flip(1))


# MLP and residual


altered("another_activation", 0, "silu", function=torch.nn.functional.gelu)
altered("attention_counted_half", 1, "conv", "o_proj", after=lambda y: y * 0.5)


@fault("program")
def rms_epsilon_of_one(decoder):
    for step in steps(decoder, 1, "real_div", "input_layernorm"):
        if "x" in step.constants:
            step.constants["x"] = torch.ones_like(step.constants["x"])


altered("squares_that_overflow_fp16", 3, "silu", gate="budget", after=lambda y: y * 1e5)


# Head, embedding, decode loop


@fault("program")
def a_slice_of_the_head_damaged(decoder):
    def flipped(weight):
        weight[: len(weight) // 8] = weight[: len(weight) // 8].flip(0)
        return weight

    model = decoder.heads[0]
    replace(model, model.shard.weights["model.embed_tokens.weight"], flipped)


@fault("program")
def embedding_of_the_next_token(decoder):
    embed, V = decoder.bundle.embed, decoder.manifest.dims.V
    decoder.bundle.embed = lambda ids: embed((ids + 1) % V)


@fault("program")
def logits_of_the_position_before(decoder):
    logits = decoder.logits
    decoder.logits = lambda hidden: np.roll(logits(hidden), 1, axis=1)


@fault("program")
def final_norm_left_out(decoder):
    step = [s for s in decoder.heads[0].executable.body.steps if s.op.kind == "mul"][-1]
    wrap(step, before=lambda g: g | {"x": torch.ones_like(g["x"])})


@fault("program", bundle="wide")
def head_slices_in_the_wrong_order(decoder):
    decoder.heads.reverse()


altered(
    "a_sequence_reads_a_thousandth_of_another",
    *(0, "conv", "o_proj"),
    bundle="batch",
    after=lambda y: y + 1e-3 * y.flip(0),
)
