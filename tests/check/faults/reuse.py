"""Faults of caches that are stored, restored and batched. Each stands for a bug that others
reported, and gate `reuse` must be RED.

They are not in `faults.FAULTS`: a fault here is planted in a decoder of batch 1, in one of a batch,
or in the code that both run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from faults.decoders import change_inputs, change_sequences
from workbench import Decoder
from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, is_cache
from workbench.decode import Sequences, sequences, store
from workbench.decode.snapshot import Snapshot

ReusePlant = Callable[[pytest.MonkeyPatch, Decoder, Decoder], None]


@dataclass(frozen=True)
class ReuseFault:
    """`plant(patch, single, batched)` changes the decoder of batch 1, the decoder of a batch, or,
    through `patch`, what both run."""

    name: str
    plant: ReusePlant
    checkpoint: str = "tiny-llama"

    @property
    def slug(self) -> str:
        """The name as one word."""
        return self.name.replace(" ", "_")


def wrap_function(place, attribute: str, function: Callable) -> ReusePlant:
    """Puts `function` in the place of a function or method, which it gets as its first argument,
    before the arguments of the call. `place` is the class or module that has it."""

    def plant(patch, single, batched):
        original = getattr(place, attribute)

        def wrapped(*arguments):
            return function(original, *arguments)

        patch.setattr(place, attribute, wrapped)

    return plant


# Merging and batches


def clear_first_row_at_unaligned_lengths(put, seqs, seq, snapshot):
    """The batch-2 report: after a merge at a length that no step divides, the first token is
    another one."""
    put(seqs, seq, snapshot)
    if not snapshot or len(seqs.ids) == 1 or snapshot.offset % 7 == 0:
        return
    for state, name in seqs.named_states:
        if is_cache(name):
            value = state.read(name)
            value[seq, 0] = 0
            state.write(name, value)


def append_at_longest_row(patch, single, batched):
    original = batched.host.inputs

    def change(inputs, offsets, counts, T):
        has_idle_row = (counts == 0).any()
        if has_idle_row and offsets.max() + T <= batched.options.max_seq_len:
            shifted = original(np.full_like(offsets, offsets.max()), counts, T)
            for name, array in shifted.items():
                if name.startswith(KV_WRITE_MASK):
                    inputs[name] = array

    change_inputs(batched, change)


def take_rope_after_update(patch, single, batched):
    S = batched.options.max_seq_len

    def plant_in(decoder):
        original = decoder.host.inputs

        def change(inputs, offsets, counts, T):
            if offsets.min() and (offsets + counts + T).max() <= S:
                for name, array in original(offsets + counts, counts, T).items():
                    if name.startswith("rope"):
                        inputs[name] = array

        change_inputs(decoder, change)

    plant_in(single)
    plant_in(batched)


def share_masks(patch, single, batched):
    def change(inputs, offsets, counts, T):
        for name, mask in inputs.items():
            if name.startswith(ATTN_MASK):
                most = mask.max(0, keepdims=True)
                inputs[name] = np.repeat(most, len(offsets), axis=0)

    change_inputs(batched, change)


def restore_in_reverse(patch, single, batched):
    new_sequences = batched.new_sequences

    def new_sequences_in_reverse(after=None):
        return new_sequences(after[::-1] if isinstance(after, list) else after)

    batched.new_sequences = new_sequences_in_reverse


def decode_ended_rows(patch, single, batched):
    def change(seqs):
        step = seqs.step

        def step_all_rows(chunk):
            logits, times = step([tokens or [0] for tokens in chunk])
            return logits[::-1], times

        seqs.step = step_all_rows

    change_sequences(batched, change)


def drop_tokens_past_merged_length(patch, single, batched):
    """A merged buffer is as long as its longest sequence, and later tokens are dropped."""
    new_sequences = batched.new_sequences
    length = batched.options.max_seq_len

    def new_sequences_of_merged_length(after=None):
        nonlocal length
        seqs = new_sequences(after)
        length = int(seqs.offsets.max()) or batched.options.max_seq_len
        return seqs

    def change(inputs, offsets, counts, T):
        for name, write in inputs.items():
            if name.startswith(KV_WRITE_MASK):
                write[:, :, length:] = 0

    batched.new_sequences = new_sequences_of_merged_length
    change_inputs(batched, change)


# Snapshots


def keep_last_tokens(trim, snapshot, count):
    ids = snapshot.ids[: snapshot.offset - count]
    states = {name: value[:, count:] for name, value in snapshot.states.items()}
    return replace(snapshot, ids=ids, states=states)


def skip_trim(trim, snapshot, count):
    return snapshot


def zero_side_states(take, *arguments):
    snapshot = take(*arguments)
    states = {name: value * is_cache(name) for name, value in snapshot.states.items()}
    return replace(snapshot, states=states)


def restart_positions(put, seqs, seq, snapshot):
    put(seqs, seq, snapshot)
    if snapshot:
        seqs.ids[seq] = []


def fill_from_strided_view(fill, target, rows, offset):
    """Reads rows through a strided view of a buffer that grows in steps, as if they were
    contiguous."""
    buffer = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 256), (0, 0)))
    fill(target, buffer.reshape(-1)[: rows.size].reshape(rows.shape), offset)


def clear_stored_arrays(put, seqs, seq, snapshot):
    """Memory hands out the stored arrays themselves, and a request clears what it has taken in."""
    put(seqs, seq, snapshot)
    for value in snapshot.states.values() if snapshot else ():
        value[:] = 0


# Stores


def save_padding(save, folder, name, snapshot, *format):
    padding = -snapshot.offset % 8
    states = {
        state: np.pad(value, ((0, 0), (0, padding), (0, 0)))
        for state, value in snapshot.states.items()
    }
    ids = (*snapshot.ids, *[0] * padding)
    return save(folder, name, replace(snapshot, ids=ids, states=states), *format)


def find_all_tokens(find, folder, ids, identity):
    snapshot, rest = find(folder, [*ids, 0], identity)
    return snapshot, rest[:-1]


def load_keys_of_the_load_before(patch, single, batched):
    load = store.load
    earlier = {}

    def load_mixed(folder, name):
        snapshot = load(folder, name)
        values = {
            state: value
            for state, value in snapshot.states.items()
            if state.endswith("v_state")
        }
        for state, value in earlier.items():
            length = values[state].shape[1]
            if value.shape[1] >= length:
                snapshot.states[state] = value[:, :length]
        earlier.update(values)
        return snapshot

    patch.setattr(store, "load", load_mixed)


def reverse_scales(decode, tensors):
    return decode(
        {
            name: array[::-1] if name.endswith(store.SCALE) else array
            for name, array in tensors.items()
        }
    )


def group_along_tokens(decode, tensors):
    """Quantization groups run along tokens, and a slice loses the scales of a group it cuts."""

    def quantize_along_tokens(rows):
        whole = rows.shape[1] // store.GROUP * store.GROUP
        result = np.zeros_like(rows)
        if whole:
            turned = np.ascontiguousarray(rows[:, :whole].swapaxes(1, 2))
            values = store.dequantize(*store.quantize(turned))
            result[:, :whole] = values.swapaxes(1, 2)
        return result

    states = decode(tensors)
    for name in filter(is_cache, states):
        if name not in tensors:  # it was quantized
            states[name] = quantize_along_tokens(states[name])
    return states


FAULTS = [
    ReuseFault(
        "merge breaks at unaligned lengths",
        wrap_function(Sequences, "put", clear_first_row_at_unaligned_lengths),
    ),
    ReuseFault("appends at the longest row after one left", append_at_longest_row),
    ReuseFault("rope uses the offset after the update", take_rope_after_update),
    ReuseFault(
        "trim takes the first tokens", wrap_function(Snapshot, "trim", keep_last_tokens)
    ),
    ReuseFault(
        "padding is saved as content", wrap_function(store, "save", save_padding)
    ),
    ReuseFault(
        "a hit leaves nothing to run", wrap_function(store, "find", find_all_tokens)
    ),
    ReuseFault(
        "the last token is written twice", wrap_function(Snapshot, "trim", skip_trim)
    ),
    ReuseFault("keys of one save and values of another", load_keys_of_the_load_before),
    ReuseFault("slots see each other", share_masks),
    ReuseFault("slots are swapped on restore", restore_in_reverse),
    ReuseFault("an ended row keeps decoding", decode_ended_rows),
    ReuseFault(
        "scales of another head",
        wrap_function(store, "states_from_tensors", reverse_scales),
    ),
    ReuseFault(
        "side states are not saved",
        wrap_function(Sequences, "snapshot", zero_side_states),
        checkpoint="tiny-zaya",
    ),
    ReuseFault(
        "positions start again", wrap_function(Sequences, "put", restart_positions)
    ),
    ReuseFault(
        "strided view", wrap_function(sequences, "fill", fill_from_strided_view)
    ),
    ReuseFault("dropped tokens", drop_tokens_past_merged_length),
    ReuseFault("aliased entry", wrap_function(Sequences, "put", clear_stored_arrays)),
    ReuseFault(
        "groups along tokens",
        wrap_function(store, "states_from_tensors", group_along_tokens),
    ),
]
FAULTS_BY_SLUG = {fault.slug: fault for fault in FAULTS}
