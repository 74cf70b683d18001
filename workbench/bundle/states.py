"""The kinds of state that a decoder layer has. A leaf.

    kind     one sequence's value                          what a call does
    rows     [H_kv, S, D], a row per position              writes its own rows
    ring     [H_kv, ring, D], position p in row p mod ring writes its own rows
    tail     [n, W], a convolution's last n inputs         appends its inputs, drops the oldest
    matrix   [H, K, V], the sum over all tokens            decays it and adds its tokens

Rows and rings go back by moving the offset (a ring at most by t_max tokens). Tails and
matrices are recurrent: a call replaces them, so that only a copy taken before the call
leads back."""

from dataclasses import dataclass

from workbench.bundle.names import (
    ATTN_MASK,
    CONV_STATE,
    K_STATE,
    KV_WRITE_MASK,
    MATRIX_STATE,
    ORDER,
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
RECURRENT = TAIL, MATRIX
KINDS = {
    K_STATE: ROWS,
    V_STATE: ROWS,
    CONV_STATE: TAIL,
    V_DELAYED_STATE: TAIL,
    MATRIX_STATE: MATRIX,
}


def state_kind(name: str, ring: int | None = None) -> StateKind:
    """The kind of a logical state (`layers.3.k_state` or `k_state`); `ring` is that of
    its entry."""
    return RING if ring else KINDS[name.rpartition(".")[2]]
