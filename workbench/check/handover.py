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
        rows, addresses = [], []
        for length in lengths:
            prefill_by(source, target, _prompts(target, length))
            rows += [
                f"{length} tokens: {fault}"
                for fault in wrong_rows(source, target, length)
            ]
            addresses += [
                f"{length} tokens: {fault}" for fault in wrong_address(target, length)
            ]
        of = f"prompts of {', '.join(map(str, lengths))} tokens run by {source.bundle.root.name}"
        return [
            gates.none(
                "handover_rows", rows[:3], f"every state is the other bundle's, {of}"
            ),
            gates.none(
                "handover_write_address",
                addresses[:3],
                f"the next row alone changed, {of}",
            ),
            continues(source, target, lengths[-1]),
        ]


def prompt_lengths(source: Decoder, target: Decoder) -> list[int]:
    """Lengths of prompts that need one call, a few, and nearly the whole cache."""
    room = min(d.options.max_seq_len for d in (source, target)) - DECODED
    t_max = source.options.t_max
    lengths = sorted(
        {n for n in (1, t_max, t_max + 1, 3 * t_max, room) if 1 <= n <= room}
    )
    if source.options.kv_write == "slice" and min(source.options.shapes, default=1) > 1:
        lengths = sorted({n - n % t_max for n in lengths} - {0})  # no dummy columns
    return lengths


def wrong_rows(source: Decoder, target: Decoder, length: int) -> list[str]:
    """States of `target` that are not those of `source` after `length` tokens: rows by
    position, zeros in all others."""
    theirs = {n: state.read(n) for state in source.states for n in state.shard.states}
    shapes = layout(source.manifest, length, int(source.floors[0]))
    wrong = []
    for state in target.states:
        for name in state.shard.states:
            ours, other = state.read(name), theirs[name]
            expected, kind = np.zeros_like(ours), state.shard.kind_of(name)
            rows, others = ours.shape[-2], other.shape[-2]
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
    wrong, written = [], set()
    caches = [
        (s, name, s.read(name)) for s, name in target.named_states if is_cache(name)
    ]
    target.advance(_prompts(target, 1), 1)
    for state, name, before in caches:
        row = length % before.shape[2]
        changed = np.flatnonzero(
            (state.read(name) != before).any(axis=(0, 1, 3))
        ).tolist()
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
    prompts, after = _prompts(target, length), _prompts(target, DECODED, seed=1)
    runs = []
    for prefill in (lambda ids: prefill_by(source, target, ids), target.prefill):
        target.begin()
        prefill(prompts)
        runs.append(
            [target.decode_one_token([ids[i] for ids in after]) for i in range(DECODED)]
        )
    tolerance = target.manifest.dims.L * min(
        gates.T_TOLERANCE[d.arithmetic] for d in (source, target)
    )
    alone = f"{target.bundle.root.name} alone"
    reason = (
        f"logits of {DECODED} tokens behind {length}, against {alone}, relative RMS"
    )
    return gates.at_most(
        name, metrics.relative_rms(*map(np.stack, runs[::-1])), tolerance, reason
    )


def _prompts(decoder: Decoder, length: int, seed: int = 0) -> list[list[int]]:
    shape = decoder.options.batch, length
    return (
        np.random.default_rng(seed).integers(0, decoder.manifest.dims.V, shape).tolist()
    )
