"""One sequence, detached from the decoder it ran in: its tokens, its cache rows, its
side states, and the identity of the decoder they belong to.

Uses only the names and shapes of logical states, so it is the same on every runtime.
"""

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.names import is_cache, split_layer
from workbench.bundle.states import (
    MATRIX,
    PENDING,
    RING,
    ROWS,
    TAIL,
    StateKind,
    state_kind,
)
from workbench.decode import checks
from workbench.errors import InputError


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The logical prefix of every state after the tokens `ids`.

    Args:
        ids: the tokens whose rows the caches hold.
        identity: see `identity`; only a decoder of the same one takes the snapshot
            back.
        states: by logical name, without the batch axis, in the shapes that `layout`
            gives and the dtype that `state.read` gives: what the next token reads, and
            what it would read after a trim to `floor` tokens, in the order of the
            tokens.
        floor: the fewest tokens that the snapshot can be trimmed to.
    """

    ids: tuple[int, ...]
    identity: str
    states: dict[str, np.ndarray]
    floor: int

    @property
    def offset(self) -> int:
        """Tokens in the caches: the position of the next one."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.states.values())

    def trim(self, count: int) -> "Snapshot":
        """The snapshot without its last `count` tokens (without all of them, if it has
        fewer), as if they had never run.

        Raises:
            InputError: fewer tokens than `floor` would be left; a negative count.
        """
        count = undoable(count, self.offset, self.floor)
        states = dict(self.states)
        for name, value in self.states.items():
            if state_kind(name) is not MATRIX:
                states[name] = value[..., : value.shape[-2] - count, :]
        return replace(self, ids=self.ids[: self.offset - count], states=states)


def undoable(count: int, offset: int, floor: int) -> int:
    """How many of the last `count` tokens of `offset` there are to undo; refuses to go
    below `floor`."""
    count = min(checks.count(count, "tokens to trim"), offset)
    if offset - count < floor:
        raise InputError(
            f"sequence of {offset} tokens",
            f"{count} to undo",
            f"at most {offset - floor}: no state holds what was before those",
            "restore an earlier snapshot, or export with --undo (convolutions and matrices then "
            "hold t_max tokens more) and with --sliding mask (not ring)",
        )
    return count


def foreign(subject: str, other: str, own: str) -> InputError:
    return InputError(
        subject,
        f"identity {other[:12]}",
        f"this bundle's, {own[:12]} (checkpoint, weights, options, tokenizer, precision)",
        "prefill the tokens again",
    )


class UndoDepth:
    """How far the sequences of a bundle can go back: the table of `bundle.states`, for
    all states at once."""

    def __init__(self, manifest: Manifest):
        self.t_max = manifest.options.t_max
        self.undo = manifest.options.undo
        self.kinds, self.rings = set(), set()
        for shard in manifest.shards:
            for name, entry in shard.states.items():
                self.kinds.add(shard.kind_of(name))
                if entry.ring:
                    window = manifest.layers[split_layer(name)[0]].window
                    self.rings.add((entry.ring, window))

    def floor(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The fewest tokens that sequences of `after` [B] tokens can go back to, whose
        last call began at `before` [B]."""
        floors = np.zeros_like(after)
        for ring, window in self.rings:  # which must have the next token's window
            wrapped = np.where(after > ring, after - ring + window - 1, 0)
            floors = np.maximum(floors, wrapped)
        if TAIL in self.kinds:
            floors = np.maximum(floors, after - self.t_max * self.undo)
        if MATRIX in self.kinds:
            if self.undo:
                after = before
            floors = np.maximum(floors, after)
        return floors


def layout(
    manifest: Manifest, offset: int, floor: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shape of every state in a snapshot of `offset` tokens that can be trimmed to
    `floor`.

    Args:
        floor: by default the lowest after a call that ran no token.

    Returns:
        By name: caches [H_kv, rows, D] of all tokens, rings of those from
        `floor` − window + 1 on; tails [n + offset − floor, W]; pending states
        [H, offset − floor, width]; matrices whole.
    """
    if floor is None:
        floor = int(UndoDepth(manifest).floor(offset, offset))
    options, shapes = manifest.options, {}
    for shard in manifest.shards:
        for name, state in shard.states.items():
            kind, (*heads, rows, width) = shard.kind_of(name), state.shape[1:]
            if kind is ROWS:
                rows = offset
            elif kind is RING:
                window = manifest.layers[split_layer(name)[0]].window
                rows = min(offset, offset - floor + window - 1)
            elif kind is PENDING:
                rows = offset - floor
            elif kind is TAIL:
                rows += offset - floor - options.t_max * options.undo
            shapes[name] = *heads, rows, width
    return shapes


def fits(snapshot: Snapshot, needed: dict[str, tuple[int, ...]]) -> bool:
    """Whether a snapshot has states of the `needed` names and shapes. A cache may have
    fewer rows than tokens, because a ring of another size holds fewer; other states may
    have more rows than needed."""
    if snapshot.states.keys() != needed.keys():
        return False
    for name, (*heads, rows, width) in needed.items():
        shape = snapshot.states[name].shape
        if len(shape) < 2 or (*heads, shape[-2], width) != shape:
            return False
        if is_cache(name) and shape[-2] > snapshot.offset:
            return False
        if not is_cache(name) and shape[-2] < rows:
            return False
    return True


def identity(manifest: Manifest, precision: str) -> str:
    """SHA-256 over all that decides what a cache row holds and where it goes: family,
    every export option but the batch, weights, embedding, tokenizer, and the
    arithmetic. Bundles that differ in their batch alone share snapshots."""
    files = [manifest.embedding.file, *manifest.tokens.files]
    for shard in manifest.shards:
        files += [f for f in shard.files if f.path.endswith("weight.bin")]
    parts = manifest.model_dump(
        include={"family", "dims", "rope", "layers", "checkpoint", "residual_exponent"}
    )
    parts |= {
        "options": manifest.options.model_dump(exclude={"batch"}),
        "precision": precision,
        "files": [(f.path, f.sha256) for f in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def take(
    value: np.ndarray, kind: StateKind, rows: int, offset: int, undone: int
) -> np.ndarray:
    """One sequence's state, as `state.read(name)[seq]` gives it, cut to its last `rows`
    rows that count, in token order; a copy. `undone` of `offset` tokens and more were
    undone since the last call."""
    if kind is RING:
        return value[:, np.arange(offset - rows, offset) % value.shape[1]]
    if kind is TAIL:
        end = len(value) - undone
        return value[end - rows : end].copy()
    return value[..., :rows, :].copy()


def put(target: np.ndarray, kind: StateKind, value: np.ndarray, offset: int) -> None:
    """The inverse of `take`, into a state full of zeros; of rows that do not fit a
    smaller state, the last ones."""
    count = min(value.shape[-2], target.shape[-2])
    value = value[..., value.shape[-2] - count :, :]
    if kind is RING or kind is ROWS:
        target[:, np.arange(offset - count, offset) % target.shape[1]] = value
    elif kind is TAIL:
        target[len(target) - count :] = value
    else:
        target[..., :count, :] = value


def per_sequence(value, B: int) -> list:
    """One value for every sequence, or the list that already has one for each; one
    snapshot goes to the first."""
    if isinstance(value, Snapshot):
        return [value] + [None] * (B - 1)
    if not isinstance(value, (list, tuple)):
        return [value] * B
    if len(value) != B:
        raise InputError(
            "a list with a value for each sequence",
            f"{len(value)} values",
            f"{B}, or one value for all",
            "give a list as long as the batch",
        )
    return list(value)
