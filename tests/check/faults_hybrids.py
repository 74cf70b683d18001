"""Faults of layers that keep the tail of a convolution or a matrix, DeltaNet and Mamba 2, and of
the attention beside them: see `faults`."""

from functools import partial

import numpy as np
import torch
from faults import (
    constant,
    fed,
    forget,
    held,
    inputs,
    making,
    result,
    scalars,
    steps,
    wrap,
)
from registry import in_memory

lfm2 = partial(in_memory, "program", "lfm2")
delta = partial(in_memory, "program", "qwen3_5")
mamba = partial(in_memory, "program", "granite")
RECURRENT = 0, 2  # layers

# Short convolutions


def last_columns(select):
    every = np.eye(select.shape[2])[-select.shape[1] :]
    select[:, -len(every) :] = every
    return select


def identity(keep):
    return np.broadcast_to(np.eye(keep.shape[1], dtype=np.float32), keep.shape)


def branches_exchanged(w):
    before, behind, x = w.chunk(3)
    return torch.cat([behind, before, x])


lfm2(tail_of_a_convolution_not_carried=(RECURRENT, "conv_state"))(forget)
lfm2(
    tail_ends_one_column_early=("tail_select", lambda select: np.roll(select, -1, 2)),
    dummy_columns_enter_the_tail=("tail_select", last_columns),
)(inputs)
lfm2(old_columns_of_a_tail_stay_where_they_are=(RECURRENT, "tail_keep", identity))(fed)
lfm2(
    what_enters_the_convolution_and_what_gates_it_exchanged=(
        2,
        "conv.in_proj.weight",
        branches_exchanged,
    ),
    taps_of_a_short_convolution_in_reverse=(
        0,
        "conv.conv.weight",
        lambda w: w.flip(-1),
    ),
)(constant)

# Matrices


def every_column(order):
    return np.broadcast_to(np.arange(1, order.shape[2] + 1)[:, None], order.shape)


delta(dummy_columns_advance_a_matrix=("order", every_column))(inputs)
mamba(dummy_columns_advance_a_mamba_matrix=("order", every_column))(inputs)
delta(matrix_not_carried=(RECURRENT, "matrix_state"))(forget)
mamba(matrix_of_mamba_not_carried=(RECURRENT, "matrix_state"))(forget)
# the sign of -e^A
delta(sign_of_the_decay_lost=(0, "mul", "linear_attn", "y", torch.abs))(scalars)
mamba(
    sign_of_mamba_s_decay_lost=(0, "mul", "mamba", "y", torch.abs),
    branches_join_the_stream_at_full_size=(1, "mul", "layers.1", "y", torch.ones_like),
)(scalars)
delta(
    decays_of_other_heads=(2, "linear_attn.A_log", lambda a: a.flip(1)),
    bias_of_the_step_lost=(0, "linear_attn.dt_bias", torch.zeros_like),
    taps_of_delta_net_in_reverse=(2, "linear_attn.conv1d.weight", lambda w: w.flip(-1)),
)(constant)
mamba(skip_past_the_matrix_lost=(2, "mamba.D", torch.zeros_like))(constant)
delta(gate_of_attention_dropped=(1, "sigmoid", "self_attn", torch.ones_like))(result)


@delta()
def gate_before_the_norm(decoder):
    # n · z over the RMS of n / γ · z is the norm of what was gated first
    gamma = held(decoder, 0, "linear_attn.norm.weight")

    def gated_first(r):
        return r * torch.rsqrt((r / gamma).square().mean(-1, keepdim=True))

    result(decoder, 0, "mul", "linear_attn", gated_first, -1)


@mamba()
def norm_before_the_gate(decoder):
    gates = []

    def without(arguments):
        gates.append(arguments["y"])
        return arguments | {"y": torch.ones_like(arguments["y"])}

    def gated(arguments):
        gate = torch.cat(gates, 2)  # of every call whose columns are in x
        gates.clear()
        return arguments | {"x": arguments["x"] * gate}

    wrap(steps(decoder, 0, "mul", "mamba")[-1], before=without)
    wrap(steps(decoder, 0, "conv", "out_proj")[0], before=gated)


@delta()
def one_step_too_few_for_eight_tokens(decoder):
    last = []
    change = steps(decoder, 0, "sub", "linear_attn")[-1]
    (subtracted,) = (
        name for parameter, name, *_ in change.operands if parameter == "y"
    )
    final = making(decoder, 0, subtracted)
    wrap(final, before=lambda arguments: last.append(arguments["y"]) or arguments)
    wrap(change, after=lambda _: last.pop())
