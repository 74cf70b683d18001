"""Faults of a loaded decoder in what only Gemma 4 has: layers that copy an earlier layer's cache
rows, second embeddings, a scalar of each layer, and a softcap."""

import numpy as np
import torch

from faults.decoders import (
    ArrayChange,
    Plant,
    change_result,
    change_sequences,
    edit_result,
    edit_scalar,
    edit_shard_input,
    edit_weight,
    find_steps,
    replace_constant,
    wrap_calls,
)
from faults.fault import Fault
from workbench.bundle.names import K_STATE, PER_LAYER, V_STATE, X0, X
from workbench.decode.snapshot import source_name

LAYERS = range(6)
# layers with a sliding window: the first one, and one that copies the rows of layer 2
FIRST_SLIDING, COPYING_SLIDING = 0, 4
K_ROWS, V_ROWS = "k_rows_local", "v_rows_local"
PROJECTION = "model.per_layer_model_projection.weight"
C, P = 64, 32

# Shared rows


def share_rows_of_first_layer(decoder):
    """Gives layer 4 the rows of the first sliding layer, where that layer ran in the same call."""
    # All shards of a call get the same array `x0`, whose id stands for the call. The array is kept
    # beside the rows, so that no later array gets its id.
    rows_by_call = {}

    def record_rows(predict, inputs, state):
        outputs = predict(inputs, state)
        is_written = inputs["kv_write_mask"].swapaxes(2, 3)
        rows = [
            np.float32(is_written @ state.read(f"layers.{FIRST_SLIDING}.{leaf}"))
            for leaf in (K_STATE, V_STATE)
        ]
        rows_by_call[id(inputs[X0])] = inputs[X0], rows
        return outputs

    def read_rows(predict, inputs, state):
        if id(inputs[X0]) in rows_by_call:
            _, (k, v) = rows_by_call[id(inputs[X0])]
            inputs = inputs | {K_ROWS: k, V_ROWS: v}
        return predict(inputs, state)

    wrap_calls(decoder.layer_shards[FIRST_SLIDING], record_rows)
    wrap_calls(decoder.layer_shards[COPYING_SLIDING], read_rows)


def read_rows_of_call_before(decoder):
    rows_before = {}

    def call(predict, inputs, state):
        rows = {name: inputs[name] for name in (K_ROWS, V_ROWS)}
        stale = {}
        for name, array in rows.items():
            before = rows_before.get(name)
            is_usable = before is not None and before.shape == array.shape
            stale[name] = before if is_usable else np.zeros_like(array)
        rows_before.update(rows)
        return predict(inputs | stale, state)

    wrap_calls(decoder.layer_shards[COPYING_SLIDING], call)


def exchange_keys_and_values(decoder):
    def call(predict, inputs, state):
        exchanged = {K_ROWS: inputs[V_ROWS], V_ROWS: inputs[K_ROWS]}
        return predict(inputs | exchanged, state)

    wrap_calls(decoder.layer_shards[COPYING_SLIDING], call)


def lose_copies_at_restore(decoder):
    def clear_copies(seqs):
        for state, name in seqs.named_states:
            if source_name(decoder.manifest, name) != name:
                state.write(name, np.zeros_like(state.read(name)))

    change_sequences(decoder, clear_copies)


# Second embeddings


def edit_second_embedding(change: ArrayChange) -> Plant:
    """Changes what the host looks up in the second table, [B, T, L·P]."""

    def plant(decoder):
        original = decoder.bundle.embed_per_layer
        decoder.bundle.embed_per_layer = lambda ids: change(original(ids))

    return plant


def read_slice_of_next_layer(second):
    return np.roll(second, -P, axis=-1)


def read_stream_as_x0(decoder):
    def call(predict, inputs, state):
        return predict(inputs | {X0: inputs[X]}, state)

    for layer in LAYERS[1:]:
        wrap_calls(decoder.layer_shards[layer], call)


def use_projection_of_another_layer(decoder, layer):
    model = decoder.layer_shards[layer]
    other = decoder.layer_shards[(layer + 1) % len(LAYERS)]
    projection = other.executable.constants[other.shard.weights[PROJECTION]].clone()
    replace_constant(model, model.shard.weights[PROJECTION], lambda _: projection)


def forget_half_power(decoder, layer):
    """The sum of both embeddings is not divided by √2."""
    product = find_steps(decoder, layer, "mul", "shared")[-1]
    change_result(product, lambda y: y * 2**0.5)


def skip_softcap(decoder):
    for model in decoder.heads:
        for step in model.executable.body.steps:
            if step.op.kind == "tanh":
                step.function = lambda x: x


FAULTS = [
    Fault(
        "rows of the first layer of a kind in place of the last",
        gate="program",
        bundle="gemma4",
        plant=share_rows_of_first_layer,
    ),
    Fault(
        "shared rows of the call before",
        gate="program",
        bundle="gemma4",
        plant=read_rows_of_call_before,
    ),
    Fault(
        "copies are another call's rows",
        gate="state_life",
        bundle="gemma4",
        plant=read_rows_of_call_before,
    ),
    Fault(
        "shared keys and values exchanged",
        gate="program",
        bundle="gemma4",
        plant=exchange_keys_and_values,
    ),
    Fault(
        "copies of rows lost when a snapshot is restored",
        gate="state_life",
        bundle="gemma4",
        plant=lose_copies_at_restore,
    ),
    Fault(
        "second embedding without its root",
        gate="program",
        bundle="gemma4",
        plant=edit_second_embedding(lambda second: second / np.float32(P**0.5)),
    ),
    Fault(
        "second embedding times 1.01",
        gate="program",
        bundle="gemma4",
        plant=edit_second_embedding(lambda second: second * np.float32(1.01)),
    ),
    Fault(
        "channels of the second embedding rolled",
        gate="program",
        bundle="gemma4",
        plant=edit_shard_input(
            LAYERS, PER_LAYER, lambda second: np.roll(second, 1, axis=1)
        ),
    ),
    Fault(
        "second embedding of the next layer",
        gate="program",
        bundle="gemma4",
        plant=edit_second_embedding(read_slice_of_next_layer),
    ),
    Fault(
        "projection of another layer",
        gate="program",
        bundle="gemma4",
        layer=1,
        plant=use_projection_of_another_layer,
    ),
    Fault(
        "stream in place of the first embedding",
        gate="program",
        bundle="gemma4",
        plant=read_stream_as_x0,
    ),
    Fault(
        "first embedding divided by the root of its width",
        gate="program",
        bundle="gemma4",
        plant=edit_shard_input(LAYERS, X0, lambda x0: x0 / np.float32(C**0.5)),
    ),
    Fault(
        "first embedding times the root of its width",
        gate="program",
        bundle="gemma4",
        plant=edit_shard_input(LAYERS, X0, lambda x0: x0 * np.float32(C**0.5)),
    ),
    # the epsilon is the product of two constants, each of which is divided by 10
    Fault(
        "epsilon behind the projection a hundredth",
        gate="program",
        bundle="gemma4",
        layer=2,
        plant=edit_scalar(
            "real_div", "per_layer_projection_norm", "x", lambda factor: factor / 10
        ),
    ),
    Fault(
        "sum of both embeddings times the root of two",
        gate="program",
        bundle="gemma4",
        layer=4,
        plant=forget_half_power,
    ),
    Fault(
        "scalar of a layer lost",
        gate="program",
        bundle="gemma4",
        layer=5,
        plant=edit_weight("layer_scalar", torch.ones_like),
    ),
    Fault(
        "attention removed from a layer with a small scalar",
        gate="program",
        bundle="small_scalar",
        layer=1,
        plant=edit_result("conv", "o_proj", torch.zeros_like),
    ),
    Fault("softcap left out", gate="program", bundle="gemma4", plant=skip_softcap),
    Fault(
        "norm of values times 1.01",
        gate="program",
        bundle="gemma4",
        layer=0,
        plant=edit_result("mul", "v_norm", lambda y: y * 1.01, index=-1),
    ),
    # V is K here: the last product of k_norm multiplies by its weight, and the one before it is the
    # normed value as well
    Fault(
        "norm of keys that are values times 1.01",
        gate="program",
        bundle="gemma4_dense",
        layer=2,
        plant=edit_result("mul", "k_norm", lambda y: y * 1.01, index=-2),
    ),
]
