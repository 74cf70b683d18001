"""Faults of what only ZAYA has: states beside the cache, a router state across layers, CCA's and the experts' ingredients."""

import numpy as np
import torch
from faults import Fault, constant, host, steps

from workbench import Decoder

ZAYA_FAULTS: dict[str, Fault] = {}


def fault(gate: str):
    def register(plant):
        assert plant.__name__ not in ZAYA_FAULTS
        ZAYA_FAULTS[plant.__name__] = Fault(plant.__name__, gate, plant)
        return plant

    return register


def forget(decoder: Decoder, name: str) -> None:
    """Zeros a side state of every layer after each call."""
    for layer, model in enumerate(decoder.layers):

        def predict(inputs, state=None, original=model.predict, full=f"layers.{layer}.{name}"):
            made = original(inputs, state)
            state.write(full, np.zeros_like(state.read(full)))
            return made

        model.predict = predict


@fault("kv")
def convolution_state_not_carried(decoder):
    forget(decoder, "conv_state")


@fault("kv")
def delayed_value_not_carried(decoder):
    forget(decoder, "v_delayed_state")


@fault("same_for_every_T")
def side_states_take_the_first_columns_of_a_chunk(decoder):
    def first(made, offsets, counts, T):
        if T > 2:
            made["tail_select"] = np.roll(made["tail_select"], -(T - 2), axis=2)

    host(decoder, first)


@fault("update")
def router_state_not_carried_across_layers(decoder):
    for model in decoder.layers[1:]:

        def predict(inputs, state=None, original=model.predict):
            return original(inputs | {"router_state": np.zeros_like(inputs["router_state"])}, state)

        model.predict = predict


@fault("kv")
def taps_of_the_convolution_in_reverse(decoder):
    constant(decoder, 1, "self_attn.qkv_proj.conv_qk_depthwise.weight", lambda w: w.flip(-1))


@fault("kv")
def temperature_negated(decoder):
    constant(decoder, 0, "self_attn.qk_norm.temp", lambda t: -t.flatten()[0].expand_as(t))


@fault("update")
def residual_scale_lost(decoder):
    constant(decoder, 2, "post_attention_residual_scale.hidden_states_scale", torch.zeros_like)


@fault("update")
def experts_exchanged(decoder):
    constant(decoder, 1, "mlp.experts.down_proj", lambda w: w.flip(1))


@fault("update")
def another_activation_in_the_router(decoder):
    for step in steps(decoder, 0, "gelu"):
        step.function = lambda x, **_: torch.relu(x)
