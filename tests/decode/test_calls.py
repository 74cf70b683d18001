"""Calls of a shard that run together compute what they compute one after another."""

import numpy as np
import pytest
import tiny

from workbench.bundle.names import X

SIZES = 1, 3, 2, 4, 1, 2  # tokens of each call


def all_layers(decoder, together: int) -> list[np.ndarray]:
    """Hidden states of every call after all layers, and all states; so many calls of a
    shard run together."""
    ids, ios = tiny.prompt(decoder.manifest.dims.V, sum(SIZES)), []
    for a, b in tiny.tiles(len(ids), SIZES):
        ios.append(decoder.inputs(np.array([a]), [ids[a:b]], b - a))
    seqs = decoder.fresh()
    for model, state in zip(decoder.layers, seqs.states, strict=True):
        calls, ios = list(zip(ios, SIZES, strict=True)), []
        for first in range(0, len(SIZES), together):
            own, counts = zip(*calls[first : first + together])
            counts, n = [np.array([count]) for count in counts], len(own)
            ios += decoder.run_calls(model, own, counts, [state] * n, [None] * n)
    values = [io[X] for io in ios]
    return [*values, *(state.read(name) for state, name in seqs.named_states)]


@pytest.mark.matrix(3, wide=12)
@pytest.mark.parametrize("family", list(tiny.DIMS))
def test_calls_together_compute_what_they_do_one_after_another(exports, family):
    decoder = exports.decoder(exports.checkpoint(family))
    apart, together = (all_layers(decoder, size) for size in (1, len(SIZES)))
    for one, other in zip(apart, together, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
