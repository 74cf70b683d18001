"""Faults of what only ZAYA has: states beside the cache, a router state across layers, CCA's and
the experts' ingredients. See `faults`."""

from functools import partial

import numpy as np
import torch
from faults import (
    around,
    constant,
    fed,
    forget,
    function,
    inputs,
    operands,
    result,
    steps,
    wrap,
)
from registry import in_memory

from workbench.bundle.names import ROUTER_STATE_OUT

fault = partial(in_memory, "program", "zaya")
LAYERS = range(3)

# States, and what goes from layer to layer

fault(
    convolution_state_not_carried=(LAYERS, "conv_state"),
    delayed_value_not_carried=(LAYERS, "v_delayed_state"),
)(forget)
fault(
    side_states_take_the_first_columns_of_a_chunk=(
        "tail_select",
        lambda x: np.roll(x, -max(0, x.shape[2] - 2), axis=2),
    )
)(inputs)
fault(
    router_state_not_carried_across_layers=(LAYERS[1:], "router_state", np.zeros_like)
)(fed)


@fault()
def router_state_lost_between_two_shards(decoder):
    def forgetful(predict, inputs, state):
        outputs = predict(inputs, state)
        return outputs | {ROUTER_STATE_OUT: np.zeros_like(outputs[ROUTER_STATE_OUT])}

    for model in decoder.layers:
        around(model, forgetful)


# Weights

TEMPERATURE = "self_attn.qk_norm.temp"
GATE_UP = "mlp.experts.gate_up_proj"


def halves_exchanged(w, experts: int = 4):
    return w.reshape(experts, 2, -1, *w.shape[1:]).flip(1).reshape(w.shape)


fault(
    taps_of_the_convolution_in_reverse=(
        1,
        "self_attn.qkv_proj.conv_qk_depthwise.weight",
        lambda w: w.flip(-1),
    ),
    temperature_negated=(0, TEMPERATURE, lambda t: -t.flatten()[0].expand_as(t)),
    temperature_of_the_first_head_for_all=(
        2,
        TEMPERATURE,
        lambda t: t[:, :1].expand_as(t).clone(),
    ),
    temperature_left_out=(0, TEMPERATURE, lambda t: t / 2),
    residual_scale_lost=(
        2,
        "post_attention_residual_scale.hidden_states_scale",
        torch.zeros_like,
    ),
    experts_exchanged=(1, "mlp.experts.down_proj", lambda w: w.flip(1)),
    gate_and_up_of_the_experts_exchanged=(1, GATE_UP, halves_exchanged),
)(constant)


@fault()
def balancing_biases_left_out(decoder):
    for layer in LAYERS:
        constant(decoder, layer, "mlp.gate.balancing_biases", torch.zeros_like)


# Compressed convolutional attention

fault(
    key_pulled_to_one_query_instead_of_their_mean=(
        1,
        "reduce_mean",
        "qkv_proj",
        lambda x, **_: x[:, :1],
    ),
    second_best_expert_picked=(
        2,
        "reduce_argmax",
        "",
        lambda x, **_: x.topk(2, 1).indices[:, 1:].int(),
    ),
)(function)
fault(second_convolution_left_out=(0, "conv", "conv_qk_grouped", torch.zeros_like))(
    result
)


@fault()
def means_of_queries_and_keys_left_out(decoder):
    products = steps(decoder, 1, "mul", "qkv_proj")
    half = next(step for step in products if "y" in step.constants)
    wrap(half, after=torch.zeros_like)


@fault(
    length_of_queries_left_as_it_is=(slice(0, None, 2),),
    length_of_keys_left_as_it_is=(slice(1, None, 2),),
)
def undivided(decoder, which):
    # queries / peak, keys / peak, queries / √Σ, keys / √Σ
    for step in steps(decoder, 1, "real_div", "qk_norm")[which]:
        step.function = lambda x, y: x


@fault()
def value_not_delayed(decoder):
    slices = steps(decoder, 1, "slice_by_index", "qkv_proj")
    delayed = next(step for step in slices if step.constants["end"][-1] == -1)
    wrap(delayed, before=lambda given: given | {"x": given["x"].roll(-1, 3)})


@fault()
def each_convolution_padded_alone(decoder):
    # what lies before the first token is the first convolution's bias, not zero
    step = steps(decoder, 0, "conv", "conv_qk_depthwise")[0]
    original = step.function

    def padded(x, **rest):
        made = original(x=x, **rest)
        if not x[..., :2].any():
            made[..., 0] = 0
        return made

    step.function = padded


# Router and experts


@fault()
def another_activation_in_the_router(decoder):
    for step in steps(decoder, 0, "gelu"):
        step.function = lambda x, **_: torch.relu(x)


# the step that multiplies probabilities with the one-hot choice
WEIGHING = 1, "mul", "layers.1"
fault(
    soft_mix_of_all_experts=(
        *WEIGHING,
        lambda given: given | {"y": torch.ones_like(given["y"])},
    ),
    probability_of_the_expert_left_out=(
        *WEIGHING,
        lambda given: given | {"x": torch.ones_like(given["x"])},
    ),
)(operands)
