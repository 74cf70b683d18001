"""Faults of caches that are kept, restored and batched, each after a bug seen in the wild; the
matrix must turn RED.

`plant(patch, decoder, together)` changes a decoder of batch 1, one of a batch, or what both stand
on.
"""

from dataclasses import replace

import numpy as np

from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, is_cache
from workbench.bundle.states import ROWS
from workbench.decode import decoder as decoding
from workbench.decode.snapshot import Snapshot
from workbench.prompt_cache import Store, formats

FAULTS, ZAYA = {}, set()  # name → plant; those that need side states


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


def zaya(plant):
    ZAYA.add(plant.__name__)
    return fault(plant)


def host(patch, decoder, change) -> None:
    """change(inputs, offsets, counts) edits what the host made for a call."""
    original = decoder.host.inputs

    def inputs(offsets, counts, T, *rest):
        made = {
            name: value.copy()
            for name, value in original(offsets, counts, T, *rest).items()
        }
        change(made, offsets, counts, T, original)
        return made

    patch.setattr(decoder.host, "inputs", inputs)


@fault
def merge_breaks_at_unaligned_lengths(patch, decoder, together):
    """The batch-2 report: after a merge at a length no step divides, the first token is another
    one."""
    write = together._write

    def merged(held, fresh=False):
        write(held, fresh)
        for slot, snapshot in held.items():
            if snapshot.offset % 7:
                for state in together.states:
                    for name in filter(is_cache, state.shard.states):
                        value = state.read(name)
                        value[slot, 0] = 0
                        state.write(name, value)

    patch.setattr(together, "_write", merged)


@fault
def appends_at_the_longest_row_after_one_left(patch, decoder, together):
    def longest(made, offsets, counts, T, original):
        if (counts == 0).any() and offsets.max() + T <= together.options.max_seq_len:
            shifted = original(np.full_like(offsets, offsets.max()), counts, T)
            made.update(
                {n: v for n, v in shifted.items() if n.startswith(KV_WRITE_MASK)}
            )

    host(patch, together, longest)


@fault
def rope_uses_the_offset_after_the_update(patch, decoder, together):
    def later(made, offsets, counts, T, original):
        if (
            offsets.min()
            and (offsets + counts + T).max() <= together.options.max_seq_len
        ):
            made.update(
                {
                    n: v
                    for n, v in original(offsets + counts, counts, T).items()
                    if n.startswith("rope")
                }
            )

    host(patch, together, later)
    host(patch, decoder, later)


@fault
def trim_goes_by_the_buffer_s_size(patch, decoder, together):
    patch.setattr(
        Snapshot,
        "trim",
        lambda self, count: replace(self, ids=self.ids[: self.offset - count]),
    )


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
    save = Store.save

    def padded(self, name, snapshot, format="fp16"):
        more = -snapshot.offset % 8
        states = {
            n: np.pad(v, ((0, 0), (0, more), (0, 0)))
            for n, v in snapshot.states.items()
        }
        return save(
            self,
            name,
            replace(snapshot, ids=(*snapshot.ids, *[0] * more), states=states),
            format,
        )

    patch.setattr(Store, "save", padded)


@fault
def a_rejected_restore_leaves_its_rows(patch, decoder, together):
    for each in (decoder, together):
        fitting, write = each._fitting, each._write

        def late(snapshot, fitting=fitting, write=write):
            if snapshot.identity == "another":
                write({0: snapshot})
            return fitting(snapshot)

        patch.setattr(each, "_fitting", late)


@fault
def restoring_prefills_again(patch, decoder, together):
    for each in (decoder, together):

        def begin(snapshot=None, each=each, begin=each.begin):
            begin()
            held = list(snapshot) if isinstance(snapshot, list) else [snapshot]
            if any(held):
                each.prefill([list(s.ids) for s in held])

        patch.setattr(each, "begin", begin)


@fault
def an_empty_chunk_after_a_hit(patch, decoder, together):
    def prefill(ids, prefill=decoder.prefill):
        if decoder.offsets.any():
            decoder.advance([[]], 1)
        return prefill(ids)

    patch.setattr(decoder, "prefill", prefill)


@fault
def a_hit_leaves_nothing_to_run(patch, decoder, together):
    original = Store._usable
    patch.setattr(
        Store,
        "_usable",
        lambda self, saved, prompt: original(self, saved, np.append(prompt, 0)),
    )


@fault
def the_last_token_is_written_twice(patch, decoder, together):
    patch.setattr(Snapshot, "trim", lambda self, count: self)


@fault
def keys_of_one_save_and_values_of_another(patch, decoder, together):
    read, last = Store._read, {}

    def mixed(self, path, only_ids=False):
        found = read(self, path, only_ids)
        if not only_ids:
            values = {n: v for n, v in found.tensors.items() if ".v_state" in n}
            found.tensors.update(
                {
                    n: v[:, : values[n].shape[1]]
                    for n, v in last.items()
                    if n in values and v.shape[1] >= values[n].shape[1]
                }
            )
            last.update(values)
        return found

    patch.setattr(Store, "_read", mixed)


@fault
def slots_see_each_other(patch, decoder, together):
    def swapped(made, offsets, counts, T, original):
        for name in (n for n in made if n.startswith(ATTN_MASK)):
            made[name] = np.repeat(made[name].max(0, keepdims=True), len(offsets), 0)

    host(patch, together, swapped)


@fault
def slots_are_swapped_on_restore(patch, decoder, together):
    write = together._write
    patch.setattr(
        together,
        "_write",
        lambda held, fresh=False: write(
            dict(zip(held, reversed(held.values()), strict=True)), fresh
        ),
    )


@fault
def generate_takes_a_path_of_its_own(patch, decoder, together):
    def generate(ids, max_new, **options):
        return [
            r.token for r in decoder.stream(ids, max_new, **options | {"after": None})
        ]

    patch.setattr(decoder, "generate", generate)


@fault
def an_ended_row_keeps_decoding(patch, decoder, together):
    step = together.decode_one_token
    patch.setattr(
        together,
        "decode_one_token",
        lambda tokens: step([0 if t is None else t for t in tokens])[::-1],
    )


@fault
def scales_of_another_head(patch, decoder, together):
    original = formats.dequantize_groups

    def dequantize(codes, scale, low):
        return original(codes, scale[::-1], low)

    patch.setattr(formats, "dequantize_groups", dequantize)


@zaya
def side_states_are_not_saved(patch, decoder, together):
    original = decoding.take
    patch.setattr(
        decoding,
        "take",
        lambda value, kind, *rest: original(value * (kind is ROWS), kind, *rest),
    )


@fault
def positions_start_again(patch, decoder, together):
    for each in (decoder, together):
        write = each._write

        def forgetful(held, fresh=False, each=each, write=write):
            write(held, fresh)
            each.offsets[:] = 0

        patch.setattr(each, "_write", forgetful)
