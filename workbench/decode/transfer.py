"""Moving sequences between bundles of one checkpoint: a state belongs to the model that made it. Knows no runtime."""

import numpy as np

from workbench.bundle.contract import is_cache
from workbench.errors import InputError

from .decoder import Decoder


def copy_state(source: Decoder, target: Decoder) -> None:
    """Continues `source`'s sequences in `target`, whatever the two bundles' shards, T, cache sizes and packing.

    Typically a prefill bundle of large fixed T hands over to a decode bundle of T = 1.

    Raises:
        InputError: another checkpoint, another batch, or fewer positions than the sequences already have.
    """
    a, b = source.manifest, target.manifest
    if a.checkpoint["sha256"] != b.checkpoint["sha256"] or a.options.batch != b.options.batch:
        raise InputError("bundle to continue in", f"checkpoint {b.checkpoint['name']}, batch {b.options.batch}",
                         f"checkpoint {a.checkpoint['name']}, batch {a.options.batch}",
                         "export both bundles from one checkpoint with one --batch")  # fmt: skip
    if source.offsets.max() > b.options.max_seq_len:
        raise InputError("bundle to continue in", f"max_seq_len = {b.options.max_seq_len}",
                         f"room for {source.offsets.max()} tokens", "export it with a larger --max-seq-len")  # fmt: skip
    target.begin()
    held = {name: state for state in source.states for name in state.shard.states}
    for state in target.states:
        for name in state.shard.states:
            value = held[name].read(name)
            if is_cache(name):
                value = _rows(value, state.read(name), source.offsets)
            state.write(name, value)
    target.offsets = source.offsets.copy()


def _rows(old: np.ndarray, new: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The rows both caches [B, H_kv, slots, D] have room for: position p lives in slot p mod slots of each."""
    for slot, end in enumerate(offsets):
        positions = np.arange(max(0, end - min(old.shape[2], new.shape[2])), end)
        new[slot, :, positions % new.shape[2]] = old[slot, :, positions % old.shape[2]]
    return new
