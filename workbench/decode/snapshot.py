"""The sequences that a batch has run, and detached copies of one: its tokens, its cache
rows, its other states, and the identity of the decoder that they belong to.

Only names and shapes of logical states are used, so that a snapshot is the same on
every runtime."""

import hashlib
import json
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.bundle import Manifest
from workbench.bundle.names import is_cache, split_layer
from workbench.decode.checks import whole_number
from workbench.errors import InputError
from workbench.runtime import State
from workbench.runtime.base import interrupted


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence after the tokens `ids`.

    Args:
        ids: the tokens whose rows the caches hold.
        identity: that of the decoder; only a decoder of the same one takes the snapshot
            back.
        states: by logical name, without the batch axis, in the dtype that `State.read`
            gives: caches [H_kv, rows, D] in the order of the tokens (of a ring those
            that a token after `floor` may attend to), recurrent states whole.
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

    def trim(self, count: int) -> "Snapshot":
        """The snapshot without its last `count` tokens (without all of them, if it has
        fewer), as if they had never run.

        Raises:
            InputError: fewer tokens than `floor` would be left; a negative count.
        """
        count = trimmed(count, self.offset, self.floor)
        states = dict(self.states)
        for name in filter(is_cache, states):
            states[name] = states[name][:, : states[name].shape[1] - count]
        return replace(self, ids=self.ids[: self.offset - count], states=states)


@dataclass(eq=False)
class Sequences:
    """What one batch has run so far.

    Args:
        states: of each layer shard; a runtime's state works with its own model alone.
        ids: the tokens of each sequence.
        floors: the fewest tokens that each sequence can go back to. A call raises them
            before it runs, so that a sequence whose recurrent states it has advanced in
            part has fewer tokens than its floor.
        kept: where states are recurrent, each sequence before the last call of a
            prompt, of T columns (0: as many as tokens run again); it is of no use to a
            sequence that was replaced since, whose floor is all its tokens.
    """

    manifest: Manifest
    identity: str
    states: list[State]
    ids: list[list[int]]
    floors: list[int]
    kept: list[Snapshot] = field(default_factory=list)
    T: int = 0

    @property
    def offsets(self) -> np.ndarray:
        """[B] tokens in the caches of each sequence: the position of its next one."""
        return np.array([len(ids) for ids in self.ids])

    @property
    def named_states(self) -> list[tuple[State, str]]:
        """(state of a shard, logical name) for every state of every shard."""
        return [(state, name) for state in self.states for name in state.shard.states]

    def append(self, chunk) -> None:
        """Adds the tokens of a call that has run."""
        for ids, tokens in zip(self.ids, chunk):
            ids += map(int, tokens)

    def raise_floors(self, counts: np.ndarray) -> None:
        """Notes that a call of `counts` [B] tokens begins."""
        for seq, end in enumerate(self.offsets + counts):
            lowest = floor(self.manifest, int(end))
            self.floors[seq] = max(self.floors[seq], lowest)

    def check(self) -> None:
        """Raises an InputError for a sequence that an interrupted call has advanced in
        part."""
        for seq, ids in enumerate(self.ids):
            if self.floors[seq] > len(ids):
                raise interrupted(f"sequence {seq}")


def take(seqs: Sequences, seq: int = 0) -> Snapshot:
    """A detached copy of one sequence."""
    seq = whole_number(seq, "sequence", len(seqs.ids))
    seqs.check()
    offset = len(seqs.ids[seq])
    lowest = max(seqs.floors[seq], floor(seqs.manifest, offset))
    states = {}
    for state, name in seqs.named_states:
        value, first = state.read(name)[seq], 0
        if state.shard.states[name].ring:
            first = max(0, lowest - window(seqs.manifest, name) + 1)
        if is_cache(name):
            value = value[:, np.arange(first, offset) % value.shape[1]]
        states[name] = value
    return Snapshot(tuple(seqs.ids[seq]), seqs.identity, states, lowest)


def put(seqs: Sequences, seq: int, snapshot: Snapshot | None) -> None:
    """Replaces one sequence by a snapshot (None: by one without a token); the others
    are unchanged.

    Raises:
        InputError: a snapshot of another bundle, or one with no room; nothing is
            changed then.
    """
    seq = whole_number(seq, "sequence", len(seqs.ids))
    if snapshot:
        _check_fits(seqs, snapshot)
    for state, name in seqs.named_states:
        batch = state.read(name)
        batch[seq] = 0
        if snapshot and is_cache(name):
            fill(batch[seq], snapshot.states[name], snapshot.offset)
        elif snapshot:
            batch[seq] = snapshot.states[name]
        state.write(name, batch)
    ids, lowest = (snapshot.ids, snapshot.floor) if snapshot else ((), 0)
    seqs.ids[seq] = list(ids)
    seqs.floors[seq] = max(lowest, floor(seqs.manifest, len(ids)))


def copy(source: Sequences, target: Sequences) -> None:
    """Continues `source`'s sequences in the `target` of another bundle of the same
    checkpoint, whatever the two bundles' shards, T and cache sizes.

    Raises:
        InputError: another checkpoint, another batch, or a cache that is too small.
    """
    found, needed = (
        f"checkpoint {each.manifest.checkpoint['sha256'][:12]}, batch {len(each.ids)}"
        for each in (target, source)
    )
    if found != needed:
        step = "export both bundles from one checkpoint with one --batch"
        raise InputError("bundle to continue in", found, needed, step)
    for seq in range(len(source.ids)):
        put(target, seq, replace(take(source, seq), identity=target.identity))


def fill(target: np.ndarray, rows: np.ndarray, offset: int) -> None:
    """Writes cache rows [H_kv, n, D], those of the last of `offset` tokens, to their
    places in a cache, position p in row p modulo its size; of rows that do not fit a
    smaller one, the last."""
    rows = rows[:, -target.shape[1] :]
    places = np.arange(offset - rows.shape[1], offset) % target.shape[1]
    target[:, places] = rows


def trimmed(count: int, offset: int, lowest: int) -> int:
    """How many of the last `count` tokens of `offset` there are to take back; refuses to
    go below `lowest`."""
    count = min(whole_number(count, "tokens to trim"), offset)
    if offset - count < lowest:
        raise InputError(
            f"sequence of {offset} tokens",
            f"{count} to undo",
            f"at most {offset - lowest}: no state holds what was before those",
            "restore an earlier snapshot, or export with --sliding mask (not ring)",
        )
    return count


def floor(manifest: Manifest, offset: int) -> int:
    """The fewest tokens that a sequence of `offset` tokens can go back to without a
    snapshot: a ring must hold the next token's window, a recurrent state does not go
    back."""
    lowest = 0
    for shard in manifest.shards:
        for name, state in shard.states.items():
            if not is_cache(name):
                return offset
            if state.ring and offset > state.ring:
                last = offset - state.ring + window(manifest, name) - 1
                lowest = max(lowest, last)
    return lowest


def window(manifest: Manifest, name: str) -> int:
    return manifest.layers[split_layer(name)[0]].window


def _check_fits(seqs: Sequences, snapshot: Snapshot) -> None:
    """Raises an InputError for a snapshot that sequences cannot continue."""
    S, offset = seqs.manifest.options.max_seq_len, snapshot.offset
    subject = f"snapshot of {offset} tokens"
    if snapshot.identity != seqs.identity:
        found = f"identity {snapshot.identity[:12]}"
        needed = f"{seqs.identity[:12]} (checkpoint, weights, options, precision)"
        raise InputError(subject, found, needed, "prefill the tokens again")
    if offset > S:
        needed = f"at most max_seq_len = {S}"
        raise InputError(subject, f"{offset} rows", needed, "export a larger cache")


def identity(manifest: Manifest, precision: str) -> str:
    """SHA-256 over all that decides what a cache row holds and where it goes: family,
    every export option but the batch, weights, embedding, tokenizer, what is said of
    another exporter's packages, and the arithmetic. Bundles that differ in their batch
    alone share snapshots."""
    named = "family dims rope layers checkpoint residual_exponent embedding tokens"
    parts = manifest.model_dump(include={*named.split()})
    parts["options"] = manifest.options.model_dump(exclude={"batch"})
    parts["precision"] = precision
    if manifest.foreign:
        parts["foreign"] = manifest.shards[0].model_dump(include={"foreign", "states"})
    parts["weights"] = [
        (file.path, file.sha256)
        for shard in manifest.shards
        for file in shard.files
        if file.path.endswith("weight.bin")
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
