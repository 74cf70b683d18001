"""Faults of what only ZAYA has: states beside the cache, a router state across layers, CCA's and
the experts' ingredients."""

from functools import partial

import numpy as np
import torch
from faults import altered, around, changed, constant, fault, host, steps, wrap

from workbench import Decoder
from workbench.bundle.names import ROUTER_STATE_OUT

fault = partial(fault, bundle="zaya")
altered = partial(altered, bundle="zaya")
changed = partial(changed, bundle="zaya")


def forget(decoder: Decoder, name: str, layers=None) -> None:
    """Zeros a side state of every layer, or of some, after each call."""
    for layer, model in enumerate(decoder.layers):
        if layer not in (layers or [layer]):
            continue

        def forgetful(predict, inputs, state, full=f"layers.{layer}.{name}"):
            outputs = predict(inputs, state)
            state.write(full, np.zeros_like(state.read(full)))
            return outputs

        around(model, forgetful)


@fault("program")
def convolution_state_not_carried(decoder):
    forget(decoder, "conv_state")


@fault("program")
def delayed_value_not_carried(decoder):
    forget(decoder, "v_delayed_state")


@fault("program")
def side_states_take_the_first_columns_of_a_chunk(decoder):
    def first(made, offsets, counts, T):
        if T > 2:
            made["tail_select"] = np.roll(made["tail_select"], -(T - 2), axis=2)

    host(decoder, first)


@fault("program")
def router_state_not_carried_across_layers(decoder):
    def zeroed(predict, inputs, state):
        zeros = np.zeros_like(inputs["router_state"])
        return predict(inputs | {"router_state": zeros}, state)

    for model in decoder.layers[1:]:
        around(model, zeroed)


changed(
    "taps_of_the_convolution_in_reverse",
    1,
    "self_attn.qkv_proj.conv_qk_depthwise.weight",
    lambda w: w.flip(-1),
)
changed(
    "temperature_negated",
    0,
    "self_attn.qk_norm.temp",
    lambda t: -t.flatten()[0].expand_as(t),
)
changed(
    "residual_scale_lost",
    2,
    "post_attention_residual_scale.hidden_states_scale",
    torch.zeros_like,
)
changed("experts_exchanged", 1, "mlp.experts.down_proj", lambda w: w.flip(1))


@fault("program")
def another_activation_in_the_router(decoder):
    for step in steps(decoder, 0, "gelu"):
        step.function = lambda x, **_: torch.relu(x)


# Compressed convolutional attention


@fault("program")
def means_of_queries_and_keys_left_out(decoder):
    wrap(halved(decoder, 1), after=torch.zeros_like)


altered(
    "key_pulled_to_one_query_instead_of_their_mean",
    *(1, "reduce_mean", "qkv_proj"),
    function=lambda x, **_: x[:, :1],
)


def halved(decoder: Decoder, layer: int):
    """The step that halves query plus key."""
    return next(
        s for s in steps(decoder, layer, "mul", "qkv_proj") if "y" in s.constants
    )


@fault("program")
def length_of_queries_left_as_it_is(decoder):
    # queries / peak, keys / peak, queries / √Σ, keys / √Σ
    peak, _, norm, _ = steps(decoder, 1, "real_div", "qk_norm")
    for step in (peak, norm):
        step.function = lambda x, y: x


@fault("program")
def length_of_keys_left_as_it_is(decoder):
    _, peak, _, norm = steps(decoder, 1, "real_div", "qk_norm")
    for step in (peak, norm):
        step.function = lambda x, y: x


changed(
    "temperature_of_the_first_head_for_all",
    2,
    "self_attn.qk_norm.temp",
    lambda t: t[:, :1].expand_as(t).clone(),
)
changed("temperature_left_out", 0, "self_attn.qk_norm.temp", lambda t: t / 2)


@fault("program")
def value_not_delayed(decoder):
    delayed = next(
        s
        for s in steps(decoder, 1, "slice_by_index", "qkv_proj")
        if s.constants["end"][-1] == -1
    )
    original = delayed.function
    delayed.function = lambda x, **rest: original(x=x.roll(-1, 3), **rest)


altered(
    "second_convolution_left_out",
    *(0, "conv", "conv_qk_grouped"),
    after=torch.zeros_like,
)


@fault("program")
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


@fault("program")
def balancing_biases_left_out(decoder):
    for layer in range(len(decoder.layers)):
        constant(decoder, layer, "mlp.gate.balancing_biases", torch.zeros_like)


altered(
    "second_best_expert_picked",
    *(2, "reduce_argmax"),
    function=lambda x, **_: x.topk(2, 1).indices[:, 1:].int(),
)


@fault("program")
def router_state_lost_between_two_shards(decoder):
    def forgetful(predict, inputs, state):
        outputs = predict(inputs, state)
        return outputs | {ROUTER_STATE_OUT: np.zeros_like(outputs[ROUTER_STATE_OUT])}

    for model in decoder.layers:
        around(model, forgetful)


# the step that multiplies probabilities with the one-hot choice
WEIGHING = 1, "mul", "layers.1"
altered(
    "soft_mix_of_all_experts",
    *WEIGHING,
    before=lambda g: g | {"y": torch.ones_like(g["y"])},
)
altered(
    "probability_of_the_expert_left_out",
    *WEIGHING,
    before=lambda g: g | {"x": torch.ones_like(g["x"])},
)


@fault("program")
def gate_and_up_of_the_experts_exchanged(decoder):
    E = 4
    constant(
        decoder,
        1,
        "mlp.experts.gate_up_proj",
        lambda w: w.reshape(E, 2, -1, *w.shape[1:]).flip(1).reshape(w.shape),
    )
