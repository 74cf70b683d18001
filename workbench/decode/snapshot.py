"""One sequence, detached from the decoder it ran in: its tokens, its cache rows, its side states, and the identity of
the decoder they belong to.

Uses only the names and shapes of logical states, so it is the same on every runtime.
"""

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.names import is_cache
from workbench.decode import checks
from workbench.errors import InputError


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The logical prefix of every state after the tokens `ids`.

    Args:
        ids: the tokens whose rows the caches hold.
        identity: see `identity`; only a decoder of the same one takes the snapshot back.
        states: by logical name; caches as [H_kv, rows, D], the rows of the last `rows` tokens in their order (all of
            them, or as many as a ring holds); side states without their batch axis. In the dtype `state.read` gives.
    """

    ids: tuple[int, ...]
    identity: str
    states: dict[str, np.ndarray]

    @property
    def offset(self) -> int:
        """Tokens in the caches: the position of the next one."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.states.values())

    def trim(self, count: int) -> "Snapshot":
        """Without its last `count` tokens (all of them, when it has fewer).

        Raises:
            InputError: a side state or a ring that has lost rows cannot go back; a negative count.
        """
        count = min(checks.count(count, "tokens to trim"), self.offset)
        if count and not all(
            is_cache(n) and v.shape[1] == self.offset for n, v in self.states.items()
        ):
            raise untrimmable(self.offset)
        length = self.offset - count
        states = {n: v[:, :length] for n, v in self.states.items()} if count else self.states
        return replace(self, ids=self.ids[:length], states=states)


def untrimmable(offset: int) -> InputError:
    return InputError(
        f"sequence of {offset} tokens",
        "side states, or a ring buffer that has wrapped",
        "caches that hold every row, to go back in",
        "restore an earlier snapshot",
    )


def foreign(subject: str, other: str, own: str) -> InputError:
    return InputError(
        subject,
        f"identity {other[:12]}",
        f"this bundle's, {own[:12]} (checkpoint, weights, options, tokenizer, precision)",
        "prefill the tokens again",
    )


def trimmable(manifest: Manifest, offset: int) -> bool:
    """Whether a sequence of `offset` tokens can lose its last ones: no side states, no ring that has wrapped."""
    shapes = layout(manifest, offset).items()
    return all(is_cache(name) and shape[1] == offset for name, shape in shapes)


def layout(manifest: Manifest, offset: int) -> dict[str, tuple[int, ...]]:
    """Shape of every state in a snapshot of `offset` tokens."""
    shapes = {}
    for shard in manifest.shards:
        for name, state in shard.states.items():
            shape = tuple(state.shape[1:])
            shapes[name] = (shape[0], min(offset, shape[1]), shape[2]) if is_cache(name) else shape
    return shapes


def without_rows(shapes: dict[str, tuple[int, ...]]) -> set[tuple]:
    """Names and shapes of states; of a cache [H_kv, rows, D] without its rows, which a ring of another size may lack."""
    return {
        (name, len(shape), *(shape[::2] if len(shape) == 3 else shape))
        for name, shape in shapes.items()
    }


def identity(manifest: Manifest, precision: str) -> str:
    """SHA-256 over all that decides what a cache row holds and where it goes: family, every export option but the
    batch, weights, embedding, tokenizer, and the arithmetic. Bundles that differ in their batch alone share snapshots."""
    files = [manifest.embedding.file, *manifest.tokens.files]
    files += [f for s in manifest.shards for f in s.files if f.path.endswith("weight.bin")]
    parts = manifest.model_dump(
        include={"family", "dims", "rope", "layers", "checkpoint", "residual_exponent"}
    )
    parts |= {
        "options": manifest.options.model_dump(exclude={"batch"}),
        "precision": precision,
        "files": [(f.path, f.sha256) for f in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def take(value: np.ndarray, name: str, offset: int) -> np.ndarray:
    """One sequence's state, as `state.read(name)[seq]` gives it, cut to its logical prefix, in token order; a copy."""
    if not is_cache(name):
        return value.copy()
    rows = value.shape[1]
    return (
        value[:, :offset].copy()
        if offset <= rows
        else value[:, np.arange(offset - rows, offset) % rows]
    )


def put(target: np.ndarray, name: str, value: np.ndarray, offset: int) -> None:
    """The inverse of `take`, into a state full of zeros; of rows that do not fit a smaller ring, the last ones."""
    if not is_cache(name):
        target[:] = value
        return
    count = min(value.shape[1], target.shape[1])
    rows = np.arange(offset - count, offset) % target.shape[1] if count < offset else slice(count)
    target[:, rows] = value[:, value.shape[1] - count :]
