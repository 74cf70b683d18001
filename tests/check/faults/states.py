"""Faults of a loaded decoder's caches: which rows are written, what is read from them, and how long
a state lives."""

import numpy as np
import torch

from faults.decoders import (
    Plant,
    TensorChange,
    change_arguments,
    change_result,
    declared_shape,
    edit_result,
    edit_shard_input,
    find_step_returning,
    find_steps,
    wrap_calls,
)
from faults.fault import Fault
from faults.host import WRITE

# Where rows are written


def write_padding(decoder):
    """Counts dummy tokens as content as long as they fit."""
    original, S = decoder.host.inputs, decoder.options.max_seq_len

    def inputs(offsets, counts, T):
        return original(offsets, np.minimum(T, S - offsets), T)

    decoder.host.inputs = inputs


def clamp_position(decoder):
    original, S = decoder.host.inputs, decoder.options.max_seq_len

    def inputs(offsets, counts, T):
        return original(np.minimum(offsets, S - T), counts, T)

    decoder.host.inputs = inputs


def skip_writes(decoder, layer):
    for step in find_steps(decoder, layer, "write_state"):
        step.function = lambda **_: None


def write_first_head_only(decoder, layer):
    def change(arguments):
        old, new = arguments["input"].value, arguments["data"]
        return arguments | {"data": torch.cat([new[:, :1], old[:, 1:]], dim=1)}

    for step in find_steps(decoder, layer, "write_state"):
        change_arguments(step, change)


def add_new_rows_to_old(decoder, layer):
    for step in find_steps(decoder, layer, "sub", "self_attn"):
        # the factor of the old rows, 1 − Σ write mask, is [B, 1, S, 1]; rope subtracts too
        if declared_shape(step)[-1] == 1:
            change_result(step, torch.ones_like)


def swap_keys_and_values(decoder, layer):
    names = {"k_state": "v_state", "v_state": "k_state"}
    for step in decoder.layer_shards[layer].executable.body.steps:
        step.operands = [
            operand._replace(source=names.get(operand.source, operand.source))
            if isinstance(operand.source, str)
            else operand
            for operand in step.operands
        ]


# How long a state lives


def give_every_sequence_one_state(decoder):
    def plant_in_shard(model):
        state = model.make_state()
        model.make_state = lambda: state

    for model in decoder.layer_shards:
        plant_in_shard(model)


def make_state_for_every_call(decoder):
    def plant_in_shard(model):
        def call(predict, inputs, state):
            return predict(inputs, model.make_state())

        wrap_calls(model, call)

    for model in decoder.layer_shards:
        plant_in_shard(model)


def use_one_state_for_all(decoder):
    def plant_in_shard(model):
        shared = model.make_state()

        def call(predict, inputs, state):
            return predict(inputs, shared)

        wrap_calls(model, call)

    for model in decoder.layer_shards:
        plant_in_shard(model)


# What is read


def edit_reads(change: TensorChange) -> Plant:
    """Changes every value that is read from a state."""

    def plant(decoder):
        for layer in range(len(decoder.layer_shards)):
            for step in find_steps(decoder, layer, "read_state"):
                change_result(step, change)

    return plant


def flush_subnormal_numbers(value):
    return torch.where(value.abs() < 2**-14, 0.0, value)


def round_rows_at_every_call(decoder):
    """Changes every row by 2% of noise at every call, as a cache that is dequantized and quantized
    again each time: the oldest rows collect most of it."""
    rng = np.random.default_rng(0)

    def call(predict, inputs, state):
        outputs = predict(inputs, state)
        for name in state.shard.states:
            rows = state.read(name)
            noise = 1 + 0.02 * rng.standard_normal(rows.shape)
            state.write(name, (rows * noise).astype(rows.dtype))
        return outputs

    for model in decoder.layer_shards:
        wrap_calls(model, call)


def damage_a_value_head(decoder, layer):
    def change(value):
        value = value.clone()
        value[:, 0, 48:] *= 0.5
        return value

    for step in find_steps(decoder, layer, "read_state"):
        if step.operands[0].source == "v_state":
            change_result(step, change)


def repeat_last_row(value):
    value = value.clone()
    value[:, :, 62] = value[:, :, 63]
    return value


# Rope in a program


def turn_keys_only(decoder, layer):
    # queries are rotated first; each half is a difference or a sum whose y has the sine
    halves = find_steps(decoder, layer, "concat", "self_attn")[0].operands[0].source
    for name in halves:
        step = find_step_returning(decoder, layer, name)
        change_arguments(step, lambda arguments: arguments | {"y": arguments["y"] * 0})


FAULTS = [
    Fault(
        "write address off by one in the last layer only",
        gate="write_address",
        plant=edit_shard_input([-1], WRITE, lambda write: np.roll(write, 1, axis=2)),
    ),
    Fault(
        "padding written as content",
        gate="write_address",
        bundle="fixed",
        plant=write_padding,
    ),
    Fault(
        "position past the cache is clamped", gate="state_life", plant=clamp_position
    ),
    Fault("state never written", gate="write_address", layer=1, plant=skip_writes),
    Fault(
        "only the first head is written",
        gate="write_address",
        layer=0,
        plant=write_first_head_only,
    ),
    Fault(
        "rows added instead of replaced",
        gate="stale_rows",
        layer=0,
        plant=add_new_rows_to_old,
    ),
    Fault(
        "keys and values swapped", gate="program", layer=2, plant=swap_keys_and_values
    ),
    Fault(
        "a new sequence gets the old state",
        gate="state_life",
        plant=give_every_sequence_one_state,
    ),
    Fault(
        "a new state for every token",
        gate="write_address",
        plant=make_state_for_every_call,
    ),
    Fault(
        "all states of a model are one", gate="state_life", plant=use_one_state_for_all
    ),
    Fault(
        "subnormal numbers flushed by a read",
        gate="write_address",
        plant=edit_reads(flush_subnormal_numbers),
    ),
    Fault(
        "NaN hidden by a finite read",
        gate="stale_rows",
        plant=edit_reads(torch.nan_to_num),
    ),
    Fault(
        "cache rows rounded again at every call",
        gate="program",
        plant=round_rows_at_every_call,
    ),
    Fault(
        "a value head damaged past row 48",
        gate="program",
        layer=1,
        plant=damage_a_value_head,
    ),
    Fault(
        "the newest row read twice near the end",
        gate="program",
        layer=2,
        plant=edit_result("read_state", "", repeat_last_row, index=-1),
    ),
    Fault(
        "rope on keys but not on queries", gate="program", layer=1, plant=turn_keys_only
    ),
]
