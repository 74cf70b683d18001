"""Gate `causality`: no token changes the results of earlier tokens, and no sequence
changes another. It needs neither a golden nor a checkpoint."""

from collections.abc import Iterator

import numpy as np

from workbench.bundle.names import X, is_cache
from workbench.check import fidelity, gates
from workbench.check.gates import Gate
from workbench.decode import Decoder

SEED = 0


def causality_gate(decoder: Decoder) -> Gate:
    """Changes the last token of one sequence's call, at several T and offsets, and
    compares every layer shard's output, the cache rows and the logits of all earlier
    columns and all other sequences, bit for bit. Any runtime and precision."""
    faults = []
    compared = 0
    rng = np.random.default_rng(SEED)
    experts = decoder.experts
    fixed = decoder.experts.fixed
    with decoder.set_aside():
        try:
            # an expert's shapes, hence its sums, must not depend on the last token
            experts.fixed = True
            for trial, (start, T) in enumerate(_calls(decoder)):
                seq = trial % decoder.options.batch
                for name, before, after in _pair(decoder, start, T, seq, rng):
                    compared += 1
                    if before.tobytes() != after.tobytes():
                        faults.append(f"{name} at T = {T}, position {start}")
        finally:
            experts.fixed = fixed
    reason = (
        f"changing a call's last token: {compared} outputs, caches and logits of "
        "earlier tokens are the same bits"
    )
    changed = f"{len(faults)} changed: "
    return gates.none("causality", faults[:4], reason, changed, "; ")


def _calls(decoder: Decoder) -> Iterator[tuple[int, int]]:
    """(position, T) of the calls: the largest T at the start, in the middle and at the
    end of the cache, and every other T at the start or the end in turn. A call of one
    token has no earlier column: it shows only other sequences and the cache."""
    options = decoder.options
    *smaller, largest = options.shapes or fidelity.default_ts(options)
    last = options.max_seq_len - largest
    yield from ((start, largest) for start in sorted({0, last // 2, last}))
    for index, T in enumerate(smaller):
        yield (options.max_seq_len - T if index % 2 else 0), T


def _pair(decoder: Decoder, start: int, T: int, seq: int, rng) -> Iterator[tuple]:
    """(what, value, value with another last token of sequence `seq`) of all that must
    not change."""
    V = decoder.manifest.dims.V
    B = decoder.options.batch
    ids = rng.integers(0, V, (B, T))
    other = ids.copy()
    other[seq, -1] = (ids[seq, -1] + rng.integers(1, max(2, V))) % V
    states = {
        name: rng.standard_normal(state.shard.states[name].shape)
        for state, name in decoder.named_states
    }
    before = _call(decoder, ids, start, states, seq)
    after = _call(decoder, other, start, states, seq)
    for name, value in before.items():
        yield name, value, after[name]


def _call(
    decoder: Decoder, ids: np.ndarray, start: int, states: dict, seq: int
) -> dict:
    """What one call leaves that its last column of sequence `seq` must not change, by
    name."""
    decoder.begin()
    B, T = ids.shape
    for state, name in decoder.named_states:
        value = states[name].astype(state.read(name).dtype)
        if is_cache(name) or not start:
            # rows that no token has yet; all of a new sequence's
            value[:, :, start:] = 0
        state.write(name, value)
    counts = np.full(B, T)
    io = decoder.host.inputs(np.full(B, start), counts, T)
    io[X] = decoder.plane(decoder.bundle.embed(ids).transpose(0, 2, 1))
    results = {}

    def keep(name: str, columns: np.ndarray) -> None:
        """All columns [B, W, T], without the last one of `seq`."""
        columns = columns.reshape(B, -1, T).copy()
        columns[seq, :, -1] = 0
        results[name] = columns

    for index, model in enumerate(decoder.layers):
        io = decoder.run_layers(index, io, counts)
        keep(f"output of {model.shard.name}", io[X])
    for state, name in decoder.named_states:
        value = results[name] = state.read(name)
        own = value[seq]
        if is_cache(name):
            own = own[:, (start + T - 1) % value.shape[2]]
        own[:] = 0
    keep("logits", decoder.logits(io[X].reshape(B, -1, T)).transpose(0, 2, 1))
    return results
