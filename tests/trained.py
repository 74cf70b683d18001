"""Decoders of the shipped, trained checkpoints for tests that reuse caches: batch 1 and batch 3."""

import numpy as np
from tiny import DATA

from workbench import Decoder
from workbench.decode import Snapshot

NAMES = ("tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-zaya", "tiny-lfm2")
S, T_MAX, BATCH = 128, 16, 3


def decoder(
    exports, name: str, batch: int = 1, precision: str = "exact", **changes
) -> Decoder:
    """A decoder of a shipped checkpoint; `changes` are export options."""
    options = {"max_seq_len": S, "tokens": f"1-{T_MAX}", "batch": batch}
    if name == "tiny-gemma3":
        # the cache of a local layer is a ring of 79 rows (window 64), which 128 tokens wrap around
        options["sliding"] = "ring"
    return exports.decoder(DATA / name, precision, **(options | changes))


def same(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots have the same tokens and bits."""
    if (a.ids, a.identity) != (b.ids, b.identity):
        return False
    if a.states.keys() != b.states.keys():
        return False
    for name, value in a.states.items():
        other = b.states[name]
        if value.dtype != other.dtype or not np.array_equal(value, other):
            return False
    return True
