"""Faults of the inputs that the host computes for a loaded decoder: masks, write addresses and
rotary tables."""

from collections.abc import Callable

import numpy as np

from faults.decoders import Plant, change_inputs, edit_input, edit_inputs
from faults.fault import Fault

COS, SIN = "rope_cos", "rope_sin"
ROPE = (COS, SIN)
WRITE, MASK = "kv_write_mask", "attn_mask"
BLOCKED = np.float32(-1e4)


# Edits of one array. Axes: rope [B, 1, T, rope_half], MASK [B, 1, T, S], WRITE [B, 1, S, T]


def roll_if_several_tokens(write):
    return np.roll(write, int(write.shape[-1] > 1), 2)


def merge_last_two_rows(write):
    write[:, :, -2] = np.maximum(write[:, :, -2], write[:, :, -1])
    write[:, :, -1] = 0
    return write


def drop_tokens_after_the_second(write):
    return write * (np.arange(write.shape[-1]) < 2)


def repeat_first_token(rope):
    return rope[:, :, :1].repeat(rope.shape[2], 2)


def repeat_last_token(mask):
    return mask[:, :, -1:].repeat(mask.shape[2], 2)


def multiply_by_infinity(mask):
    return (mask != 0) * np.float32(-np.inf)


def block_last_row(mask):
    mask[..., -1] = BLOCKED
    return mask


def repeat_first_sequence(array):
    return array[:1].repeat(len(array), 0)


def write_last_sequence_as_first(write):
    write[-1] = write[0]
    return write


def share_what_any_sequence_sees(mask):
    return mask.max(0, keepdims=True).repeat(len(mask), 0)


# Edits of several inputs


def compute_positions(offsets: np.ndarray, T: int) -> np.ndarray:
    """[B, 1, T, 1]"""
    return (offsets[:, None] + np.arange(T))[:, None, :, None]


def compute_rope(angles: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Plant:
    """Takes rope from `angles(positions, inv_freq)`."""

    def plant(decoder):
        inv_freq = np.array(decoder.manifest.rope[0].inv_freq, np.float32)

        def change(inputs, offsets, counts, T):
            radians = angles(compute_positions(offsets, T), inv_freq)
            inputs[COS] = np.float32(np.cos(radians))
            inputs[SIN] = np.float32(np.sin(radians))

        change_inputs(decoder, change)

    return plant


def take_rope_at(
    positions: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
) -> Plant:
    """Takes rope from other first positions, `positions(offsets, counts, T)`."""

    def plant(decoder):
        original = decoder.host.inputs

        def change(inputs, offsets, counts, T):
            last = decoder.options.max_seq_len - T
            others = np.minimum(positions(offsets, counts, T), last)
            other_inputs = original(others, counts, T)
            for name in ROPE:
                inputs[name] = other_inputs[name]

        change_inputs(decoder, change)

    return plant


def block_own_row(decoder):
    def change(inputs, offsets, counts, T):
        is_written = inputs[WRITE].transpose(0, 1, 3, 2) > 0
        inputs[MASK] = np.where(is_written, BLOCKED, inputs[MASK])

    change_inputs(decoder, change)


def limit_attention(rows: int) -> Plant:
    """Blocks positions that lie `rows` or more before a token."""

    def change(inputs, offsets, counts, T):
        S = inputs[MASK].shape[-1]
        distance = compute_positions(offsets, T) - np.arange(S)
        inputs[MASK] = np.where(distance < rows, inputs[MASK], BLOCKED)

    return lambda decoder: change_inputs(decoder, change)


def write_slice_before_last_row(decoder):
    def change(inputs, offsets, counts, T):
        last = decoder.options.max_seq_len - T
        inputs["pos"] = np.minimum(inputs["pos"], last - 1)

    change_inputs(decoder, change)


def use_local_rope_in_global_layers(decoder):
    def change(inputs, offsets, counts, T):
        inputs["rope_cos_global"] = inputs["rope_cos_local"]

    change_inputs(decoder, change)


FAULTS = [
    Fault(
        "write address off by one at T above 1",
        gate="write_address",
        plant=edit_input(WRITE, roll_if_several_tokens),
    ),
    Fault(
        "address clamped at the last but one slot",
        gate="write_address",
        plant=edit_input(WRITE, merge_last_two_rows),
    ),
    Fault(
        "tokens dropped when the chunk is long",
        gate="write_address",
        plant=edit_input(WRITE, drop_tokens_after_the_second),
    ),
    # the same rows change, each with another token's content: only T > 1 shows it
    Fault(
        "tokens of a chunk written in reverse",
        gate="program",
        plant=edit_input(WRITE, lambda write: write[..., ::-1].copy()),
    ),
    Fault(
        "every token of a chunk gets the first position",
        gate="program",
        plant=edit_inputs(ROPE, repeat_first_token),
    ),
    Fault(
        "future visible within a chunk",
        gate="program",
        plant=edit_input(MASK, repeat_last_token),
    ),
    Fault(
        "mask of minus infinity times zero",
        gate="program",
        plant=edit_input(MASK, multiply_by_infinity),
    ),
    Fault("rope turns the other way", gate="host", plant=edit_input(SIN, np.negative)),
    Fault(
        "rope frequencies in reverse",
        gate="host",
        plant=edit_inputs(ROPE, lambda rope: rope[..., ::-1].copy()),
    ),
    Fault(
        "mask of ones and zeros",
        gate="host",
        plant=edit_input(MASK, lambda mask: mask == 0),
    ),
    Fault("future left visible", gate="host", plant=edit_input(MASK, np.zeros_like)),
    Fault(
        "mask blocks the last row", gate="host", plant=edit_input(MASK, block_last_row)
    ),
    Fault(
        "mask too weak to hide stale rows",
        gate="stale_rows",
        plant=edit_input(MASK, lambda mask: mask / 1e3),
    ),
    # batches
    Fault(
        "every sequence gets the first one's rope",
        gate="program",
        bundle="batch",
        plant=edit_inputs(ROPE, repeat_first_sequence),
    ),
    Fault(
        "every sequence gets the first one's mask",
        gate="program",
        bundle="batch",
        plant=edit_input(MASK, repeat_first_sequence),
    ),
    Fault(
        "the last sequence writes where the first does",
        gate="program",
        bundle="batch",
        plant=edit_input(WRITE, write_last_sequence_as_first),
    ),
    Fault(
        "sequences see what any of them sees",
        gate="program",
        bundle="batch",
        plant=edit_input(MASK, share_what_any_sequence_sees),
    ),
    # rings of a sliding window
    Fault(
        "ring written one row late",
        gate="write_address",
        bundle="ring",
        plant=edit_input(
            "kv_write_mask_local", lambda write: np.roll(write, 1, axis=2)
        ),
    ),
    Fault(
        "ring mask off by one",
        gate="host",
        bundle="ring",
        plant=edit_input("attn_mask_local", lambda mask: np.roll(mask, 1, axis=3)),
    ),
    # keys drift further from the golden's with every position
    Fault(
        "rope base slightly off",
        gate="host",
        plant=compute_rope(lambda positions, inv_freq: positions * inv_freq**1.02),
    ),
    Fault(
        "rope of the wrong base",
        gate="host",
        plant=compute_rope(lambda positions, inv_freq: positions * inv_freq**1.2),
    ),
    Fault(
        "rope off by one past 48",
        gate="host",
        plant=compute_rope(
            lambda positions, inv_freq: (positions + (positions >= 48)) * inv_freq
        ),
    ),
    Fault(
        "rope left out",
        gate="host",
        plant=compute_rope(lambda positions, inv_freq: positions * inv_freq * 0),
    ),
    Fault(
        "rope uses the offset after the update",
        gate="host",
        plant=take_rope_at(lambda offsets, counts, T: offsets + counts),
    ),
    Fault(
        "rope frozen past 32",
        gate="host",
        plant=take_rope_at(lambda offsets, counts, T: np.minimum(offsets, 32 - T)),
    ),
    Fault("a token does not see itself", gate="host", plant=block_own_row),
    Fault("window of eight tokens", gate="host", plant=limit_attention(8)),
    Fault("attention limited to 40 rows", gate="host", plant=limit_attention(40)),
    Fault(
        "slice written one row before the last",
        gate="program",
        bundle="slice",
        plant=write_slice_before_last_row,
    ),
    Fault(
        "local rope for global layers",
        gate="host",
        bundle="ring",
        plant=use_local_rope_in_global_layers,
    ),
]
