"""Detached copies of one sequence: its tokens, its cache rows, its other states, and the
identity of the decoder that they belong to.

Only names and shapes of logical states are used, so that a snapshot is the same on
every runtime."""

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.names import is_cache, split_layer
from workbench.decode.checks import whole_number
from workbench.errors import InputError

# the fields that decide the values and places of cache rows; so do options and weights
IDENTITY_FIELDS = {
    "family",
    "dims",
    "rope",
    "layers",
    "checkpoint",
    "residual_exponent",
    "embedding",
    "tokens",
}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence after the tokens `ids`.

    Args:
        ids: the tokens whose rows the caches hold.
        identity: the decoder's; only a decoder of the same identity can continue the
            snapshot.
        states: by logical name, without the batch axis, in the dtype that `State.read`
            gives: caches [H_kv, rows, D] in the order of the tokens (of a ring the rows
            that a token after `min_length` may attend to), recurrent states whole. Caches
            that copy an earlier layer's are left out.
        min_length: the fewest tokens that the snapshot can be trimmed to.
    """

    ids: tuple[int, ...]
    identity: str
    states: dict[str, np.ndarray]
    min_length: int

    @property
    def offset(self) -> int:
        """Tokens in the caches: the position of the next one."""
        return len(self.ids)

    def trim(self, count: int) -> "Snapshot":
        """The snapshot without its last `count` tokens (without all of them, if it has
        fewer), as if they had never run.

        Raises:
            InputError: fewer tokens than `min_length` would be left; a negative count.
        """
        count = trimmed_count(count, self.offset, self.min_length)
        states = dict(self.states)
        for name in filter(is_cache, states):
            states[name] = states[name][:, : states[name].shape[1] - count]
        return replace(self, ids=self.ids[: self.offset - count], states=states)

    def check_fits(self, identity: str, max_seq_len: int) -> None:
        """Raises an InputError unless a decoder of this identity and cache can continue
        the snapshot."""
        subject = f"snapshot of {self.offset} tokens"
        if self.identity != identity:
            actual = f"identity {self.identity[:12]}"
            needed = f"{identity[:12]} (checkpoint, weights, options, precision)"
            raise InputError(subject, actual, needed, "prefill the tokens again")
        if self.offset > max_seq_len:
            needed = f"at most max_seq_len = {max_seq_len}"
            step = "export a larger cache"
            raise InputError(subject, f"{self.offset} rows", needed, step)


def fill(target: np.ndarray, rows: np.ndarray, length: int) -> None:
    """Writes cache rows [H_kv, n, D] of the last n of `length` tokens into a cache, position
    p into row p modulo its size. If the cache has fewer rows than n, only the last
    positions are written."""
    rows = rows[:, -target.shape[1] :]
    places = np.arange(length - rows.shape[1], length) % target.shape[1]
    target[:, places] = rows


def trimmed_count(count: int, length: int, min_length: int) -> int:
    """How many of `length` tokens a trim by `count` takes back: `count`, at most all.

    Raises:
        InputError: fewer tokens than `min_length` would be left; a negative count.
    """
    count = min(whole_number(count, "tokens to trim"), length)
    if length - count < min_length:
        raise InputError(
            f"sequence of {length} tokens",
            f"{count} to undo",
            f"at most {length - min_length}: no state holds the values from before these",
            "restore an earlier snapshot, or export with --sliding mask (not ring)",
        )
    return count


def shortest_length(manifest: Manifest, length: int) -> int:
    """The shortest length that a sequence of `length` tokens can be trimmed to without a
    snapshot: a ring must still hold the next token's window, and a recurrent state
    cannot be trimmed at all."""
    shortest = 0
    for shard in manifest.shards:
        for name, state in shard.states.items():
            if not is_cache(name):
                return length
            if state.ring and length > state.ring:
                # The ring holds the positions from length − ring on, and the next token,
                # at position `shortest`, attends back to shortest − window + 1.
                of_ring = length - state.ring + attention_window(manifest, name) - 1
                shortest = max(shortest, of_ring)
    return shortest


def has_recurrent_state(manifest: Manifest) -> bool:
    """Whether some state is overwritten by every call, so that only a copy leads back."""
    return any(not is_cache(name) for shard in manifest.shards for name in shard.states)


def source_name(manifest: Manifest, name: str) -> str:
    """The logical state whose rows the state `name` holds: another one where its layer
    keeps a copy of an earlier layer's cache."""
    layer, leaf = split_layer(name)
    source = manifest.layers[layer].source
    return name if source is None else f"layers.{source}.{leaf}"


def attention_window(manifest: Manifest, name: str) -> int:
    """The attention window, in tokens, of the layer that a state belongs to."""
    layer, _ = split_layer(name)
    return manifest.layers[layer].window


def snapshot_identity(manifest: Manifest, rounded_by: str) -> str:
    """SHA-256 over everything that decides the values and places of cache rows:
    family, every export option but the batch, weights, embedding, tokenizer, the
    description of another exporter's packages, and what rounds the values: a precision,
    or the name of a device's runtime. Bundles that differ only in their batch share
    snapshots."""
    parts = manifest.model_dump(include=IDENTITY_FIELDS)
    parts["options"] = manifest.options.model_dump(exclude={"batch"})
    parts["precision"] = rounded_by
    if manifest.foreign:
        parts["foreign"] = manifest.shards[0].model_dump(include={"foreign", "states"})
    parts["weights"] = [
        (file.path, file.sha256)
        for shard in manifest.shards
        for file in shard.files
        if file.path.endswith("weight.bin")
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
