"""The trace of a bundle has the layers within a shard, and the choices of experts."""

import numpy as np
import pytest
import tiny

from workbench.check.golden import make_golden
from workbench.check.run import trace_bundle
from workbench.models.checkpoint import Checkpoint


@pytest.mark.slow("exports a bundle with experts")
def test_layers_within_a_shard_and_choices_of_experts_are_seen(exports):
    path = exports.checkpoint("zaya")
    golden = make_golden(Checkpoint(path), [3, 1, 4, 1, 5])
    decoder = exports.decoder(path, layers_per_shard=2)
    isolated, chained = trace_bundle(decoder, golden, (2, "isolated"), (2, "chained"))
    for actual, expected in zip(isolated.layers, golden.trace.layers, strict=True):
        assert tiny.relative(actual.update, expected.update) < 1e-5
        assert np.array_equal(actual.expert, expected.expert)
    added = chained.layers[2].hidden - chained.layers[1].hidden
    assert np.array_equal(chained.layers[2].update, added)
