"""Gate `causality`: no token changes the results of earlier tokens, and no sequence
changes another. It needs neither a golden nor a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workbench.bundle.names import X, is_cache
from workbench.check import fidelity, gates
from workbench.check.gates import Gate
from workbench.decode import Decoder
from workbench.decode.calls import head_logits, run_layers
from workbench.runtime import Model, State

SEED = 0


def causality_gate(decoder: Decoder) -> Gate:
    """Changes the last token of one sequence's call, at several T and offsets, and
    compares every layer shard's output, the cache rows and the logits of all earlier
    columns and all other sequences, bit for bit. Any runtime and precision."""
    faults = []
    compared = 0
    trials = _trials(decoder)
    experts = decoder.experts
    fixed = decoder.experts.fixed
    with decoder.set_aside():
        try:
            # an expert's shapes, hence its sums, must not depend on the last token
            experts.fixed = True
            pairs = zip(
                _results(decoder, trials, [trial.ids for trial in trials]),
                _results(decoder, trials, [trial.other for trial in trials]),
                strict=True,
            )
            for (trial, name, before), (_, _, after) in pairs:
                compared += 1
                if before.tobytes() != after.tobytes():
                    faults.append(f"{name} at T = {trial.T}, position {trial.start}")
        finally:
            experts.fixed = fixed
    reason = (
        f"changing a call's last token: {compared} outputs, caches and logits of "
        "earlier tokens are the same bits"
    )
    changed = f"{len(faults)} changed: "
    return gates.none("causality", faults[:4], reason, changed, "; ")


@dataclass(frozen=True)
class Trial:
    """A call of T tokens at position `start`: token ids [B, T], and `other` ones whose
    last token of sequence `seq` differs."""

    start: int
    T: int
    seq: int
    ids: np.ndarray
    other: np.ndarray

    def earlier(self, columns: np.ndarray) -> np.ndarray:
        """All columns [B, W, T], without the last one of `seq`."""
        columns = columns.reshape(len(self.ids), -1, self.T).copy()
        columns[self.seq, :, -1] = 0
        return columns

    def earlier_rows(self, name: str, value: np.ndarray) -> np.ndarray:
        """A state [B, ..] without what the last token of `seq` writes: its row of a
        cache, else all of that sequence's."""
        own = value[self.seq]
        if is_cache(name):
            own = own[:, (self.start + self.T - 1) % value.shape[2]]
        own[:] = 0
        return value


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


def _trials(decoder: Decoder) -> list[Trial]:
    rng = np.random.default_rng(SEED)
    V = decoder.manifest.dims.V
    B = decoder.options.batch
    trials = []
    for number, (start, T) in enumerate(_calls(decoder)):
        seq = number % B
        ids = rng.integers(0, V, (B, T))
        other = ids.copy()
        other[seq, -1] = (ids[seq, -1] + rng.integers(1, max(2, V))) % V
        trials.append(Trial(start, T, seq, ids, other))
    return trials


def _results(
    decoder: Decoder, trials: list[Trial], prompts: list[np.ndarray]
) -> Iterator[tuple[Trial, str, np.ndarray]]:
    """(trial, name, value) of all that the last token of each trial's sequence must not
    change, in calls over `prompts` [B, T]: one shard after another, each for all of
    them, with states of their own."""
    B = decoder.options.batch
    rng = np.random.default_rng(SEED)
    ios, counts = [], []
    for trial, ids in zip(trials, prompts, strict=True):
        counts.append(np.full(B, trial.T))
        starts = np.full(B, trial.start)
        ios.append(decoder.host.inputs(starts, counts[-1], trial.T))
        ios[-1][X] = decoder.plane(decoder.bundle.embed(ids).transpose(0, 2, 1))
    decoder.begin()
    for index, model in enumerate(decoder.layers):
        states = [_random_state(model, trial, rng) for trial in trials]
        ios = run_layers(decoder, index, ios, counts, states=states)
        for trial, io, state in zip(trials, ios, states, strict=True):
            yield trial, f"output of {model.shard.name}", trial.earlier(io[X])
            for name in model.shard.states:
                yield trial, name, trial.earlier_rows(name, state.read(name))
    hidden = [io[X].reshape(B, -1, t.T) for io, t in zip(ios, trials, strict=True)]
    all_logits, _ = head_logits(decoder, hidden)
    for trial, logits in zip(trials, all_logits, strict=True):
        yield trial, "logits", trial.earlier(logits.transpose(0, 2, 1))


def _random_state(model: Model, trial: Trial, rng: np.random.Generator) -> State:
    """A state of random values; cache rows that no token has yet are zeros, and so is
    all of a new sequence's."""
    state = model.make_state()
    for name, entry in model.shard.states.items():
        value = rng.standard_normal(entry.shape).astype(state.read(name).dtype)
        if is_cache(name) or not trial.start:
            value[:, :, trial.start :] = 0
        state.write(name, value)
    return state
