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
                    "shorten the prompt, or export with a larger --max-seq-len",
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
        mask_write = self.options.kv_write == "mask"
        inputs = {}
        if ORDER in self.names:
            order = np.arange(1, T + 1) * (np.arange(T) < counts[:, None])
            inputs[ORDER] = order[:, None, :, None]
        if TAIL_SELECT in self.names:
            inputs |= self._tail(counts, T)
        inputs = {name: rows.astype(np.float32) for name, rows in inputs.items()}
        if not mask_write:
            inputs[POS] = self._position(offsets, counts, T)
        if self.router_state:
            shape = [{"T": T}.get(n, n) for n in self.router_state]
            inputs[ROUTER_STATE] = np.zeros(shape, np.float32)
        for suffix, rope, window in self.tables:
            frequencies = np.float32(rope.inv_freq)
            angles = positions[:, None, :, None].astype(np.float32) * frequencies
            inputs[ROPE_COS + suffix] = np.cos(angles) * np.float32(rope.scale)
            inputs[ROPE_SIN + suffix] = np.sin(angles) * np.float32(rope.scale)
            rows = self.options.slots(window)
            inputs[ATTN_MASK + suffix] = _attention_mask(
                positions, offsets + counts, rows, window
            )
            if mask_write:
                name = KV_WRITE_MASK
                if self.options.ring(window):
                    name += suffix
                inputs[name] = _write_mask(positions, counts, rows)
        return inputs

    def _tail(self, counts: np.ndarray, T: int) -> dict[str, np.ndarray]:
        """Where the rows of a tail come from: of its old rows, followed by the valid
        columns, the last ones, each as a one-hot row."""
        rows = np.arange(self.tail)
        # of each row among all the old ones and the columns, [B, rows, 1]
        place = counts[:, None, None] + rows[:, None]
        return {
            TAIL_SELECT: np.arange(T) == place - self.tail,
            TAIL_KEEP: rows == place,
        }

    def _position(self, offsets, counts, T) -> np.ndarray:
        if len(set(offsets.tolist())) > 1 or (counts != T).any():
            raise InputError(
                "kv_write=slice",
                f"positions {offsets.tolist()}, valid tokens {counts.tolist()} of {T}",
                "equal positions and no dummy tokens",
                "export with --kv-write mask",
            )
        return offsets[:1].astype(np.int32)


def _attention_mask(
    positions: np.ndarray, ends: np.ndarray, rows: int, window: int | None
) -> np.ndarray:
    """Additive mask [B, 1, T, rows] once this call's tokens are written, `ends` [B]
    tokens in all.

    Row r then holds the last position up to `ends` − 1 that is r modulo `rows`, or,
    where that is negative, nothing."""
    last = ends[:, None] - 1
    stored = last - (last - np.arange(rows)) % rows  # [B, rows]: position in each row
    # [B, T, rows]: from each query back to each row
    distance = positions[:, :, None] - stored[:, None]
    visible = (stored[:, None] >= 0) & (distance >= 0)
    if window:
        visible &= distance < window
    return np.where(visible, np.float32(0), np.float32(MASKED))[:, None]


def _write_mask(positions: np.ndarray, counts: np.ndarray, rows: int) -> np.ndarray:
    """One-hot columns [B, 1, rows, T]: the row of each valid token; dummies have
    none."""
    B, T = positions.shape
    mask = np.zeros((B, 1, rows, T), np.float32)
    seqs, columns = np.nonzero(np.arange(T) < counts[:, None])
    mask[seqs, 0, positions[seqs, columns] % rows, columns] = 1
    return mask
