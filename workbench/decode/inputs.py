"""The inputs that the host computes for every call (rotary tables, masks, write
addresses) from the manifest alone."""

from collections.abc import Sequence

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.names import (
    ATTN_MASK,
    KV_WRITE_MASK,
    MASKED,
    ORDER,
    POS,
    ROPE_COS,
    ROPE_SIN,
    ROUTER_STATE,
    TAIL_KEEP,
    TAIL_SELECT,
)
from workbench.errors import InputError


class Host:
    """Call inputs of a bundle, for B sequences each at its own position.

    Every cache is addressed as a ring of n rows: position p is stored in row p mod n. A
    cache of max_seq_len rows never wraps."""

    def __init__(self, manifest: Manifest):
        self.options = manifest.options
        inputs = {}
        for shard in manifest.shards:
            inputs.update(shard.inputs)
        self.names = set(inputs)
        self.router_state = inputs.get(ROUTER_STATE)
        self.tail = inputs.get(TAIL_SELECT, [0, 2])[1]
        layers = {layer.suffix: layer for layer in manifest.layers if layer.attends}
        ropes = {rope.name: rope for rope in manifest.rope}
        self.tables = [
            (suffix, ropes[layer.rope], layer.window)
            for suffix, layer in layers.items()
        ]

    def check(self, offsets: np.ndarray, counts: Sequence[int]) -> None:
        """Raises an InputError, before anything is written, for a call with a token at
        a position past max_seq_len."""
        S = self.options.max_seq_len
        for seq, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            if count and offset + count > S:
                raise InputError(
                    f"sequence {seq}",
                    f"position {offset + count - 1}",
                    f"positions below max_seq_len = {S}",
                    "ask for fewer, or export with a larger --max-seq-len",
                )

    def plane(self, hidden: np.ndarray) -> np.ndarray:
        """[B, C, T] in the bundle's layout: [B, C, T, 1] or [B, C, 1, T]."""
        hidden = np.ascontiguousarray(hidden)
        if self.options.layout == "bct1":
            return hidden[..., None]
        return hidden[:, :, None]

    def inputs(
        self, offsets: np.ndarray, counts: np.ndarray, T: int
    ) -> dict[str, np.ndarray]:
        """Shared inputs of one call, those that a shard reads.

        Args:
            offsets: [B] tokens already in each sequence's cache.
            counts: [B] valid tokens of this call, from column 0 on; the rest of the T
                columns are dummies that write nothing.
            T: columns of the call.

        Returns:
            tail_select [B, n, T] and tail_keep [B, n, n], n being the rows of a tail;
            order [B, 1, T, 1]; router_state of zeros, which the first layer takes; pos
            [1] or kv_write_mask [B, 1, rows, T]; and for each rope table, under its
            suffix, rope_cos, rope_sin [B, 1, T, rope_half], attn_mask [B, 1, T, rows],
            kv_write_mask where its caches are rings.
        """
        self.check(offsets, counts)
        positions = offsets[:, None] + np.arange(T)  # [B, T]
        valid = np.arange(T) < counts[:, None]
        inputs = {}
        if ORDER in self.names:
            inputs[ORDER] = (np.arange(1, T + 1) * valid)[:, None, :, None]
        if TAIL_SELECT in self.names:
            # of each row of a tail the place among the old ones and the columns
            place = counts[:, None, None] + np.arange(self.tail)[:, None]
            inputs[TAIL_SELECT] = np.arange(T) == place - self.tail
            inputs[TAIL_KEEP] = np.arange(self.tail) == place
        if self.router_state:
            inputs[ROUTER_STATE] = np.zeros(
                [{"T": T}.get(n, n) for n in self.router_state]
            )
        for suffix, rope, window in self.tables:
            angles = np.float32(positions)[:, None, :, None] * np.float32(rope.inv_freq)
            inputs[ROPE_COS + suffix] = np.cos(angles) * np.float32(rope.scale)
            inputs[ROPE_SIN + suffix] = np.sin(angles) * np.float32(rope.scale)
            rows, ring = self.options.cache_rows(window), self.options.ring_rows(window)
            seen = _visible(positions, offsets + counts, rows, window)
            inputs[ATTN_MASK + suffix] = np.where(seen, 0, MASKED)[:, None]
            # one-hot columns: the row of each valid token; dummies have none
            own = np.arange(rows)[:, None] == (positions % rows)[:, None]
            write = KV_WRITE_MASK + suffix if ring else KV_WRITE_MASK
            inputs[write] = (own & valid[:, None])[:, None]
        if self.options.kv_write == "slice":
            if len(set(offsets.tolist())) > 1 or not valid.all():
                raise InputError(
                    "kv_write=slice",
                    f"positions {offsets.tolist()}, valid tokens {counts.tolist()} of {T}",
                    "equal positions and no dummy tokens",
                    "export with --kv-write mask",
                )
            inputs[POS] = offsets[:1]
        return {
            name: value.astype(np.int32 if name == POS else np.float32)
            for name, value in inputs.items()
            if name in self.names
        }


def _visible(
    positions: np.ndarray, ends: np.ndarray, rows: int, window: int | None
) -> np.ndarray:
    """Whether each token attends to each row [B, T, rows] once this call's tokens are
    written, `ends` [B] tokens in all.

    Row r then holds the last position up to `ends` − 1 that is r modulo `rows`, or,
    where that is negative, nothing."""
    last = ends[:, None] - 1
    stored = last - (last - np.arange(rows)) % rows  # [B, rows]: position in each row
    # [B, T, rows]: from each query back to each row
    distance = positions[:, :, None] - stored[:, None]
    return (stored[:, None] >= 0) & (distance >= 0) & (distance < (window or np.inf))
