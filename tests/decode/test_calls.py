"""Calls of a shard that run together compute what they compute one after another."""

import numpy as np
import pytest
import tiny

from workbench import Decoder
from workbench.bundle.names import X

SIZES = 1, 3, 2, 4, 1, 2  # tokens of each call


def all_layers(decoder, size: int):
    """(hidden states of every call after all layers, states, what each call's hook
    saw); so many calls of a shard run together."""
    ids, seen = tiny.prompt(decoder.manifest.dims.V, sum(SIZES)), [[] for _ in SIZES]
    starts = np.cumsum([0, *SIZES])
    ios = [
        decoder.inputs(np.array([start]), [ids[start : start + count]], count)
        for start, count in zip(starts, SIZES)
    ]

    def hook(call: int):
        return lambda shard, op, outputs: seen[call].append(
            (op.name, [tuple(value.shape) for value in outputs])
        )

    counts, seqs = [np.array([count]) for count in SIZES], decoder.fresh()
    for model, state in zip(decoder.layers, seqs.states, strict=True):
        states, hooks = [state] * len(ios), list(map(hook, range(len(ios))))
        calls, ios = (ios, counts, states, hooks), []
        for first in range(0, len(SIZES), size):
            own = (each[first : first + size] for each in calls)
            ios += decoder.run_calls(model, *own)
    values = [io[X] for io in ios]
    return [*values, *(state.read(name) for state, name in seqs.named_states)], seen


@pytest.mark.matrix(3, wide=12)
@pytest.mark.parametrize("family", list(tiny.DIMS))
def test_calls_together_compute_what_they_do_one_after_another(exports, family):
    bundle = exports.bundle(exports.checkpoint(family), max_seq_len=32)
    decoder = Decoder(bundle, "portable", "exact")
    (apart, saw), (together, saw_together) = (
        all_layers(decoder, size) for size in (1, len(SIZES))
    )
    for one, other in zip(apart, together, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    assert saw == saw_together
