"""The shipped, trained checkpoints as decoders whose caches every reuse test shares: batch 1, and 3
of them together."""

import numpy as np
from tiny import DATA

from workbench import Decoder
from workbench.decode import Snapshot

NAMES = ("tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-zaya", "tiny-lfm2")
S, T_MAX, BATCH = 128, 16, 3


def decoder(
    exports, name: str, batch: int = 1, precision: str = "exact", **changed
) -> Decoder:
    """Gemma's local layers (window 64) are rings of 79 slots here, so that they wrap."""
    ring = {"sliding": "ring"} if name == "tiny-gemma3" else {}
    options = (
        {"max_seq_len": S, "tokens": f"1-{T_MAX}", "batch": batch} | ring | changed
    )
    return exports.decoder(DATA / name, precision, **options)


def same(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots hold the same tokens and bits."""
    return (a.ids, a.identity, a.states.keys()) == (
        b.ids,
        b.identity,
        b.states.keys(),
    ) and all(
        v.dtype == b.states[n].dtype and np.array_equal(v, b.states[n])
        for n, v in a.states.items()
    )
