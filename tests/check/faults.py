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
    journals 72 and 100 of it, golden and shard share a wrong rope test_faults_artefacts
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from miltorch.program import Ref
from workbench import Decoder


@dataclass(frozen=True)
class Fault:
    """`gate` is made for this kind of fault and must be RED once it is planted; others may be as
    well. `bundle`: where it is planted (see `cases.BASES`)."""

    gate: str
    plant: Callable
    bundle: str


def registry() -> tuple[dict[str, Fault], Callable]:
    """Faults by name, and the decorator that adds one."""
    faults = {}

    def fault(gate: str, bundle: str = "llama", name: str = ""):
        def register(plant):
            key = name or plant.__name__
            assert key not in faults
            faults[key] = Fault(gate, plant, bundle)
            return plant

        return register

    return faults, fault


FAULTS, fault = registry()


def steps(decoder: Decoder, layer: int, kind: str, module: str = ""):
    """Steps of one single-layer shard by MIL op and source module (a suffix of its path)."""
    model = decoder.layers[layer]
    found = [
        s
        for s in model.executable.body.steps
        if s.op.kind == kind
        and model.shard.modules.get(s.outputs[0][0] if s.outputs else "", "").endswith(
            module
        )
    ]
    assert found, (kind, module)
    return found


def wrap(step, after: Callable | None = None, before: Callable | None = None) -> None:
    """Changes what a step returns, or the arguments it is called with."""
    original = step.function

    def changed(**arguments):
        result = original(**(before(arguments) if before else arguments))
        return after(result) if after else result

    step.function = changed


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


def host(
    decoder: Decoder, change: Callable[[dict, np.ndarray, np.ndarray, int], None]
) -> None:
    """Changes the inputs the host makes for a call: change(inputs, offsets, counts, T), in
    place."""
    original = decoder.host.inputs

    def inputs(offsets, counts, T, *rest):
        made = {
            name: value.copy()
            for name, value in original(offsets, counts, T, *rest).items()
        }
        change(made, offsets, counts, T)
        return made

    decoder.host.inputs = inputs


def constant(
    decoder: Decoder,
    layer: int,
    tensor: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
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


def changed(name: str, layer: int, tensor: str, change: Callable, bundle="llama"):
    """A fault of one weight of a layer, which gate `program` shows."""

    @fault("program", bundle, name)
    def plant(decoder):
        constant(decoder, layer, tensor, change)


def altered(
    name: str,
    layer: int,
    kind: str,
    module: str = "",
    *,
    gate: str = "program",
    bundle: str = "llama",
    which: int = 0,
    function: Callable | None = None,
    **change: Callable,
) -> None:
    """A fault of one step of a layer, of its kind and module the `which`: it is another
    `function`, or `wrap` changes it."""

    @fault(gate, bundle, name)
    def plant(decoder):
        step = steps(decoder, layer, kind, module)[which]
        if function:
            step.function = function
        wrap(step, **change)


# The host's inputs


def made(name: str, gate: str, inputs: str, change: Callable, bundle: str = "llama"):
    """A fault of inputs, their names side by side: change(input) gives others."""

    @fault(gate, bundle, name)
    def plant(decoder):
        def replace(made, *_):
            made.update({n: np.float32(change(made[n])) for n in inputs.split()})

        host(decoder, replace)


def blocked(mask, *rows):
    mask[..., list(rows)] = -1e4
    return mask


def clamped(mask):
    mask[:, :, -2] = np.maximum(mask[:, :, -2], mask[:, :, -1])
    mask[:, :, -1] = 0
    return mask


def first_written(mask):
    mask[-1] = mask[0]
    return mask


def infinite(mask):
    with np.errstate(invalid="ignore"):
        return (mask != 0) * np.float32(-np.inf)


ROPE = "rope_cos rope_sin"
WRITE, MASK = "kv_write_mask", "attn_mask"
made(
    "write_address_off_by_one_at_t_above_1",
    "write_address",
    WRITE,
    lambda m: np.roll(m, int(m.shape[-1] > 1), 2),
)
made("address_clamped_at_the_last_but_one_slot", "write_address", WRITE, clamped)
made(
    "tokens_dropped_when_the_chunk_is_long",
    "write_address",
    WRITE,
    lambda m: m * (np.arange(m.shape[-1]) < 2),
)
# the same rows change, each with another token's content: only T > 1 shows it
made(
    "tokens_of_a_chunk_written_in_reverse",
    "program",
    WRITE,
    lambda m: m[..., ::-1].copy(),
)
made(
    "every_token_of_a_chunk_gets_the_first_position",
    "program",
    ROPE,
    lambda x: x[:, :, :1].repeat(x.shape[2], 2),
)
made("rope_turns_the_other_way", "host", "rope_sin", np.negative)
made("rope_frequencies_in_reverse", "host", ROPE, lambda x: x[..., ::-1].copy())
made("mask_of_ones_and_zeros", "host", MASK, lambda m: m == 0)
made("future_left_visible", "host", MASK, np.zeros_like)
made(
    "future_visible_within_a_chunk",
    "program",
    MASK,
    lambda m: m[:, :, -1:].repeat(m.shape[2], 2),
)
made("mask_too_weak_to_hide_stale_rows", "stale_rows", MASK, lambda m: m / 1e3)
made("mask_of_minus_infinity_times_zero", "program", MASK, infinite)
made("mask_blocks_the_last_row", "host", MASK, lambda m: blocked(m, -1))
# batches: what the first sequence has stands for all
made(
    "every_sequence_gets_the_first_one_s_rope",
    "program",
    ROPE,
    lambda x: x[:1].repeat(len(x), 0),
    "batch",
)
made(
    "every_sequence_gets_the_first_one_s_mask",
    "program",
    MASK,
    lambda m: m[:1].repeat(len(m), 0),
    "batch",
)
made(
    "the_last_sequence_writes_where_the_first_does",
    "program",
    WRITE,
    first_written,
    "batch",
)
made(
    "sequences_see_what_any_of_them_sees",
    "program",
    MASK,
    lambda m: m.max(0, keepdims=True).repeat(len(m), 0),
    "batch",
)
made(
    "ring_written_one_row_late",
    "write_address",
    "kv_write_mask_local",
    lambda m: np.roll(m, 1, 2),
    "ring",
)
made(
    "ring_mask_off_by_one",
    "host",
    "attn_mask_local",
    lambda m: np.roll(m, 1, 3),
    "ring",
)


def turned(name: str, angles: Callable) -> None:
    """A fault of rope: angles(positions, inverse frequencies)."""

    @fault("host", name=name)
    def plant(decoder):
        inv = np.array(decoder.manifest.rope[0].inv_freq, np.float32)

        def turn(made, offsets, counts, T):
            positions = (offsets[:, None] + np.arange(T))[:, None, :, None]
            cos, sin = (f(angles(positions, inv)) for f in (np.cos, np.sin))
            made.update(rope_cos=np.float32(cos), rope_sin=np.float32(sin))

        host(decoder, turn)


# keys drift further from the golden's with every position
turned("rope_base_slightly_off", lambda p, inv: p * inv**1.02)
turned("rope_of_the_wrong_base", lambda p, inv: p * inv**1.2)
turned("rope_off_by_one_past_48", lambda p, inv: (p + (p >= 48)) * inv)
turned("rope_left_out", lambda p, inv: p * inv * 0)


# Write addresses


@fault("write_address")
def write_address_off_by_one_in_the_last_layer_only(decoder):
    def late(predict, inputs, state):
        mask = np.roll(inputs["kv_write_mask"], 1, 2)
        return predict(inputs | {"kv_write_mask": mask}, state)

    around(decoder.layers[-1], late)


@fault("write_address", bundle="fixed")
def padding_written_as_content(decoder):
    original = decoder.host.inputs
    decoder.host.inputs = lambda offsets, counts, T, *rest: original(
        offsets, np.minimum(T, decoder.options.max_seq_len - offsets), T, *rest
    )


@fault("write_address")
def state_never_written(decoder):
    for step in steps(decoder, 1, "write_state"):
        step.function = lambda **_: None


@fault("write_address")
def only_the_first_head_is_written(decoder):
    def first_head(arguments):
        old, new = arguments["input"].value, arguments["data"]
        return arguments | {"data": torch.cat([new[:, :1], old[:, 1:]], dim=1)}

    for step in steps(decoder, 0, "write_state"):
        wrap(step, before=first_head)


@fault("stale_rows")
def rows_added_instead_of_replaced(decoder):
    for step in steps(decoder, 0, "sub", "self_attn"):
        # 1 − Σ write mask: what is kept of the old rows
        if step.op.outputs[0][1].shape[-1] == 1:
            wrap(step, after=torch.ones_like)


@fault("program")
def keys_and_values_swapped(decoder):
    names = {"k_state": "v_state", "v_state": "k_state"}
    for step in decoder.layers[2].executable.body.steps:
        step.operands = [
            (
                parameter,
                names.get(source, source) if isinstance(source, str) else source,
                a,
            )
            for parameter, source, a in step.operands
        ]


# Life of states


@fault("state_life")
def a_new_sequence_gets_the_old_state(decoder):
    for model in decoder.layers:
        made = model.make_state()
        model.make_state = lambda made=made: made


@fault("write_address")
def a_new_state_for_every_token(decoder):
    for model in decoder.layers:
        around(
            model, lambda predict, inputs, _, m=model: predict(inputs, m.make_state())
        )


@fault("state_life")
def all_states_of_a_model_are_one(decoder):
    for model in decoder.layers:
        shared = model.make_state()
        around(model, lambda predict, inputs, _, s=shared: predict(inputs, s))


@fault("state_life")
def position_past_the_cache_is_clamped(decoder):
    inputs = decoder.host.inputs
    S = decoder.options.max_seq_len
    decoder.host.inputs = lambda offsets, counts, T, *rest: inputs(
        np.minimum(offsets, S - T), counts, T, *rest
    )


@fault("stale_rows")
def nan_hidden_by_a_finite_read(decoder):
    for layer in range(len(decoder.layers)):
        for step in steps(decoder, layer, "read_state"):
            wrap(step, after=torch.nan_to_num)


@fault("write_address")
def subnormal_numbers_flushed_by_a_read(decoder):
    def flushed(value):
        return torch.where(value.abs() < 2**-14, 0.0, value)

    for layer in range(len(decoder.layers)):
        for step in steps(decoder, layer, "read_state"):
            wrap(step, after=flushed)


@fault("program")
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


# Rope


@fault("host")
def rope_uses_the_offset_after_the_update(decoder):
    original = decoder.host.inputs

    def inputs(offsets, counts, T, *rest):
        late = original(
            np.minimum(offsets + counts, decoder.options.max_seq_len - T),
            counts,
            T,
            *rest,
        )
        ropes = {n: v for n, v in late.items() if n.startswith("rope")}
        return original(offsets, counts, T, *rest) | ropes

    decoder.host.inputs = inputs


@fault("program")
def rope_on_keys_but_not_on_queries(decoder):
    # queries are rotated first
    for step in steps(decoder, 1, "concat", "self_attn")[:1]:
        halves = step.operands[0][1]
        a, b = (
            next(
                s
                for s in decoder.layers[1].executable.body.steps
                if s.outputs and s.outputs[0][0] == h
            )
            for h in halves
        )
        wrap(a, before=lambda g: {"x": g["x"] * 1, "y": g["y"] * 0})
        wrap(b, before=lambda g: {"x": g["x"], "y": g["y"] * 0})


# Masks


@fault("host")
def a_token_does_not_see_itself(decoder):
    def blind(made, offsets, counts, T):
        own = made["kv_write_mask"].transpose(0, 1, 3, 2) > 0
        made["attn_mask"] = np.where(own, np.float32(-1e4), made["attn_mask"])

    host(decoder, blind)


@fault("host")
def window_of_eight_tokens(decoder):
    limit_attention(decoder, 8)


def limit_attention(decoder: Decoder, rows: int) -> None:
    """Blocks positions this many or more before a token."""

    def window(made, offsets, counts, T):
        behind = (offsets[:, None] + np.arange(T))[:, None, :, None] - np.arange(
            made["attn_mask"].shape[-1]
        )
        made["attn_mask"] = np.where(behind < rows, made["attn_mask"], np.float32(-1e4))

    host(decoder, window)


# Batches: what the first sequence has stands for all


altered(
    "sequences_exchanged_in_one_layer",
    *(1, "conv", "down_proj"),
    bundle="batch",
    after=lambda y: y.flip(0),
)


# Positions far from the first ones


@fault("host")
def rope_frozen_past_32(decoder):
    original = decoder.host.inputs

    def inputs(offsets, counts, T, *rest):
        made = original(offsets, counts, T, *rest)
        still = original(np.minimum(offsets, 32 - T), counts, T, *rest)
        late = (offsets > 32 - T)[:, None, None, None]
        ropes = {n: np.where(late, still[n], made[n]) for n in ("rope_cos", "rope_sin")}
        return made | ropes

    decoder.host.inputs = inputs


@fault("host")
def attention_limited_to_40_rows(decoder):
    limit_attention(decoder, 40)


@fault("program")
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


altered(
    "the_newest_row_read_twice_near_the_end",
    *(2, "read_state"),
    which=-1,
    after=last_row_twice,
)


# What the host makes for other ways to write, and for experts that it picks


@fault("program", bundle="slice")
def slice_written_one_row_before_the_last(decoder):
    def clamped(made, offsets, counts, T):
        made["pos"] = np.minimum(made["pos"], decoder.options.max_seq_len - T - 1)

    host(decoder, clamped)


@fault("host", bundle="ring")
def local_rope_for_global_layers(decoder):
    host(decoder, lambda made, *_: made.update(rope_cos_global=made["rope_cos_local"]))


@fault("program", bundle="routed")
def expert_of_the_lowest_score_picked(decoder):
    for model in decoder.layers:
        for step in model.executable.body.steps:
            if step.outputs and step.outputs[0][0] == "router_scores":
                wrap(step, after=torch.neg)
