"""Token ids in, logits and tokens out: one state per shard and sequence batch, advanced chunk by chunk.

Sequences come and go slot by slot as snapshots; every slot keeps its own position, so no slot knows of the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import HIDDEN, LOGITS, ROUTER_STATE, ROUTER_STATE_OUT, X, is_cache
from workbench.decode import checks, contexts
from workbench.decode.experts import RoutedExperts
from workbench.decode.inputs import Host
from workbench.decode.sampling import Sampling
from workbench.decode.snapshot import Snapshot, foreign, identity, layout, put, take, trimmable, untrimmable
from workbench.errors import InputError

GREEDY = Sampling()


@dataclass
class Times:
    """Milliseconds of one call: every layer shard, every head slice, and the whole call on the host's clock."""

    layers: list[float] = field(default_factory=list)
    head: float = 0.0
    total: float = 0.0


@dataclass
class Record:
    """One generated token: its id, the logits [V] it was picked from, what the call that made them took, its slot."""

    token: int
    logits: np.ndarray
    times: Times
    slot: int = 0


class Decoder:
    """Runs a bundle. `begin` → `prefill` → `decode_one_token`, or `stream` for all three.

    Args:
        bundle: an opened bundle or its path.
        runtime: `auto`, `portable` or `coreml`.
        precision: arithmetic of the portable runtime (`declared`, `exact`, `narrow`).
        fast: whether `declared` may take the portable decode path; gates run the literal graph, `fast=False`.
        compute_units: Core ML's compute units.
        hints: Core ML's optimization hints, such as {"reshapeFrequency": "Infrequent"}.
    """

    def __init__(self, bundle: Bundle | str | Path, runtime: str = "auto", precision: str = "declared",
                 fast: bool = True, compute_units: str = "CPU_AND_NE", hints: dict | None = None):  # fmt: skip
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.runtime, self.precision, self.fast = runtimes.resolve(runtime), precision, fast
        self.compute_units, self.hints = compute_units, hints or {}
        self.manifest, self.options = self.bundle.manifest, self.bundle.manifest.options
        self.host = Host(self.manifest)
        self.plane = self.host.plane
        # nothing here may hold the decoder itself: one that is dropped shall give its memory back at once
        self._load = partial(runtimes.load_shard, self.bundle, runtime=self.runtime, precision=precision, fast=fast,
                             compute_units=compute_units, hints=self.hints)  # fmt: skip
        self.layers = [self._load(s) for s in self.manifest.shards if s.kind in ("layers", "router")]
        self.heads = [self._load(s) for s in self.bundle.shards("head")]
        self.experts = RoutedExperts(self.bundle, self._load, self.plane)
        self.begin()

    @contextmanager
    def literal(self) -> Iterator["Decoder"]:
        """Within, the portable runtime executes the literal graph, as with `fast=False`; sequences go on as they are."""
        before = self.fast
        try:
            self.fast = False
            with (
                contexts.of_models(self, lambda model: model.literal())
                if self.runtime == "portable"
                else nullcontext()
            ):
                yield self
        finally:
            self.fast = before

    @contextmanager
    def hooked(self, hook_of: Callable[[Shard], Callable | None]) -> Iterator["Decoder"]:
        """Within, every model of the portable runtime has the hook that `hook_of` gives for its
        shard (None: no hook).

        Raises:
            InputError: Core ML shows no operation of a program.
        """
        if self.runtime != "portable":
            raise InputError(
                "hook",
                f"runtime {self.runtime}",
                "the portable runtime, which shows each operation",
                "open the bundle with runtime='portable'",
            )
        with contexts.of_models(self, lambda model: model.hooked(hook_of(model.shard))):
            yield self

    @contextmanager
    def set_aside(self) -> Iterator["Decoder"]:
        """Within, `begin` may start other sequences; afterwards those that ran before go on as if
        nothing had happened."""
        before = {
            name: getattr(self, name) for name in ("run", "states", "ids", "offsets", "times")
        }
        try:
            yield self
        finally:
            vars(self).update(before)

    @cached_property
    def identity(self) -> str:
        """What a snapshot of this decoder is bound to; see `snapshot.identity`."""
        return identity(self.manifest, self.precision if self.runtime == "portable" else self.runtime)

    def begin(self, snapshot: Snapshot | Sequence[Snapshot | None] | None = None) -> None:
        """Starts fresh sequences, one make_state per shard, or continues snapshots (batch > 1: one, or None, per slot).

        Raises:
            InputError: a snapshot that does not fit; what ran before is untouched then.
        """
        held = {slot: self._fitting(s) for slot, s in enumerate(_each(snapshot, self.options.batch)) if s is not None}
        self.run = object()  # whose turn it is: a stream that finds another one here must not go on
        self.states = [model.make_state() for model in self.layers]
        self.ids: list[list[int]] = [[] for _ in range(self.options.batch)]
        self.offsets = np.zeros(self.options.batch, int)
        self.times = Times()
        self._write(held, fresh=True)

    def snapshot(self, slot: int = 0) -> Snapshot:
        """A detached copy of one sequence."""
        offset = int(self.offsets[checks.slot(slot, self.options.batch)])
        assert offset == len(self.ids[slot]), "positions that no token was run for"
        names = [(state, name) for state in self.states for name in state.shard.states]
        states = {name: take(state.read(name)[slot], name, offset) for state, name in names}
        return Snapshot(tuple(self.ids[slot]), self.identity, states)

    def add(self, slot: int, snapshot: Snapshot) -> None:
        """Puts a snapshot in place of the sequence in `slot`; the others go on as if nothing had happened.

        Raises:
            InputError: a snapshot of another bundle, or one with no room; nothing is changed then.
        """
        self._write({checks.slot(slot, self.options.batch): self._fitting(snapshot)})

    def remove(self, slot: int) -> None:
        """Ends the sequence in `slot` and leaves nothing of it behind."""
        empty = {name: np.zeros(shape, np.float32) for name, shape in layout(self.manifest, 0).items()}
        self._write({checks.slot(slot, self.options.batch): Snapshot((), self.identity, empty)})

    def trim(self, count: int, slot: int = 0) -> int:
        """Takes the last `count` tokens of a sequence back; says how many it had to take back.

        Raises:
            InputError: a sequence with side states, or a ring that has wrapped, cannot go back; a negative count.
        """
        offset = int(self.offsets[checks.slot(slot, self.options.batch)])
        count = min(checks.count(count, "tokens to trim"), offset)
        if count and not trimmable(self.manifest, offset):
            raise untrimmable(offset)
        self.offsets[slot] -= count
        del self.ids[slot][offset - count :]
        return count

    def _fitting(self, snapshot: Snapshot) -> Snapshot:
        S, subject = self.options.max_seq_len, f"snapshot of {snapshot.offset} tokens"
        if snapshot.identity != self.identity:
            raise foreign(subject, snapshot.identity, self.identity)
        if snapshot.offset > S:
            raise InputError(subject, f"{snapshot.offset} rows", f"at most max_seq_len = {S}", "export a larger cache")
        shapes = layout(self.manifest, snapshot.offset)  # a ring of another size may hold other rows
        names = shapes.keys() | snapshot.states.keys()
        wrong = [name for name in names if not _like(snapshot.states.get(name), shapes.get(name))]
        if wrong:
            raise InputError(subject, f"state {min(wrong)} missing, unknown or of another shape", "this bundle's states",
                             "restore a snapshot as it was taken")  # fmt: skip
        return snapshot

    def _write(self, held: dict[int, Snapshot], fresh: bool = False) -> None:
        """Writes snapshots into their slots; what other slots hold is read and written back, `fresh` states apart."""
        spare: dict[tuple, np.ndarray] = {}  # one array of each shape: a runtime copies what it is given
        for state in self.states if held else ():
            for name, entry in state.shard.states.items():
                values = {slot: snapshot.states[name] for slot, snapshot in held.items()}
                dtype = next(iter(values.values())).dtype
                if fresh or len(held) == self.options.batch:
                    key = (is_cache(name), *entry.shape)
                    whole = spare[key] = spare[key] if key in spare else np.zeros(entry.shape, dtype)
                else:
                    whole = state.read(name)
                    whole[list(held)] = 0
                for slot, value in values.items():
                    put(whole[slot], name, value, held[slot].offset)
                state.write(name, whole)
        for slot, snapshot in held.items():
            self.offsets[slot], self.ids[slot] = snapshot.offset, list(snapshot.ids)

    def prefill(self, ids, tile: int | Sequence[int] | None = None) -> np.ndarray:
        """Continues each sequence by its prompt, `tile` tokens a call (default t_max; a list: one size after another).

        Args:
            ids: token ids, or one list of ids per sequence when batch > 1 (an empty one for a sequence that waits).

        Returns:
            Logits after the last token: [V], or [B, V] when batch > 1.
        """
        rows = self._rows(ids)
        self.host.check(self.offsets, np.array([len(r) for r in rows]))
        hidden, done = None, 0
        for size in _tiles(max(map(len, rows)), tile or self.options.t_max):
            chunk = [r[done : done + size] for r in rows]
            hidden = self._keep_last(hidden, self.advance(chunk, size), chunk)
            done += size
        return self._shape(self.logits(hidden))

    def decode_one_token(self, token) -> np.ndarray:
        """Continues each sequence by one token (a list of them when batch > 1, None for a sequence that waits); returns
        logits [V] (or [B, V]).

        Raises:
            InputError: no token of the vocabulary, another number of them than sequences; nothing is changed then.
        """
        start = time.perf_counter()
        tokens = [token] if np.ndim(token) == 0 else list(token)
        if len(tokens) != self.options.batch:
            raise InputError("tokens", f"{len(tokens)} of them", f"{self.options.batch}, one for each sequence", "give that many")
        V = self.manifest.dims.V
        chunk = [[] if t is None else [checks.token(t, V)] for t in tokens]
        self.times = Times()
        logits = self.logits(self.advance(chunk, 1)[:, :, :1])
        self.times.total = (time.perf_counter() - start) * 1e3
        return self._shape(logits)

    def stream(self, ids, max_new, *, after=None, stop=None, sampling=GREEDY) -> Iterator[Record]:
        """begin(after) + prefill(ids) + decode: yields one record per new token, sequence by sequence.

        Args:
            ids: the tokens to run first: all of them, or those behind `after`; a list per sequence when batch > 1, an
                empty one for a slot that stays empty.
            max_new: new tokens at most; like `stop` and `sampling`, one for all sequences or a list with one for each.
            after: see `begin`.
            stop: tokens that end a sequence once they are yielded (default: the bundle's end-of-sequence tokens).

        Raises:
            InputError: what cannot be run, before anything is; a stream that goes on after another `begin`.
        """
        rows, B = self._rows(ids), self.options.batch
        stop = self.manifest.tokens.eos if stop is None else stop
        limits = [checks.count(new, "new tokens") for new in _each(max_new, B)]
        picks, held = _each(sampling, B), _each(after, B)
        stops = stop if B > 1 and len(stop) and np.ndim(stop[0]) else [stop] * B
        self._fits(rows, limits, held)
        self.begin(held)
        run = self.run
        logits, times = self.prefill(rows).reshape(B, -1), self.times
        last: list[int | None] = [None] * B
        live = [slot for slot in range(B) if rows[slot] and limits[slot]]
        for step in range(1, max(limits) + 1):
            for slot in live:
                last[slot] = picks[slot].pick(logits[slot], int(self.offsets[slot]))
            for slot in live:
                yield Record(last[slot], logits[slot], times, slot)
            live = [s for s in live if step < limits[s] and last[s] not in stops[s]]
            if not live:
                return
            if self.run is not run:
                raise InputError("stream", "another sequence begun on its decoder", "a decoder of its own until it ends",
                                 "drain one stream before the next, or open a second Decoder")  # fmt: skip
            keep = range(B) if self.options.kv_write == "slice" else live  # a slice moves every sequence on, ended or not
            logits = self.decode_one_token([last[s] if s in keep else None for s in range(B)]).reshape(B, -1)
            times = self.times

    def generate(self, ids, max_new, **options) -> list:
        """The tokens of `stream`, drained: a list, or one list per sequence when batch > 1."""
        tokens: list[list[int]] = [[] for _ in range(self.options.batch)]
        for record in self.stream(ids, max_new, **options):
            tokens[record.slot].append(record.token)
        return tokens[0] if self.options.batch == 1 else tokens

    def advance(self, chunk: list[Sequence[int]], T: int) -> np.ndarray:
        """Runs every layer once over `chunk` (ids per sequence, at most T each) and moves the positions on.

        Returns:
            Hidden states [B, C, T].
        """
        T = self.options.t_max if self.options.t == "fixed" else T
        counts = np.array([len(c) for c in chunk])
        ids = np.zeros((len(chunk), T), int)
        for slot, tokens in enumerate(chunk):
            ids[slot, : len(tokens)] = tokens
        io = self.host.inputs(self.offsets, counts, T)
        io[X] = self.plane(self.bundle.embed(ids).transpose(0, 2, 1))
        for index in range(len(self.layers)):
            start = time.perf_counter()
            io = self.run_layers(index, io, counts)
            self.times.layers.append((time.perf_counter() - start) * 1e3)
        self.offsets = self.offsets + counts
        for held, tokens in zip(self.ids, chunk, strict=True):
            held.extend(map(int, tokens))
        return io[X].reshape(len(chunk), -1, T)

    def run_layers(self, index: int, io: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
        """Runs layer shard `index` on its state, routed experts included.

        Args:
            io: `Host.inputs` of the call and `x`; for a later shard, `router_state` where the family has one.
            counts: [B] valid columns.

        Returns:
            `io` for the next shard: `x` is this one's hidden output, `router_state` the state it hands on.
        """
        model, shard = self.layers[index], self.layers[index].shard
        made = model.predict({name: io[name] for name in shard.inputs}, self.states[index])
        hidden = made[HIDDEN] if HIDDEN in made else self.experts.run(shard.layers[0], made, counts)
        return io | {X: hidden} | ({ROUTER_STATE: made[ROUTER_STATE_OUT]} if ROUTER_STATE_OUT in made else {})

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call."""
        start, parts = time.perf_counter(), []
        for first in range(0, hidden.shape[2], self.options.t_max):
            x = self.plane(hidden[:, :, first : first + self.options.t_max])
            used = x.shape[2] * x.shape[3]
            if self.options.t == "fixed" and used < self.options.t_max:
                x = self.plane(np.pad(hidden[:, :, first:], ((0, 0), (0, 0), (0, self.options.t_max - used))))
            slices = [model.predict({X: x})[LOGITS] for model in self.heads]
            parts.append(np.concatenate([s.reshape(*s.shape[:2], -1)[:, :, :used] for s in slices], axis=1))
        self.times.head = (time.perf_counter() - start) * 1e3
        return np.concatenate(parts, axis=2).transpose(0, 2, 1)

    def _rows(self, ids) -> list[list[int]]:
        batch, V = self.options.batch, self.manifest.dims.V
        rows = [list(ids)] if len(ids) and np.ndim(ids[0]) == 0 else [list(r) for r in ids]
        if len(rows) != batch or not any(rows):
            raise InputError("prompt", f"{len(rows)} sequences of {[len(r) for r in rows]} tokens",
                             f"{batch}, one of them of at least one token", "give one prompt per sequence")  # fmt: skip
        return [[checks.token(t, V) for t in r] for r in rows]

    def _fits(self, rows: list[list[int]], limits: list[int], after: Sequence[Snapshot | None]) -> None:
        S = self.options.max_seq_len
        for row, new, held in zip(rows, limits, after, strict=True):
            before = held.offset if held else 0
            if held and not row:
                raise InputError("prompt after a snapshot", "no token", "at least one, to have logits to go on from",
                                 "trim the snapshot by a token and give that one")  # fmt: skip
            if row and before + len(row) + max(new - 1, 0) > S:
                raise InputError("prompt and new tokens", f"{before + len(row)} + {new}", f"at most max_seq_len = {S} positions",
                                 "shorten them, or export with a larger --max-seq-len")  # fmt: skip

    def _keep_last(self, before, hidden: np.ndarray, chunk) -> np.ndarray:
        """Hidden state of each sequence's last valid token so far, [B, C, 1]."""
        last = np.zeros((*hidden.shape[:2], 1), np.float32) if before is None else before
        for slot, tokens in enumerate(chunk):
            if tokens:
                last[slot, :, 0] = hidden[slot, :, len(tokens) - 1]
        return last

    def _shape(self, logits: np.ndarray) -> np.ndarray:
        return logits[0, -1] if self.options.batch == 1 else logits[:, -1]


def _like(value: np.ndarray | None, shape: tuple[int, ...] | None) -> bool:
    """Whether a state has the shape it should, the rows [H_kv, rows, D] of a cache apart."""
    if value is None or shape is None or value.ndim != len(shape):
        return False
    return value.shape == shape or (len(shape) == 3 and value.shape[::2] == shape[::2])


def _each(value, B: int) -> list:
    """One value for every sequence, or the list that already has one for each; one snapshot goes into slot 0."""
    if isinstance(value, Snapshot):
        return [value] + [None] * (B - 1)
    each = list(value) if isinstance(value, (list, tuple)) else [value] * B
    if len(each) != B:
        raise InputError("a list with a value for each sequence", f"{len(each)} values", f"{B}, or one value for all",
                         "give a list as long as the batch")  # fmt: skip
    return each


def _tiles(total: int, tile: int | Sequence[int]) -> Iterator[int]:
    """Sizes that cover `total` tokens, the last one partial; a sequence of sizes is cycled."""
    sizes, i = [tile] if np.ndim(tile) == 0 else list(tile), 0
    while total > 0:
        size = min(sizes[i % len(sizes)], total)
        yield size
        total, i = total - size, i + 1
