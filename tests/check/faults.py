"""Faults to plant in a loaded bundle: what goes wrong in the wild, each with the gate that must
turn RED.

A fault changes one `Decoder` in memory: a step of a shard's program, a constant, the host's tables
and masks, the life of states. Nothing is exported again, so that every gate can be tried against
every fault in seconds. Here: how faults are planted, and those of caches, states, positions and
masks; `faults_model` has those of layers and weights, `faults_zaya` those of what only ZAYA has.

Bugs that were reported elsewhere and concern one sequence, and the fault that stands for each
(those of batches, stores and restored caches belong to the reuse matrix):

    chapter 5, flexible T addresses the state wrongly              write_address_off_by_one_at_t_above_1
    coremltools 2188, y[:, pos] = v is silently lost               state_never_written
    mlx-lm, tokens dropped when capacity is short                  tokens_dropped_when_the_chunk_is_long
    mlx-lm 1806, rope uses the offset after the update             rope_uses_the_offset_after_the_update
    mlx-examples 977, padding saved as content                     padding_written_as_content
    mlx-swift-lm 443, side state not kept, positions wrong         convolution_state_not_carried, delayed_value_not_carried
    Rapid-MLX 1874, two users of one state                         all_states_of_a_model_are_one
    transformers 30400, the result depends on the cache's length   future_left_visible
    experiment 30, a position past the cache is clamped            position_past_the_cache_is_clamped
    experiment 26 of the Neural Engine book, heads and tokens      heads_and_tokens_permuted_in_the_output
    journals 72 and 100 of it, golden and shard share a wrong rope test_faults
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from registry import in_memory

from miltorch.program import Ref
from workbench import Decoder
from workbench.decode import Sequences


def steps(decoder: Decoder, layer: int, kind: str, module: str = "") -> list:
    """Steps of one single-layer shard by MIL op and source module (a suffix of its path)."""
    model = decoder.layers[layer]
    found = []
    for step in model.executable.body.steps:
        name = step.outputs[0][0] if step.outputs else ""
        if step.op.kind == kind and model.shard.modules.get(name, "").endswith(module):
            found.append(step)
    assert found, (kind, module)
    return found


def making(decoder: Decoder, layer: int, name: str):
    """The step whose first result has this name."""
    found = decoder.layers[layer].executable.body.steps
    return next(s for s in found if s.outputs and s.outputs[0][0] == name)


def wrap(step, after: Callable | None = None, before: Callable | None = None) -> None:
    """Changes what a step returns, or the arguments it is called with."""
    original = step.function

    def changed(**arguments):
        result = original(**(before(arguments) if before else arguments))
        return after(result) if after else result

    step.function = changed


def result(decoder, layer: int, kind: str, module: str, change: Callable, which=0):
    """Changes what one step of a layer returns, of its kind and module the `which`."""
    wrap(steps(decoder, layer, kind, module)[which], after=change)


def operands(decoder, layer: int, kind: str, module: str, change: Callable) -> None:
    """Changes the arguments of the first step of a kind and module."""
    wrap(steps(decoder, layer, kind, module)[0], before=change)


def function(decoder, layer: int, kind: str, module: str, other: Callable) -> None:
    """Puts another function in the place of the first step of a kind and module."""
    steps(decoder, layer, kind, module)[0].function = other


def scalars(decoder, layer: int, kind: str, module: str, name: str, change: Callable):
    """Changes the parameter `name` of steps where it is a constant of one element."""
    for step in steps(decoder, layer, kind, module):
        value = step.constants.get(name)
        if value is not None and value.numel() == 1:
            step.constants[name] = change(value)


def around(model, change: Callable[[Callable, dict, object], dict]) -> None:
    """Replaces what a model does in each call: change(predict, inputs, state) returns the
    outputs."""
    original = model.predict_calls

    def predict_calls(calls, states, hooks):
        outputs = []
        for inputs, state, hook in zip(calls, states, hooks):

            def predict(inputs, state, hook=hook):
                return original([inputs], [state], [hook])[0]

            outputs.append(change(predict, inputs, state))
        return outputs

    model.predict_calls = predict_calls


def fed(decoder, layers: Sequence[int], name: str, change: Callable) -> None:
    """Changes one input of the shards of some layers."""

    def other(predict, inputs, state):
        return predict(inputs | {name: change(inputs[name])}, state)

    for layer in layers:
        around(decoder.layers[layer], other)


def forget(decoder, layers: Sequence[int], name: str) -> None:
    """Zeros a state of some layers after each call."""
    for layer in layers:

        def forgetful(predict, inputs, state, full=f"layers.{layer}.{name}"):
            outputs = predict(inputs, state)
            state.write(full, np.zeros_like(state.read(full)))
            return outputs

        around(decoder.layers[layer], forgetful)


def host(
    decoder: Decoder, change: Callable[[dict, np.ndarray, np.ndarray, int], None]
) -> None:
    """Changes the inputs the host makes for a call: change(inputs, offsets, counts, T), in
    place."""
    original = decoder.host.inputs

    def inputs(offsets, counts, T):
        made = {n: v.copy() for n, v in original(offsets, counts, T).items()}
        change(made, offsets, counts, T)
        return made

    decoder.host.inputs = inputs


def every_sequences(decoder: Decoder, change: Callable[[Sequences], None]) -> None:
    """Changes the current sequences of a decoder and all that it makes from now on."""
    original = decoder.new_sequences

    def new_sequences(after=None):
        seqs = original(after)
        change(seqs)
        return seqs

    change(decoder.seqs)
    decoder.new_sequences = new_sequences


def inputs(decoder: Decoder, names: str, change: Callable) -> None:
    """Changes some of these inputs, their names side by side: change(input) gives others."""

    def replaced(made, *_):
        made.update({n: np.float32(change(made[n])) for n in names.split()})

    host(decoder, replaced)


def held(decoder: Decoder, layer: int, tensor: str) -> torch.Tensor:
    """A weight as the program holds it."""
    model = decoder.layers[layer]
    name = model.shard.weights[f"model.layers.{layer}.{tensor}"]
    return model.executable.constants[name].clone()


def constant(decoder: Decoder, layer: int, tensor: str, change: Callable) -> None:
    """Changes a weight of a layer in every step that uses it, and in the shard's table of
    constants."""
    model = decoder.layers[layer]
    replace(model, model.shard.weights[f"model.layers.{layer}.{tensor}"], change)


def replace(model, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes a constant of a loaded shard wherever it is."""
    new = change(model.executable.constants[name].clone())
    model.executable.constants.values[name] = new
    for step in model.executable.body.steps:
        for parameter, value in step.constants.items():
            if step.op.inputs.get(parameter) == Ref(name):
                step.constants[parameter] = new.to(value.dtype)


# The host's inputs

ROPE = "rope_cos rope_sin"
WRITE, MASK = "kv_write_mask", "attn_mask"


def clamped(mask):
    mask[:, :, -2] = np.maximum(mask[:, :, -2], mask[:, :, -1])
    mask[:, :, -1] = 0
    return mask


def last_row_blocked(mask):
    mask[..., -1] = -1e4
    return mask


def first_written(mask):
    mask[-1] = mask[0]
    return mask


def infinite(mask):
    return (mask != 0) * np.float32(-np.inf)


in_memory(
    "write_address",
    write_address_off_by_one_at_t_above_1=(
        WRITE,
        lambda m: np.roll(m, int(m.shape[-1] > 1), 2),
    ),
    address_clamped_at_the_last_but_one_slot=(WRITE, clamped),
    tokens_dropped_when_the_chunk_is_long=(
        WRITE,
        lambda m: m * (np.arange(m.shape[-1]) < 2),
    ),
)(inputs)
in_memory(
    "program",
    # the same rows change, each with another token's content: only T > 1 shows it
    tokens_of_a_chunk_written_in_reverse=(WRITE, lambda m: m[..., ::-1].copy()),
    every_token_of_a_chunk_gets_the_first_position=(
        ROPE,
        lambda x: x[:, :, :1].repeat(x.shape[2], 2),
    ),
    future_visible_within_a_chunk=(MASK, lambda m: m[:, :, -1:].repeat(m.shape[2], 2)),
    mask_of_minus_infinity_times_zero=(MASK, infinite),
)(inputs)
in_memory(
    "host",
    rope_turns_the_other_way=("rope_sin", np.negative),
    rope_frequencies_in_reverse=(ROPE, lambda x: x[..., ::-1].copy()),
    mask_of_ones_and_zeros=(MASK, lambda m: m == 0),
    future_left_visible=(MASK, np.zeros_like),
    mask_blocks_the_last_row=(MASK, last_row_blocked),
)(inputs)
in_memory("stale_rows", mask_too_weak_to_hide_stale_rows=(MASK, lambda m: m / 1e3))(
    inputs
)
# batches: what the first sequence has stands for all
in_memory(
    "program",
    "batch",
    every_sequence_gets_the_first_one_s_rope=(ROPE, lambda x: x[:1].repeat(len(x), 0)),
    every_sequence_gets_the_first_one_s_mask=(MASK, lambda m: m[:1].repeat(len(m), 0)),
    the_last_sequence_writes_where_the_first_does=(WRITE, first_written),
    sequences_see_what_any_of_them_sees=(
        MASK,
        lambda m: m.max(0, keepdims=True).repeat(len(m), 0),
    ),
)(inputs)
in_memory(
    "write_address",
    "ring",
    ring_written_one_row_late=("kv_write_mask_local", lambda m: np.roll(m, 1, 2)),
)(inputs)
in_memory(
    "host", "ring", ring_mask_off_by_one=("attn_mask_local", lambda m: np.roll(m, 1, 3))
)(inputs)


@in_memory(
    "host",
    # keys drift further from the golden's with every position
    rope_base_slightly_off=(lambda p, inv: p * inv**1.02,),
    rope_of_the_wrong_base=(lambda p, inv: p * inv**1.2,),
    rope_off_by_one_past_48=(lambda p, inv: (p + (p >= 48)) * inv,),
    rope_left_out=(lambda p, inv: p * inv * 0,),
)
def turned(decoder, angles):
    """Other angles of rope, by positions and inverse frequencies."""
    inv = np.array(decoder.manifest.rope[0].inv_freq, np.float32)

    def turn(made, offsets, counts, T):
        positions = (offsets[:, None] + np.arange(T))[:, None, :, None]
        cos, sin = (f(angles(positions, inv)) for f in (np.cos, np.sin))
        made.update(rope_cos=np.float32(cos), rope_sin=np.float32(sin))

    host(decoder, turn)


def rope_at(decoder, position: Callable) -> None:
    """Takes rope from other positions: position(offsets, counts, T)."""
    original = decoder.host.inputs

    def elsewhere(made, offsets, counts, T):
        last = decoder.options.max_seq_len - T
        moved = np.minimum(position(offsets, counts, T), last)
        other = original(moved, counts, T)
        made |= {name: other[name] for name in ROPE.split()}

    host(decoder, elsewhere)


in_memory(
    "host",
    rope_uses_the_offset_after_the_update=(
        lambda offsets, counts, T: offsets + counts,
    ),
    rope_frozen_past_32=(lambda offsets, counts, T: np.minimum(offsets, 32 - T),),
)(rope_at)


@in_memory("host")
def a_token_does_not_see_itself(decoder):
    def blind(made, *_):
        own = made[WRITE].transpose(0, 1, 3, 2) > 0
        made[MASK] = np.where(own, np.float32(-1e4), made[MASK])

    host(decoder, blind)


@in_memory("host", window_of_eight_tokens=(8,), attention_limited_to_40_rows=(40,))
def limit_attention(decoder, rows):
    """Blocks positions this many or more before a token."""

    def window(made, offsets, counts, T):
        positions = (offsets[:, None] + np.arange(T))[:, None, :, None]
        behind = positions - np.arange(made[MASK].shape[-1])
        made[MASK] = np.where(behind < rows, made[MASK], np.float32(-1e4))

    host(decoder, window)


@in_memory("program", "slice")
def slice_written_one_row_before_the_last(decoder):
    def early(made, offsets, counts, T):
        made["pos"] = np.minimum(made["pos"], decoder.options.max_seq_len - T - 1)

    host(decoder, early)


@in_memory("host", "ring")
def local_rope_for_global_layers(decoder):
    host(decoder, lambda made, *_: made.update(rope_cos_global=made["rope_cos_local"]))


# Write addresses


in_memory(
    "write_address",
    write_address_off_by_one_in_the_last_layer_only=(
        [-1],
        WRITE,
        lambda m: np.roll(m, 1, 2),
    ),
)(fed)


@in_memory("write_address", "fixed")
def padding_written_as_content(decoder):
    original, S = decoder.host.inputs, decoder.options.max_seq_len
    decoder.host.inputs = lambda offsets, counts, T: original(
        offsets, np.minimum(T, S - offsets), T
    )


@in_memory("state_life")
def position_past_the_cache_is_clamped(decoder):
    original, S = decoder.host.inputs, decoder.options.max_seq_len
    decoder.host.inputs = lambda offsets, counts, T: original(
        np.minimum(offsets, S - T), counts, T
    )


@in_memory("write_address")
def state_never_written(decoder):
    for step in steps(decoder, 1, "write_state"):
        step.function = lambda **_: None


@in_memory("write_address")
def only_the_first_head_is_written(decoder):
    def first_head(arguments):
        old, new = arguments["input"].value, arguments["data"]
        return arguments | {"data": torch.cat([new[:, :1], old[:, 1:]], dim=1)}

    for step in steps(decoder, 0, "write_state"):
        wrap(step, before=first_head)


@in_memory("stale_rows")
def rows_added_instead_of_replaced(decoder):
    for step in steps(decoder, 0, "sub", "self_attn"):
        # 1 − Σ write mask: what is kept of the old rows
        if step.op.outputs[0][1].shape[-1] == 1:
            wrap(step, after=torch.ones_like)


@in_memory("program")
def keys_and_values_swapped(decoder):
    names = {"k_state": "v_state", "v_state": "k_state"}
    for step in decoder.layers[2].executable.body.steps:
        step.operands = [
            (name, names.get(source, source) if isinstance(source, str) else source, a)
            for name, source, a in step.operands
        ]


# Life of states


@in_memory("state_life")
def a_new_sequence_gets_the_old_state(decoder):
    for model in decoder.layers:
        made = model.make_state()
        model.make_state = lambda made=made: made


@in_memory("write_address")
def a_new_state_for_every_token(decoder):
    for model in decoder.layers:
        around(
            model, lambda predict, inputs, _, m=model: predict(inputs, m.make_state())
        )


@in_memory("state_life")
def all_states_of_a_model_are_one(decoder):
    for model in decoder.layers:
        shared = model.make_state()
        around(model, lambda predict, inputs, _, s=shared: predict(inputs, s))


@in_memory("stale_rows", nan_hidden_by_a_finite_read=(torch.nan_to_num,))
@in_memory(
    "write_address",
    subnormal_numbers_flushed_by_a_read=(
        lambda value: torch.where(value.abs() < 2**-14, 0.0, value),
    ),
)
def read(decoder, change):
    for layer in range(len(decoder.layers)):
        for step in steps(decoder, layer, "read_state"):
            wrap(step, after=change)


@in_memory("program")
def cache_rows_rounded_again_at_every_call(decoder):
    # a quantized cache that is read, dequantized and stored anew: the oldest rows suffer most
    rng = np.random.default_rng(0)

    def worn(predict, inputs, state):
        outputs = predict(inputs, state)
        for name in state.shard.states:
            rows = state.read(name)
            noise = 1 + 0.02 * rng.standard_normal(rows.shape)
            state.write(name, (rows * noise).astype(rows.dtype))
        return outputs

    for model in decoder.layers:
        around(model, worn)


@in_memory("program")
def a_value_head_damaged_past_row_48(decoder):
    def damaged(value):
        value = value.clone()
        value[:, 0, 48:] *= 0.5
        return value

    for step in steps(decoder, 1, "read_state"):
        if step.operands[0][1] == "v_state":
            wrap(step, after=damaged)


def last_row_twice(value):
    value = value.clone()
    value[:, :, 62] = value[:, :, 63]
    return value


in_memory(
    "program",
    the_newest_row_read_twice_near_the_end=(2, "read_state", "", last_row_twice, -1),
)(result)


# Rope in a program


@in_memory("program")
def rope_on_keys_but_not_on_queries(decoder):
    # queries are rotated first
    halves = steps(decoder, 1, "concat", "self_attn")[0].operands[0][1]
    for name in halves:
        step = making(decoder, 1, name)
        wrap(step, before=lambda given: given | {"y": given["y"] * 0})
