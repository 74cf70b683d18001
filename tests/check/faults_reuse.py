"""Faults of caches that are kept, restored and batched, each after a bug seen in the wild; the
matrix must turn RED.

`plant(patch, decoder, together)` changes a decoder of batch 1, one of a batch, or what both stand
on.
"""

from dataclasses import replace

import numpy as np
from faults import host

from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, is_cache
from workbench.decode import snapshot as snapshots
from workbench.decode import store
from workbench.decode.snapshot import Snapshot

FAULTS, ZAYA = {}, set()  # name → plant; those that need side states


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


def zaya(plant):
    ZAYA.add(plant.__name__)
    return fault(plant)


def after_put(patch, change) -> None:
    """change(seqs, seq, snapshot) edits what restoring a snapshot left."""
    put = snapshots.put

    def changed(seqs, seq, snapshot):
        put(seqs, seq, snapshot)
        if snapshot:
            change(seqs, seq, snapshot)

    patch.setattr(snapshots, "put", changed)


@fault
def merge_breaks_at_unaligned_lengths(patch, decoder, together):
    """The batch-2 report: after a merge at a length no step divides, the first token is another
    one."""

    def broken(seqs, seq, snapshot):
        for state, name in seqs.named_states if snapshot.offset % 7 else ():
            if is_cache(name) and seqs.manifest is together.manifest:
                value = state.read(name)
                value[seq, 0] = 0
                state.write(name, value)

    after_put(patch, broken)


@fault
def appends_at_the_longest_row_after_one_left(patch, decoder, together):
    original = together.host.inputs

    def longest(made, offsets, counts, T):
        if (counts == 0).any() and offsets.max() + T <= together.options.max_seq_len:
            shifted = original(np.full_like(offsets, offsets.max()), counts, T)
            made |= {n: v for n, v in shifted.items() if n.startswith(KV_WRITE_MASK)}

    host(together, longest)


@fault
def rope_uses_the_offset_after_the_update(patch, decoder, together):
    S = together.options.max_seq_len
    for each in (decoder, together):

        def later(made, offsets, counts, T, original=each.host.inputs):
            if offsets.min() and (offsets + counts + T).max() <= S:
                late = original(offsets + counts, counts, T)
                made |= {n: v for n, v in late.items() if n.startswith("rope")}

        host(each, later)


@fault
def trim_takes_the_first_tokens(patch, decoder, together):
    def trim(self, count):
        return replace(
            self,
            ids=self.ids[: self.offset - count],
            states={n: v[:, count:] for n, v in self.states.items()},
        )

    patch.setattr(Snapshot, "trim", trim)


@fault
def padding_is_saved_as_content(patch, decoder, together):
    save = store.save

    def padded(folder, name, snapshot, format="fp16"):
        more = -snapshot.offset % 8
        states = {
            n: np.pad(v, ((0, 0), (0, more), (0, 0)))
            for n, v in snapshot.states.items()
        }
        ids = (*snapshot.ids, *[0] * more)
        return save(folder, name, replace(snapshot, ids=ids, states=states), format)

    patch.setattr(store, "save", padded)


@fault
def a_hit_leaves_nothing_to_run(patch, decoder, together):
    find = store.find

    def whole(folder, ids, identity):
        snapshot, rest = find(folder, [*ids, 0], identity)
        return snapshot, rest[:-1]

    patch.setattr(store, "find", whole)


@fault
def the_last_token_is_written_twice(patch, decoder, together):
    patch.setattr(Snapshot, "trim", lambda self, count: self)


@fault
def keys_of_one_save_and_values_of_another(patch, decoder, together):
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


@fault
def slots_see_each_other(patch, decoder, together):
    def swapped(made, offsets, counts, T):
        for name in (n for n in made if n.startswith(ATTN_MASK)):
            made[name] = np.repeat(made[name].max(0, keepdims=True), len(offsets), 0)

    host(together, swapped)


@fault
def slots_are_swapped_on_restore(patch, decoder, together):
    fresh = together.fresh

    def swapped(after=None):
        return fresh(after[::-1] if isinstance(after, list) else after)

    patch.setattr(together, "fresh", swapped)


@fault
def an_ended_row_keeps_decoding(patch, decoder, together):
    step = together.step

    def all_rows(seqs, chunk):
        logits, times = step(seqs, [tokens or [0] for tokens in chunk])
        return logits[::-1], times

    patch.setattr(together, "step", all_rows)


@fault
def scales_of_another_head(patch, decoder, together):
    original = store.decode

    def decode(tensors):
        pairs = tensors.items()
        return original(
            {n: v[::-1] if n.endswith(store.SCALE) else v for n, v in pairs}
        )

    patch.setattr(store, "decode", decode)


@zaya
def side_states_are_not_saved(patch, decoder, together):
    take = snapshots.take

    def rows_alone(seqs, seq=0):
        snapshot = take(seqs, seq)
        states = {n: v * is_cache(n) for n, v in snapshot.states.items()}
        return replace(snapshot, states=states)

    patch.setattr(snapshots, "take", rows_alone)


@fault
def positions_start_again(patch, decoder, together):
    def forget(seqs, seq, snapshot):
        seqs.ids[seq] = []

    after_put(patch, forget)


@fault
def strided_view(patch, alone, decoder):
    """Rows read through a strided view of a buffer that grows in steps, as if it were contiguous."""

    original = snapshots.fill

    def fill(target, rows, offset):
        buffer = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 256), (0, 0)))
        original(target, buffer.reshape(-1)[: rows.size].reshape(rows.shape), offset)

    patch.setattr(snapshots, "fill", fill)


@fault
def dropped_tokens(patch, alone, decoder):
    """A merged buffer has no room, and tokens that do not fit are dropped: min(new, room)."""

    fresh = decoder.fresh
    room = [decoder.options.max_seq_len]

    def merged(after=None):
        seqs = fresh(after)
        room[0] = int(seqs.offsets.max()) or decoder.options.max_seq_len
        return seqs

    def short(made, *_):
        for name in made:
            if name.startswith(KV_WRITE_MASK):
                made[name][:, :, room[0] :] = 0

    patch.setattr(decoder, "fresh", merged)
    host(decoder, short)


@fault
def aliased_entry(patch, alone, decoder):
    """Memory hands out the stored arrays themselves, and a request clears what it has taken in."""

    def clear(seqs, seq, snapshot):
        for value in snapshot.states.values():
            value[:] = 0

    after_put(patch, clear)


@fault
def groups_along_tokens(patch, alone, decoder):
    """Quantization groups run along tokens, and a slice loses the scales of a group it cuts."""

    decode = store.decode

    def along_tokens(rows):
        whole = rows.shape[1] // store.GROUP * store.GROUP
        result = np.zeros_like(rows)
        if whole:
            turned = np.ascontiguousarray(rows[:, :whole].swapaxes(1, 2))
            values = store.dequantize(*store.quantize(turned))
            result[:, :whole] = values.swapaxes(1, 2)
        return result

    def cut(tensors):
        states = decode(tensors)
        for name in filter(is_cache, states):
            if name not in tensors:  # it was quantized
                states[name] = along_tokens(states[name])
        return states

    patch.setattr(store, "decode", cut)
