"""Faults of a loaded decoder in what only ZAYA has: states beside the cache, a router state across
layers, compressed convolutional attention, and experts."""

import numpy as np
import torch

from faults.decoders import (
    LayerPlant,
    change_arguments,
    change_result,
    clear_state,
    edit_arguments,
    edit_input,
    edit_result,
    edit_shard_input,
    edit_weight,
    find_steps,
    replace_function,
    wrap_calls,
)
from faults.fault import Fault
from workbench.bundle.names import ROUTER_STATE_OUT

LAYERS = range(3)

# States, and what goes from layer to layer


def select_first_columns(select):
    return np.roll(select, -max(0, select.shape[2] - 2), axis=2)


def clear_router_state_of_shards(decoder):
    def call(predict, inputs, state):
        outputs = predict(inputs, state)
        return outputs | {ROUTER_STATE_OUT: np.zeros_like(outputs[ROUTER_STATE_OUT])}

    for model in decoder.layer_shards:
        wrap_calls(model, call)


# Weights

TEMPERATURE = "self_attn.qk_norm.temp"
DEPTHWISE = "self_attn.qkv_proj.conv_qk_depthwise.weight"


def negate_first_temperature(temperature):
    return -temperature.flatten()[0].expand_as(temperature)


def repeat_first_temperature(temperature):
    return temperature[:, :1].expand_as(temperature).clone()


def exchange_experts(weight, experts: int = 4):
    """Reverses the order of the experts, whose output channels are one after another."""
    by_expert = weight.reshape(experts, -1, *weight.shape[1:])
    return by_expert.flip(0).reshape(weight.shape)


def exchange_halves(weight, experts: int = 4):
    by_half = weight.reshape(experts, 2, -1, *weight.shape[1:])
    return by_half.flip(1).reshape(weight.shape)


def zero_balancing_biases(decoder):
    for layer in LAYERS:
        edit_weight("mlp.gate.balancing_biases", torch.zeros_like)(decoder, layer)


# Compressed convolutional attention


def take_first_query(x, **_):
    return x[:, :1]


def skip_means(decoder, layer):
    products = find_steps(decoder, layer, "mul", "qkv_proj")
    half = next(step for step in products if "y" in step.constants)
    change_result(half, torch.zeros_like)


def skip_divisions(start: int) -> LayerPlant:
    """Leaves a length as it is. The divisions are queries / peak, keys / peak, queries / √Σ,
    keys / √Σ; `start` is 0 for queries and 1 for keys."""

    def plant(decoder, layer):
        for step in find_steps(decoder, layer, "real_div", "qk_norm")[start::2]:
            step.function = lambda x, y: x

    return plant


def undo_delay(decoder, layer):
    slices = find_steps(decoder, layer, "slice_by_index", "qkv_proj")
    delayed = next(step for step in slices if step.constants["end"][-1] == -1)
    change_arguments(
        delayed, lambda arguments: arguments | {"x": arguments["x"].roll(-1, 3)}
    )


def pad_second_convolution(decoder, layer):
    # what lies before the first token is the first convolution's bias, not zero
    step = find_steps(decoder, layer, "conv", "conv_qk_depthwise")[0]
    original = step.function

    def convolve(x, **parameters):
        result = original(x=x, **parameters)
        if not x[..., :2].any():
            result[..., 0] = 0
        return result

    step.function = convolve


# Router and experts


def use_relu_in_router(decoder, layer):
    for step in find_steps(decoder, layer, "gelu"):
        step.function = lambda x, **_: torch.relu(x)


def take_second_best(x, **_):
    return x.topk(2, 1).indices[:, 1:].int()


# the step that multiplies probabilities (x) with the one-hot choice (y)
WEIGHING = "mul", "layers.{layer}"


def choose_every_expert(arguments):
    return arguments | {"y": torch.ones_like(arguments["y"])}


def skip_probabilities(arguments):
    return arguments | {"x": torch.ones_like(arguments["x"])}


FAULTS = [
    Fault(
        "convolution state not carried",
        gate="program",
        bundle="zaya",
        plant=clear_state(LAYERS, "conv_state"),
    ),
    Fault(
        "delayed value not carried",
        gate="program",
        bundle="zaya",
        plant=clear_state(LAYERS, "v_delayed_state"),
    ),
    Fault(
        "side states take the first columns of a chunk",
        gate="program",
        bundle="zaya",
        plant=edit_input("tail_select", select_first_columns),
    ),
    Fault(
        "router state not carried across layers",
        gate="program",
        bundle="zaya",
        plant=edit_shard_input(LAYERS[1:], "router_state", np.zeros_like),
    ),
    Fault(
        "router state lost between two shards",
        gate="program",
        bundle="zaya",
        plant=clear_router_state_of_shards,
    ),
    Fault(
        "taps of the convolution in reverse",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=edit_weight(DEPTHWISE, lambda weight: weight.flip(-1)),
    ),
    Fault(
        "temperature negated",
        gate="program",
        bundle="zaya",
        layer=0,
        plant=edit_weight(TEMPERATURE, negate_first_temperature),
    ),
    Fault(
        "temperature of the first head for all",
        gate="program",
        bundle="zaya",
        layer=2,
        plant=edit_weight(TEMPERATURE, repeat_first_temperature),
    ),
    Fault(
        "temperature halved",
        gate="program",
        bundle="zaya",
        layer=0,
        plant=edit_weight(TEMPERATURE, lambda temperature: temperature / 2),
    ),
    Fault(
        "residual scale lost",
        gate="program",
        bundle="zaya",
        layer=2,
        plant=edit_weight(
            "post_attention_residual_scale.hidden_states_scale", torch.zeros_like
        ),
    ),
    Fault(
        "experts exchanged",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=edit_weight("mlp.experts.down_proj", exchange_experts),
    ),
    Fault(
        "gate and up of the experts exchanged",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=edit_weight("mlp.experts.gate_up_proj", exchange_halves),
    ),
    Fault(
        "balancing biases left out",
        gate="program",
        bundle="zaya",
        plant=zero_balancing_biases,
    ),
    Fault(
        "key pulled to one query instead of their mean",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=replace_function("reduce_mean", "qkv_proj", take_first_query),
    ),
    Fault(
        "second best expert picked",
        gate="program",
        bundle="zaya",
        layer=2,
        plant=replace_function("reduce_argmax", "", take_second_best),
    ),
    Fault(
        "second convolution left out",
        gate="program",
        bundle="zaya",
        layer=0,
        plant=edit_result("conv", "conv_qk_grouped", torch.zeros_like),
    ),
    Fault(
        "means of queries and keys left out",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=skip_means,
    ),
    Fault(
        "length of queries left as it is",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=skip_divisions(0),
    ),
    Fault(
        "length of keys left as it is",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=skip_divisions(1),
    ),
    Fault(
        "value not delayed", gate="program", bundle="zaya", layer=1, plant=undo_delay
    ),
    Fault(
        "each convolution padded alone",
        gate="program",
        bundle="zaya",
        layer=0,
        plant=pad_second_convolution,
    ),
    Fault(
        "another activation in the router",
        gate="program",
        bundle="zaya",
        layer=0,
        plant=use_relu_in_router,
    ),
    Fault(
        "soft mix of all experts",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=edit_arguments(*WEIGHING, choose_every_expert),
    ),
    Fault(
        "probability of the expert left out",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=edit_arguments(*WEIGHING, skip_probabilities),
    ),
]
