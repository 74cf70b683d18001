"""Faults of caches that are kept, restored and batched, each after a bug seen in the wild; the
matrix must turn RED.

`FAULTS[name](patch, decoder, together)` changes a decoder of batch 1, one of a batch, or what both
stand on.
"""

from dataclasses import replace

import numpy as np
from faults import every_sequences, host

from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, is_cache
from workbench.decode import Sequences, store
from workbench.decode import snapshot as snapshots
from workbench.decode.snapshot import Snapshot

FAULTS, ZAYA = {}, {"side_states_are_not_saved"}  # name → plant; those of side states


def fault(plant):
    """Registers a function of (decoder, together)."""
    FAULTS[plant.__name__] = lambda patch, *decoders: plant(*decoders)
    return plant


def instead_of(place, name: str):
    """Registers a function that is called in the place of another one, which is its first
    argument."""

    def register(function):
        def plant(patch, *decoders):
            original = getattr(place, name)

            def planted(*arguments):
                return function(original, *arguments)

            patch.setattr(place, name, planted)

        FAULTS[function.__name__] = plant
        return function

    return register


@instead_of(Sequences, "put")
def merge_breaks_at_unaligned_lengths(put, seqs, seq, snapshot):
    """The batch-2 report: after a merge at a length no step divides, the first token is another
    one."""
    put(seqs, seq, snapshot)
    is_merge = snapshot and len(seqs.ids) > 1
    for state, name in seqs.named_states if is_merge and snapshot.offset % 7 else ():
        if is_cache(name):
            value = state.read(name)
            value[seq, 0] = 0
            state.write(name, value)


@fault
def appends_at_the_longest_row_after_one_left(decoder, together):
    original = together.host.inputs

    def longest(made, offsets, counts, T):
        if (counts == 0).any() and offsets.max() + T <= together.options.max_seq_len:
            shifted = original(np.full_like(offsets, offsets.max()), counts, T)
            made |= {n: v for n, v in shifted.items() if n.startswith(KV_WRITE_MASK)}

    host(together, longest)


@fault
def rope_uses_the_offset_after_the_update(decoder, together):
    S = together.options.max_seq_len
    for each in (decoder, together):

        def later(made, offsets, counts, T, original=each.host.inputs):
            if offsets.min() and (offsets + counts + T).max() <= S:
                late = original(offsets + counts, counts, T)
                made |= {n: v for n, v in late.items() if n.startswith("rope")}

        host(each, later)


@instead_of(Snapshot, "trim")
def trim_takes_the_first_tokens(trim, snapshot, count):
    ids = snapshot.ids[: snapshot.offset - count]
    states = {n: v[:, count:] for n, v in snapshot.states.items()}
    return replace(snapshot, ids=ids, states=states)


@instead_of(store, "save")
def padding_is_saved_as_content(save, folder, name, snapshot, *format):
    more = -snapshot.offset % 8
    states = {
        n: np.pad(v, ((0, 0), (0, more), (0, 0))) for n, v in snapshot.states.items()
    }
    ids = (*snapshot.ids, *[0] * more)
    return save(folder, name, replace(snapshot, ids=ids, states=states), *format)


@instead_of(store, "find")
def a_hit_leaves_nothing_to_run(find, folder, ids, identity):
    snapshot, rest = find(folder, [*ids, 0], identity)
    return snapshot, rest[:-1]


@instead_of(Snapshot, "trim")
def the_last_token_is_written_twice(trim, snapshot, count):
    return snapshot


def keys_of_one_save_and_values_of_another(patch, *_):
    load, last = store.load, {}

    def mixed(folder, name):
        found = load(folder, name)
        values = {n: v for n, v in found.states.items() if n.endswith("v_state")}
        for n, v in last.items():
            if v.shape[1] >= values[n].shape[1]:
                found.states[n] = v[:, : values[n].shape[1]]
        last.update(values)
        return found

    patch.setattr(store, "load", mixed)


FAULTS["keys_of_one_save_and_values_of_another"] = (
    keys_of_one_save_and_values_of_another
)


@fault
def slots_see_each_other(decoder, together):
    def swapped(made, offsets, counts, T):
        for name in (n for n in made if n.startswith(ATTN_MASK)):
            made[name] = np.repeat(made[name].max(0, keepdims=True), len(offsets), 0)

    host(together, swapped)


@fault
def slots_are_swapped_on_restore(decoder, together):
    new_sequences = together.new_sequences

    def swapped(after=None):
        return new_sequences(after[::-1] if isinstance(after, list) else after)

    together.new_sequences = swapped


@fault
def an_ended_row_keeps_decoding(decoder, together):
    def change(seqs):
        step = seqs.step

        def all_rows(chunk):
            logits, times = step([tokens or [0] for tokens in chunk])
            return logits[::-1], times

        seqs.step = all_rows

    every_sequences(together, change)


@instead_of(store, "decode")
def scales_of_another_head(decode, tensors):
    pairs = tensors.items()
    return decode({n: v[::-1] if n.endswith(store.SCALE) else v for n, v in pairs})


@instead_of(Sequences, "snapshot")
def side_states_are_not_saved(take, *arguments):
    snapshot = take(*arguments)
    states = {n: v * is_cache(n) for n, v in snapshot.states.items()}
    return replace(snapshot, states=states)


@instead_of(Sequences, "put")
def positions_start_again(put, seqs, seq, snapshot):
    put(seqs, seq, snapshot)
    if snapshot:
        seqs.ids[seq] = []


@instead_of(snapshots, "fill")
def strided_view(fill, target, rows, offset):
    """Rows read through a strided view of a buffer that grows in steps, as if it were contiguous."""
    buffer = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 256), (0, 0)))
    fill(target, buffer.reshape(-1)[: rows.size].reshape(rows.shape), offset)


@fault
def dropped_tokens(alone, decoder):
    """A merged buffer has no room, and tokens that do not fit are dropped: min(new, room)."""

    new_sequences = decoder.new_sequences
    room = [decoder.options.max_seq_len]

    def merged(after=None):
        seqs = new_sequences(after)
        room[0] = int(seqs.offsets.max()) or decoder.options.max_seq_len
        return seqs

    def short(made, *_):
        for name in made:
            if name.startswith(KV_WRITE_MASK):
                made[name][:, :, room[0] :] = 0

    decoder.new_sequences = merged
    host(decoder, short)


@instead_of(Sequences, "put")
def aliased_entry(put, seqs, seq, snapshot):
    """Memory hands out the stored arrays themselves, and a request clears what it has taken in."""
    put(seqs, seq, snapshot)
    for value in snapshot.states.values() if snapshot else ():
        value[:] = 0


@instead_of(store, "decode")
def groups_along_tokens(decode, tensors):
    """Quantization groups run along tokens, and a slice loses the scales of a group it cuts."""

    def along_tokens(rows):
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
            states[name] = along_tokens(states[name])
    return states
