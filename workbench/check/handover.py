"""Gates for a hand-over: a prompt runs in one bundle, its states are copied, and
decoding continues in another.

Both bundles are of one checkpoint; T, cache sizes, layout, packing and compression may
differ. No gate compares logits after a hand-over with a golden's, because they contain
the cost of compression in both bundles and no limit separates that from a fault. The
source's gates say whether its rows are right, those here whether the copy holds the
same bits at the same positions, and the target's gate `program` whether it computes
what Hugging Face's model does on any rows."""

import numpy as np

from workbench.bundle.names import is_cache
from workbench.bundle.states import RING, ROWS, TAIL
from workbench.check import gates, metrics
from workbench.check.gates import Gate
from workbench.decode import Decoder, prefill_by
from workbench.decode.snapshot import layout

DECODED = 4  # tokens behind each hand-over


def handover_gates(source: Decoder, target: Decoder) -> list[Gate]:
    """Gates on whether `target` holds the rows that `source` computed, writes the next
    rows, and continues as if it had run the prompt itself.

    Raises:
        InputError: bundles of other checkpoints or batches.
    """
    with source.set_aside(), target.set_aside():
        lengths = prompt_lengths(source, target)
        if not lengths:
            return [
                gates.not_run("handover_rows", f"needs more than {DECODED} positions")
            ]
        rows = []
        addresses = []
        for length in lengths:
            prefill_by(source, target, _prompts(target, length))
            for fault in wrong_rows(source, target, length):
                rows.append(f"{length} tokens: {fault}")
            for fault in wrong_address(target, length):
                addresses.append(f"{length} tokens: {fault}")
        of = f"prompts of {', '.join(map(str, lengths))} tokens run by {source.bundle.root.name}"
        copied = f"every state is the other bundle's, {of}"
        written = f"the next row alone changed, {of}"
        return [
            gates.none("handover_rows", rows[:3], copied),
            gates.none("handover_write_address", addresses[:3], written),
            continues(source, target, lengths[-1]),
        ]


def prompt_lengths(source: Decoder, target: Decoder) -> list[int]:
    """Lengths of prompts that need one call, a few, and nearly the whole cache."""
    room = min(source.options.max_seq_len, target.options.max_seq_len) - DECODED
    t_max = source.options.t_max
    lengths = {1, t_max, t_max + 1, 3 * t_max, room} & {*range(1, room + 1)}
    if source.options.kv_write == "slice" and min(source.options.shapes, default=1) > 1:
        lengths = {n - n % t_max for n in lengths} - {0}  # no dummy columns
    return sorted(lengths)


def wrong_rows(source: Decoder, target: Decoder, length: int) -> list[str]:
    """States of `target` that are not those of `source` after `length` tokens: rows by
    position, zeros in all others."""
    theirs = {name: state.read(name) for state, name in source.named_states}
    shapes = layout(source.manifest, length, int(source.floors[0]))
    wrong = []
    for state, name in target.named_states:
        ours = state.read(name)
        other = theirs[name]
        expected = np.zeros_like(ours)
        kind = state.shard.kind_of(name)
        rows = ours.shape[-2]
        others = other.shape[-2]
        count = min(rows, shapes[name][-2])
        if kind in (ROWS, RING):
            positions = np.arange(length - count, length)
            expected[:, :, positions % rows] = other[:, :, positions % others]
        elif kind is TAIL:
            expected[:, rows - count :] = other[:, others - count :]
        else:
            expected[:, :, :count] = other[:, :, :count]
        if not np.array_equal(ours, expected):
            wrong.append(f"{name} differs")
    return wrong


def wrong_address(target: Decoder, length: int) -> list[str]:
    """Caches in which one more token behind `length` changes another row than that of
    its position (that of a layer without weights stays zero), or all of them if none
    changes."""
    wrong = []
    written = set()
    states = [(state, name) for state, name in target.named_states if is_cache(name)]
    caches = [state.read(name) for state, name in states]
    target.advance(_prompts(target, 1), 1)
    for (state, name), before in zip(states, caches, strict=True):
        row = length % before.shape[2]
        differs = (state.read(name) != before).any(axis=(0, 1, 3))
        changed = np.flatnonzero(differs).tolist()
        written.update(changed)
        if set(changed) - {row}:
            wrong.append(f"{name}: rows {changed} changed, not {row}")
    return wrong if written else ["no row of any cache changed"]


def continues(source: Decoder, target: Decoder, length: int) -> Gate:
    """Logits of tokens behind the hand-over against those of `target` after its own
    prefill; the tolerance is that of one layer's update at another T, times the
    layers."""
    name = "handover_continues"
    if source.options.compress != target.options.compress:
        reason = (
            f"{source.options.compress} weights ran the prompt, "
            f"{target.options.compress} go on"
        )
        return gates.not_run(name, reason)
    if target.host.router_state and target.precision != "exact":
        reason = (
            "rounding may change the choice of an expert: compare in exact arithmetic"
        )
        return gates.not_run(name, reason)
    prompts = _prompts(target, length)
    after = _prompts(target, DECODED, seed=1)

    def decode() -> np.ndarray:
        return np.stack([target.decode_one_token(list(ids)) for ids in zip(*after)])

    target.begin()
    prefill_by(source, target, prompts)
    actual = decode()
    target.begin()
    target.prefill(prompts)
    error = metrics.relative_rms(decode(), actual)
    limits = gates.T_TOLERANCE[source.arithmetic], gates.T_TOLERANCE[target.arithmetic]
    reason = (
        f"logits of {DECODED} tokens behind {length}, against "
        f"{target.bundle.root.name} alone, relative RMS"
    )
    return gates.at_most(name, error, target.manifest.dims.L * min(limits), reason)


def _prompts(decoder: Decoder, length: int, seed: int = 0) -> list[list[int]]:
    shape = decoder.options.batch, length
    return (
        np.random.default_rng(seed).integers(0, decoder.manifest.dims.V, shape).tolist()
    )
