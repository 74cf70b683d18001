"""Faults of a loaded decoder whose layers carry the tail of a convolution or a matrix (short
convolutions, DeltaNet, Mamba 2), and of the attention beside them."""

import numpy as np
import torch

from faults.decoders import (
    change_arguments,
    change_result,
    clear_state,
    edit_input,
    edit_result,
    edit_scalar,
    edit_shard_input,
    edit_weight,
    find_step_returning,
    find_steps,
    read_weight,
)
from faults.fault import Fault

RECURRENT = 0, 2  # layers

# Short convolutions


def select_last_columns(select):
    """`select` is [B, n, T]: takes the last n columns, dummies or not."""
    rows = np.eye(select.shape[2])[-select.shape[1] :]
    select[:, -len(rows) :] = rows
    return select


def keep_columns_in_place(keep):
    return np.broadcast_to(np.eye(keep.shape[1], dtype=np.float32), keep.shape)


def exchange_branches(weight):
    """Exchanges two of the three outputs of the input projection: the gate of the convolution's
    input and the gate of its output."""
    input_gate, output_gate, x = weight.chunk(3)
    return torch.cat([output_gate, input_gate, x])


# Matrices


def count_dummy_columns(order):
    """`order` is [B, 1, T, 1]: 1 … count for tokens, 0 for dummies."""
    return np.broadcast_to(np.arange(1, order.shape[2] + 1)[:, None], order.shape)


def norm_what_was_gated(decoder, layer):
    # The program computes norm(x) · gate, where norm(x) = γ · x / rms(x). Divided by the RMS of
    # x / rms(x) · gate it is the norm of x · gate, the gate before the norm.
    gamma = read_weight(decoder, layer, "linear_attn.norm.weight")

    def change(result):
        return result * torch.rsqrt((result / gamma).square().mean(-1, keepdim=True))

    edit_result("mul", "linear_attn", change, index=-1)(decoder, layer)


def gate_what_was_normed(decoder, layer):
    """Multiplies by the gate behind the norm, before the output projection, instead of before the
    norm."""
    gates = []

    def collect_gate(arguments):
        gates.append(arguments["y"])
        return arguments | {"y": torch.ones_like(arguments["y"])}

    def apply_gate(arguments):
        # x has the columns of several calls side by side
        gate = torch.cat(gates, 2)
        gates.clear()
        return arguments | {"x": arguments["x"] * gate}

    change_arguments(find_steps(decoder, layer, "mul", "mamba")[-1], collect_gate)
    change_arguments(find_steps(decoder, layer, "conv", "out_proj")[0], apply_gate)


# the last correction of the other DeltaNet layer is too small for any gate to show
LAYER_OF_LARGE_STEPS = 0


def skip_last_correction(decoder):
    """A call of several tokens solves for δ by steps δ ← R − A δ. The last step returns the δ that
    it gets, unchanged."""
    deltas = []

    def collect_delta(arguments):
        deltas.append(arguments["y"])
        return arguments

    def return_delta(_):
        return deltas.pop()

    subtraction = find_steps(decoder, LAYER_OF_LARGE_STEPS, "sub", "linear_attn")[-1]
    (product_name,) = [
        operand.source for operand in subtraction.operands if operand.parameter == "y"
    ]
    product = find_step_returning(decoder, LAYER_OF_LARGE_STEPS, product_name)
    change_arguments(product, collect_delta)
    change_result(subtraction, return_delta)


FAULTS = [
    Fault(
        "tail of a convolution not carried",
        gate="program",
        bundle="lfm2",
        plant=clear_state(RECURRENT, "conv_state"),
    ),
    Fault(
        "tail ends one column early",
        gate="program",
        bundle="lfm2",
        plant=edit_input("tail_select", lambda select: np.roll(select, -1, axis=2)),
    ),
    Fault(
        "dummy columns enter the tail",
        gate="program",
        bundle="lfm2",
        plant=edit_input("tail_select", select_last_columns),
    ),
    Fault(
        "old columns of a tail stay where they are",
        gate="program",
        bundle="lfm2",
        plant=edit_shard_input(RECURRENT, "tail_keep", keep_columns_in_place),
    ),
    Fault(
        "what enters the convolution and what gates it exchanged",
        gate="program",
        bundle="lfm2",
        layer=2,
        plant=edit_weight("conv.in_proj.weight", exchange_branches),
    ),
    Fault(
        "taps of a short convolution in reverse",
        gate="program",
        bundle="lfm2",
        layer=0,
        plant=edit_weight("conv.conv.weight", lambda weight: weight.flip(-1)),
    ),
    Fault(
        "dummy columns advance a matrix",
        gate="program",
        bundle="qwen3_5",
        plant=edit_input("order", count_dummy_columns),
    ),
    Fault(
        "dummy columns advance a Mamba matrix",
        gate="program",
        bundle="granite",
        plant=edit_input("order", count_dummy_columns),
    ),
    Fault(
        "matrix not carried",
        gate="program",
        bundle="qwen3_5",
        plant=clear_state(RECURRENT, "matrix_state"),
    ),
    Fault(
        "matrix of Mamba not carried",
        gate="program",
        bundle="granite",
        plant=clear_state(RECURRENT, "matrix_state"),
    ),
    # the sign of -e^A
    Fault(
        "sign of the decay lost",
        gate="program",
        bundle="qwen3_5",
        layer=0,
        plant=edit_scalar("mul", "linear_attn", "y", torch.abs),
    ),
    Fault(
        "sign of Mamba's decay lost",
        gate="program",
        bundle="granite",
        layer=0,
        plant=edit_scalar("mul", "mamba", "y", torch.abs),
    ),
    Fault(
        "branches join the stream at full size",
        gate="program",
        bundle="granite",
        layer=1,
        plant=edit_scalar("mul", "layers.{layer}", "y", torch.ones_like),
    ),
    Fault(
        "decays of other heads",
        gate="program",
        bundle="qwen3_5",
        layer=2,
        plant=edit_weight("linear_attn.A_log", lambda decays: decays.flip(1)),
    ),
    Fault(
        "bias of the step lost",
        gate="program",
        bundle="qwen3_5",
        layer=0,
        plant=edit_weight("linear_attn.dt_bias", torch.zeros_like),
    ),
    Fault(
        "taps of delta net in reverse",
        gate="program",
        bundle="qwen3_5",
        layer=2,
        plant=edit_weight("linear_attn.conv1d.weight", lambda weight: weight.flip(-1)),
    ),
    Fault(
        "skip past the matrix lost",
        gate="program",
        bundle="granite",
        layer=2,
        plant=edit_weight("mamba.D", torch.zeros_like),
    ),
    Fault(
        "gate of attention dropped",
        gate="program",
        bundle="qwen3_5",
        layer=1,
        plant=edit_result("sigmoid", "self_attn", torch.ones_like),
    ),
    Fault(
        "gate before the norm",
        gate="program",
        bundle="qwen3_5",
        layer=0,
        plant=norm_what_was_gated,
    ),
    Fault(
        "norm before the gate",
        gate="program",
        bundle="granite",
        layer=0,
        plant=gate_what_was_normed,
    ),
    Fault(
        "one step too few for eight tokens",
        gate="program",
        bundle="qwen3_5",
        plant=skip_last_correction,
    ),
]
