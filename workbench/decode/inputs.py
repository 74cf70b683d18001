"""The inputs that the host computes for every call (rotary tables, masks, write
addresses) from the manifest alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.bundle import Manifest, Rope
from workbench.bundle.names import (
    ATTN_MASK,
    MASKED,
    ORDER,
    POS,
    ROPE_COS,
    ROPE_SIN,
    ROUTER_STATE,
    TAIL_KEEP,
    TAIL_SELECT,
)
from workbench.bundle.rings import ring_positions
from workbench.errors import InputError


class AttentionTables(NamedTuple):
    """The rope table and the window from which the inputs of one kind of attending layers
    are computed.

    Attributes:
        suffix: of the names of these inputs.
        rope: the rope table.
        window: the attention window in tokens; None: all tokens.
    """

    suffix: str
    rope: Rope
    window: int | None


class HostInputs:
    """Computes the inputs of calls of a bundle from positions alone, for B sequences at
    positions of their own.

    Every cache is addressed as a ring of n rows: position p is stored in row p mod n. A
    cache of max_seq_len rows never wraps.

    Attributes:
        names: the inputs of all shards.
        tail_rows: rows of a tail state, n of `tail_select`; 0: there is none.
        tables: one for every kind of attending layers.
    """

    def __init__(self, manifest: Manifest):
        self.options = manifest.options
        inputs = {}
        for shard in manifest.shards:
            inputs.update(shard.inputs)
        self.names = set(inputs)
        self.router_state = inputs.get(ROUTER_STATE)
        tail_select = inputs.get(TAIL_SELECT)  # [B, n, T]
        self.tail_rows = tail_select[1] if tail_select else 0
        layers = {layer.suffix: layer for layer in manifest.layers if layer.attends}
        ropes = {rope.name: rope for rope in manifest.rope}
        self.tables = [
            AttentionTables(suffix, ropes[layer.rope], layer.window)
            for suffix, layer in layers.items()
        ]

    def check_positions(self, offsets: np.ndarray, counts: Sequence[int]) -> None:
        """Raises an InputError for a token at a position past max_seq_len, before
        anything is written.

        Args:
            offsets: [B] tokens already in each sequence's cache.
            counts: [B] tokens of the call.
        """
        S = self.options.max_seq_len
        for seq, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            if count and offset + count > S:
                raise InputError(
                    f"sequence {seq}",
                    f"position {offset + count - 1}",
                    f"positions below max_seq_len = {S}",
                    "ask for fewer, or export with a larger --max-seq-len",
                )

    def to_layout(self, hidden: np.ndarray) -> np.ndarray:
        """[B, C, T] in the bundle's layout: [B, C, T, 1] or [B, C, 1, T]."""
        hidden = np.ascontiguousarray(hidden)
        if self.options.layout == "bct1":
            return hidden[..., None]
        return hidden[:, :, None]

    def inputs(
        self, offsets: np.ndarray, counts: np.ndarray, T: int
    ) -> dict[str, np.ndarray]:
        """The inputs of one call that at least one shard reads, whatever the layer.

        Args:
            offsets: [B] tokens already in each sequence's cache.
            counts: [B] valid tokens of this call, from column 0 on; the rest of the T
                columns are dummies that write nothing.
            T: columns of the call.

        Returns:
            Arrays by name, float32 but for `pos`: tail_select [B, n, T] and tail_keep
            [B, n, n], where a tail has n rows; order [B, 1, T, 1]; router_state of
            zeros, which the first layer reads; pos [1] int32 or kv_write_mask [B, 1,
            rows, T]; and for each rope table, under its suffix, rope_cos and rope_sin
            [B, 1, T, rope_half], attn_mask [B, 1, T, rows], and kv_write_mask where its
            caches are rings.

        Raises:
            InputError: a position past max_seq_len; unequal positions or dummies for a
                slice write.
        """
        self.check_positions(offsets, counts)
        # dummies have positions, too, and garbage in their columns: nothing reads either
        positions = offsets[:, None] + np.arange(T)  # [B, T]
        valid = np.arange(T) < counts[:, None]
        inputs = {}
        if ORDER in self.names:
            inputs[ORDER] = (np.arange(1, T + 1) * valid)[:, None, :, None]
        if TAIL_SELECT in self.names:
            inputs |= self._tail_inputs(counts, T)
        if self.router_state:
            shape = [T if n == "T" else n for n in self.router_state]
            inputs[ROUTER_STATE] = np.zeros(shape)
        for tables in self.tables:
            inputs |= self._attention_inputs(tables, positions, offsets + counts, valid)
        if self.options.kv_write == "slice":
            inputs[POS] = self._first_row(offsets, counts, T)
        return {
            name: value.astype(np.int32 if name == POS else np.float32)
            for name, value in inputs.items()
            if name in self.names
        }

    def _tail_inputs(self, counts: np.ndarray, T: int) -> dict[str, np.ndarray]:
        """Which columns and old rows the n rows of a tail's new state take.

        The old rows 0 … n − 1 and then the valid columns stand in one line, and the new
        state takes the last n places. With n = 3 and two tokens these are the places 2,
        3, 4: old row 2, then columns 0 and 1."""
        n = self.tail_rows
        places = counts[:, None, None] + np.arange(n)[:, None]  # [B, n, 1]
        return {
            TAIL_SELECT: np.arange(T) == places - n,
            TAIL_KEEP: np.arange(n) == places,
        }

    def _attention_inputs(
        self,
        tables: AttentionTables,
        positions: np.ndarray,
        ends: np.ndarray,
        valid: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """The inputs of one kind of attending layers.

        Args:
            positions: [B, T] of the columns.
            ends: [B] tokens of each sequence after the call.
            valid: [B, T], whether a column has a token.
        """
        suffix, rope, window = tables
        # in float32, as transformers computes its tables
        angles = np.float32(positions)[:, None, :, None] * np.float32(rope.inv_freq)
        rows = self.options.cache_rows(window)
        seen = _visible(positions, ends, rows, window)
        # one-hot columns: the row of each valid token; a dummy writes no row
        is_row = np.arange(rows)[:, None] == (positions % rows)[:, None]
        write_mask = self.options.write_mask_name(window, suffix)
        return {
            ROPE_COS + suffix: np.cos(angles) * np.float32(rope.scale),
            ROPE_SIN + suffix: np.sin(angles) * np.float32(rope.scale),
            ATTN_MASK + suffix: np.where(seen, 0, MASKED)[:, None],
            write_mask: (is_row & valid[:, None])[:, None],
        }

    def _first_row(self, offsets: np.ndarray, counts: np.ndarray, T: int) -> np.ndarray:
        """The row [1] that a slice write begins at. One address serves the whole batch,
        and every column is written.

        Raises:
            InputError: unequal positions, or dummies.
        """
        if len(set(offsets.tolist())) > 1 or not (counts >= T).all():
            raise InputError(
                "kv_write=slice",
                f"positions {offsets.tolist()}, valid tokens {counts.tolist()} of {T}",
                "equal positions and no dummy tokens",
                "export with --kv-write mask",
            )
        return offsets[:1]


def _visible(
    positions: np.ndarray, ends: np.ndarray, rows: int, window: int | None
) -> np.ndarray:
    """Whether each token attends to each row [B, T, rows] once this call's tokens are
    written, after which the sequences have `ends` [B] tokens."""
    stored = ring_positions(ends - 1, rows)  # [B, rows]
    # [B, T, rows]: from each query back to each row
    distance = positions[:, :, None] - stored[:, None]
    return (stored[:, None] >= 0) & (distance >= 0) & (distance < (window or np.inf))
