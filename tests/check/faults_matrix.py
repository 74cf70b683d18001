"""Faults of layers that keep a matrix, DeltaNet and Mamba 2, and of the attention beside them: see
`faults`."""

from functools import partial

import torch
from faults import altered, changed, fault, host, steps, wrap
from faults_zaya import forget

delta = partial(fault, bundle="qwen3_5")
mamba = partial(fault, bundle="granite")
RECURRENT = 0, 2  # layers


def dummies_have_an_order(decoder):
    def every(made, offsets, counts, T):
        made["order"][:, 0, :, 0] = range(1, T + 1)

    host(decoder, every)


@delta("program")
def dummy_columns_advance_a_matrix(decoder):
    dummies_have_an_order(decoder)


@mamba("program")
def dummy_columns_advance_a_mamba_matrix(decoder):
    dummies_have_an_order(decoder)


@delta("program")
def matrix_not_carried(decoder):
    forget(decoder, "matrix_state", RECURRENT)


@mamba("program")
def matrix_of_mamba_not_carried(decoder):
    forget(decoder, "matrix_state", RECURRENT)


def grow(decoder, module: str) -> None:
    """Turns a layer's decays into growth: the sign of -e^A."""
    for step in steps(decoder, 0, "mul", module):
        if "y" in step.constants and (step.constants["y"] == -1).all():
            step.constants["y"] = -step.constants["y"]


@delta("program")
def sign_of_the_decay_lost(decoder):
    grow(decoder, "linear_attn")


@mamba("program")
def sign_of_mamba_s_decay_lost(decoder):
    grow(decoder, "mamba")


changed("decays_of_other_heads", 2, "linear_attn.A_log", lambda a: a.flip(1), "qwen3_5")


changed("bias_of_the_step_lost", 0, "linear_attn.dt_bias", torch.zeros_like, "qwen3_5")


changed("skip_past_the_matrix_lost", 2, "mamba.D", torch.zeros_like, "granite")


@delta("program")
def gate_before_the_norm(decoder):
    # n · z over the RMS of n / γ · z is the norm of what was gated first
    gamma = decoder.layers[0].executable.constants[
        decoder.layers[0].shard.weights["model.layers.0.linear_attn.norm.weight"]
    ]

    def gated_first(r):
        return r * torch.rsqrt((r / gamma).square().mean(-1, keepdim=True))

    product = [
        s for s in steps(decoder, 0, "mul", "linear_attn") if s.op.kind == "mul"
    ][-1]
    wrap(product, after=gated_first)


@mamba("program")
def norm_before_the_gate(decoder):
    gates = []
    gate = [s for s in steps(decoder, 0, "mul", "mamba")][-1]

    def without(arguments):
        gates.append(arguments["y"])
        return arguments | {"y": torch.ones_like(arguments["y"])}

    def gated(arguments):
        gate = torch.cat(gates, 2)  # of every call whose columns are in x
        gates.clear()
        return arguments | {"x": arguments["x"] * gate}

    wrap(gate, before=without)
    wrap(steps(decoder, 0, "conv", "out_proj")[0], before=gated)


@delta("program")
def one_step_too_few_for_eight_tokens(decoder):
    last = []
    products = steps(decoder, 0, "matmul", "linear_attn")
    change = steps(decoder, 0, "sub", "linear_attn")[-1]
    (subtracted,) = [
        name for parameter, name, *_ in change.operands if parameter == "y"
    ]
    (final,) = [s for s in products if s.outputs[0][0] == subtracted]
    wrap(final, before=lambda arguments: last.append(arguments["y"]) or arguments)
    wrap(change, after=lambda _: last.pop())


altered(
    "gate_of_attention_dropped",
    *(1, "sigmoid", "self_attn"),
    bundle="qwen3_5",
    after=torch.ones_like,
)


changed(
    "taps_of_delta_net_in_reverse",
    2,
    "linear_attn.conv1d.weight",
    lambda w: w.flip(-1),
    "qwen3_5",
)


@mamba("program")
def branches_join_the_stream_at_full_size(decoder):
    for step in steps(decoder, 1, "mul", "layers.1"):
        factor = step.constants.get("y")
        if factor is not None and factor.numel() == 1:
            step.constants["y"] = torch.ones_like(factor)
