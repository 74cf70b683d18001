"""What an export will need is known before anything is converted."""

from workbench.ane import memory
from workbench.bundle import Options
from workbench.models.checkpoint import Checkpoint


def test_the_memory_of_layers_without_a_cache_is_predicted(exports):
    path, options = exports.checkpoint("lfm2"), {"max_seq_len": 32, "batch": 3}
    predicted = memory.budget(Checkpoint(path), Options(**options))
    measured = memory.budget(exports.bundle(path, **options))
    for name, size in (
        ("kv", 3 * 2 * 32 * 32 * 2),
        ("side_states", 3 * 2 * 2 * 64 * 2),
    ):
        assert predicted[name] == measured[name] == size
