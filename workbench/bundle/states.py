"""The kinds of state that a decoder layer has. A leaf.

    kind     one sequence's value                          what a call does
    rows     [H_kv, S, D], a row per position              writes its own rows
    ring     [H_kv, ring, D], position p in row p mod ring writes its own rows
    tail     [n, W], a convolution's last n inputs         appends its inputs, drops the oldest
    matrix   [H, K, V], the sum over all tokens            decays it and adds its tokens
    pending  [H, t_max, width], what the last call's       replaces all, after adding to the matrix
             tokens will add to the matrix                 those that `accept` marks

Tokens are undone by moving the offset back (rows; a ring at most by t_max tokens). With
the option `undo` a tail holds n + t_max inputs, of which `tail_first` selects the last
n, and a matrix lacks the last call's tokens, of which `accept` then marks fewer.

Bundles without the option `undo` have no pending state: each call adds its tokens to
the matrix at once, and neither a tail nor a matrix can go back. With `state_pair` a
matrix is the sum of two states of its kind, a value and the remainder that rounding cut
off it."""

from dataclasses import dataclass

from workbench.bundle.names import (
    ATTN_MASK,
    CONV_STATE,
    K_STATE,
    KV_WRITE_MASK,
    MATRIX_STATE,
    ORDER,
    PENDING_STATE,
    REMAINDER_STATE,
    TAIL_KEEP,
    TAIL_SELECT,
    V_DELAYED_STATE,
    V_STATE,
)


@dataclass(frozen=True)
class StateKind:
    """One row of the table above.

    Args:
        inputs: the host's inputs by which a call addresses such a state (without the
            suffix of a rope table).
    """

    name: str
    inputs: tuple[str, ...]


ROWS = StateKind("rows", (ATTN_MASK, KV_WRITE_MASK))
RING = StateKind("ring", (ATTN_MASK, KV_WRITE_MASK))
TAIL = StateKind("tail", (TAIL_SELECT, TAIL_KEEP))
MATRIX = StateKind("matrix", (ORDER,))
PENDING = StateKind("pending", (ORDER,))
KINDS = {
    K_STATE: ROWS,
    V_STATE: ROWS,
    CONV_STATE: TAIL,
    V_DELAYED_STATE: TAIL,
    MATRIX_STATE: MATRIX,
    REMAINDER_STATE: MATRIX,
    PENDING_STATE: PENDING,
}


def state_kind(name: str, ring: int | None = None) -> StateKind:
    """The kind of a logical state (`layers.3.k_state` or `k_state`); `ring` is that of
    its entry."""
    return RING if ring else KINDS[name.rpartition(".")[2]]
