"""Gate `undo`: tokens that are undone leave no trace in outputs and states. It needs
neither a golden nor a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workbench.bundle.names import REMAINDER_STATE
from workbench.check import fidelity, gates
from workbench.check.gates import Gate
from workbench.decode import Decoder, Snapshot
from workbench.decode.snapshot import layout

SEED = 0


@dataclass
class Call:
    """Tokens [B, T] that ran, how many of each sequence's still count [B], and their
    hidden states [B, C, T]."""

    ids: np.ndarray
    counts: np.ndarray
    hidden: np.ndarray


def undo_gate(decoder: Decoder) -> Gate:
    """Undoes the last tokens of calls of every T, then as many as the decoder allows,
    and runs what is left alone, in calls of the same T: hidden states and the states
    behind the last call, bit for bit. Any runtime and precision."""
    options = decoder.options
    experts = decoder.experts
    if decoder.undo.floor(0, 1):
        return gates.not_run(
            "undo", "this bundle cannot undo a token: export with --undo"
        )
    Ts = fidelity.default_ts(options)
    most = options.t_max
    faults = []
    undone = 0
    near_end = max(0, options.max_seq_len - sum(Ts) - 3 * most)
    fixed = experts.fixed
    with decoder.set_aside():
        try:
            # an expert's shapes must not depend on tokens that are undone
            experts.fixed = True
            for start, sizes in {0: [most], near_end: Ts}.items():
                rng = np.random.default_rng([SEED, start])
                seqs = range(options.batch)
                before = [_random_snapshot(decoder, start, rng) for _ in seqs]
                decoder.begin(before)
                calls = _calls_with_undo(decoder, sizes, rng)
                after = [decoder.snapshot(seq) for seq in seqs]
                decoder.begin(before)
                for what in _rerun(decoder, calls, after):
                    faults.append(f"{what} from position {start} on")
                for call in calls:
                    undone += call.ids.size - int(call.counts.sum())
        finally:
            experts.fixed = fixed
    reason = f"{undone} tokens undone: everything after them has the same bits as without them"
    return gates.none("undo", faults[:4], reason, f"{len(faults)} differ: ", "; ")


def _random_snapshot(decoder: Decoder, tokens: int, rng) -> Snapshot:
    """A snapshot of so many tokens that holds random values, none of them to be undone,
    and no remainders, which would have to be below the last bit of theirs."""
    states = {}
    for name, shape in layout(decoder.manifest, tokens, tokens).items():
        states[name] = rng.standard_normal(shape).astype(np.float16)
        if name.endswith(REMAINDER_STATE):
            states[name][:] = 0
    return Snapshot((0,) * tokens, decoder.identity, states, tokens)


def _calls_with_undo(decoder: Decoder, sizes: list[int], rng) -> list[Call]:
    """Runs calls of these T and undoes a different number of last tokens in every
    sequence; runs two more calls and undoes as many tokens as the decoder allows; runs
    a last call. With slice writes, which take no dummy columns, whole calls are
    undone."""
    options = decoder.options
    calls = []
    B = options.batch
    t_max = options.t_max
    whole = options.kv_write == "slice"
    for T in sizes:
        _call(decoder, T, rng, calls)
        for seq in range(B):
            _undo(decoder, calls, seq, T if whole else ((T + 1) // 2 + seq) % (T + 1))
    for _ in range(2):
        _call(decoder, t_max, rng, calls)
    for seq in range(B):
        _undo(decoder, calls, seq, 2 * t_max)
    _call(decoder, t_max, rng, calls)
    return calls


def _call(decoder: Decoder, T: int, rng, calls: list[Call]) -> None:
    """Runs T random tokens of every sequence, where the cache has room for them."""
    B = decoder.options.batch
    room = decoder.options.max_seq_len - decoder.offsets.max()
    if T <= room:
        ids = rng.integers(0, decoder.manifest.dims.V, (B, T))
        calls.append(Call(ids, np.full(B, T), decoder.advance(ids.tolist(), T)))


def _undo(decoder: Decoder, calls: list[Call], seq: int, count: int) -> None:
    """Undoes the last `count` tokens of a sequence, of those that `calls` ran and the
    decoder lets go."""
    depth = decoder.offsets[seq] - decoder.floors[seq]
    count = int(min(count, depth, sum(call.counts[seq] for call in calls)))
    decoder.trim(count, seq)
    for call in calls[::-1]:
        gone = min(count, int(call.counts[seq]))
        call.counts[seq] -= gone
        count -= gone


def _rerun(decoder: Decoder, calls: list[Call], after: list[Snapshot]) -> Iterator[str]:
    """What differs where the tokens of `calls` that count are run alone; `after`: what
    was left of each sequence."""
    for call in calls:
        if not call.counts.any():
            continue
        T = call.ids.shape[1]
        rows = zip(call.ids.tolist(), call.counts, strict=True)
        hidden = decoder.advance([row[:count] for row, count in rows], T)
        for alone, mixed, count in zip(hidden, call.hidden, call.counts, strict=True):
            if not np.array_equal(alone[:, :count], mixed[:, :count], equal_nan=True):
                yield f"hidden states of a call of T = {T}"
    for seq, snapshot in enumerate(after):
        alone = decoder.snapshot(seq)
        if snapshot.ids != alone.ids:
            yield "the tokens"
        for name, value in alone.states.items():
            if not np.array_equal(value, snapshot.states[name], equal_nan=True):
                yield name
