"""What the host makes for every call: rope tables, masks, write addresses. Knows positions, no model."""

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.contract import ATTN_MASK, KV_WRITE_MASK, MASKED, POS, ROPE_COS, ROPE_SIN
from workbench.errors import InputError


class Host:
    """Call inputs of a bundle, for B sequences each at its own position."""

    def __init__(self, manifest: Manifest):
        self.S, self.kv_write = manifest.options.max_seq_len, manifest.options.kv_write
        self.tables = []
        for rope in manifest.rope:
            windows = {layer.window for layer in manifest.layers if layer.rope == rope.name}
            self.tables.append((f"_{rope.name}" if rope.name else "", rope, windows.pop() if windows else None))

    def check(self, offsets: np.ndarray, counts: np.ndarray) -> None:
        """Raises before anything is written when a token would land past max_seq_len."""
        for slot, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            if count and offset + count > self.S:
                raise InputError(f"sequence {slot}", f"position {offset + count - 1}", f"positions below max_seq_len = {self.S}",
                                 "shorten the prompt, or export with a larger --max-seq-len")  # fmt: skip

    def inputs(self, offsets: np.ndarray, counts: np.ndarray, T: int) -> dict[str, np.ndarray]:
        """Shared inputs of one call.

        Args:
            offsets: [B] tokens already in each sequence's cache.
            counts: [B] valid tokens of this call, from column 0 on; the rest of the T columns are dummies that write
                nothing.
            T: columns of the call.

        Returns:
            rope_cos, rope_sin [B, 1, T, rope_half]; attn_mask [B, 1, T, S]; kv_write_mask [B, 1, S, T] or pos [1].
        """
        self.check(offsets, counts)
        positions = offsets[:, None] + np.arange(T)  # [B, T]
        valid = np.arange(T) < counts[:, None]
        slots = np.arange(self.S)
        behind = positions[:, :, None] - slots  # [B, T, S]: how far each slot lies behind each query
        inputs = {}
        for suffix, rope, window in self.tables:
            angles = positions[:, None, :, None].astype(np.float32) * np.float32(rope.inv_freq)
            inputs[ROPE_COS + suffix] = np.cos(angles) * np.float32(rope.scale)
            inputs[ROPE_SIN + suffix] = np.sin(angles) * np.float32(rope.scale)
            seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
            inputs[ATTN_MASK + suffix] = np.where(seen, np.float32(0), np.float32(MASKED))[:, None]
        if self.kv_write == "slice":
            return inputs | {POS: self._position(offsets, counts, T)}
        write = (behind == 0) & valid[:, :, None]
        return inputs | {KV_WRITE_MASK: write.transpose(0, 2, 1)[:, None].astype(np.float32)}

    def _position(self, offsets, counts, T) -> np.ndarray:
        if len(set(offsets.tolist())) > 1 or (counts != T).any():
            raise InputError("kv_write=slice", f"positions {offsets.tolist()}, valid tokens {counts.tolist()} of {T}",
                             "equal positions and no dummy tokens", "export with --kv-write mask")  # fmt: skip
        return offsets[:1].astype(np.int32)
