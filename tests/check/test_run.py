import numpy as np
import pytest
import tiny

from workbench.check.golden import make_golden
from workbench.check.run import run_golden
from workbench.models.checkpoint import Checkpoint


@pytest.mark.slow("exports a bundle with experts")
def test_layers_within_a_shard_and_choices_of_experts_are_seen(exports):
    path = exports.checkpoint("zaya")
    golden = make_golden(Checkpoint(path), [3, 1, 4, 1, 5])
    decoder = exports.decoder(path, layers_per_shard=2)
    values, chained = run_golden(decoder, golden, (2, "isolated"), (2, "chained"))
    own = {name for name in golden.values if name.startswith(("update.", "expert."))}
    assert own <= values.keys()
    for name in own:
        assert tiny.relative(values[name], golden[name]) < 1e-5, name
    added = chained["hidden.2"] - chained["hidden.1"]
    assert np.array_equal(chained["update.2"], added)
