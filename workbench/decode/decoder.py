"""The decoder: takes token ids, returns logits and tokens, and advances one state per
shard and batch of sequences, chunk by chunk.

Each sequence of the batch has an index `seq`, a position of its own, and can be
replaced by a snapshot; no sequence affects another."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from operator import methodcaller
from pathlib import Path

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import HIDDEN, LOGITS, X
from workbench.decode import calls, checks
from workbench.decode.experts import RoutedExperts
from workbench.decode.inputs import Host
from workbench.decode.sampling import Sampling
from workbench.decode.snapshot import (
    Snapshot,
    UndoDepth,
    fits,
    foreign,
    identity,
    layout,
    per_sequence,
    put,
    take,
    undoable,
)
from workbench.decode.times import Times
from workbench.errors import InputError
from workbench.runtime import Model, State
from workbench.runtime.chain import ShardChain

GREEDY = Sampling()


@dataclass
class Record:
    """One generated token: its id, the logits [V] from which it was picked, the times
    of the call that computed them, and the index of its sequence in the batch."""

    token: int
    logits: np.ndarray
    times: Times
    seq: int = 0


class Decoder:
    """Runs a bundle. `begin` → `prefill` → `decode_one_token`, or `stream` for all
    three; `trim` undoes tokens, as speculative decoding does with wrong guesses.

    Args:
        bundle: an opened bundle or its path.
        runtime: `auto`, `portable`, `coreml`, `coreai`, `stand-in` or `stand-in:FAULT`;
            the attribute has no fault, which is one of its own ("": none).
        precision: arithmetic of the portable runtime (`declared`, `exact`, `narrow`);
            that of `coreai` follows from the bundle, fp16 as `declared` and fp32 as
            `exact`.
        fast: whether `declared` takes the portable decode path, for timing; by default
            the literal graph runs.
        compute_units: Core ML's compute units.
        hints: Core ML's optimization hints, such as {"reshapeFrequency": "Infrequent"}.
    """

    # of every token; packages of other exporters may keep them to themselves
    gives_logits = True

    def __init__(
        self,
        bundle: Bundle | str | Path,
        runtime: str = "auto",
        precision: str = "declared",
        fast: bool = False,
        compute_units: str = "CPU_AND_NE",
        hints: dict | None = None,
    ):
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        self.bundle, self.manifest = bundle, bundle.manifest
        self.options = options = bundle.manifest.options
        runtime = runtimes.resolve(runtime, options.target)
        self.runtime, self.fault = runtimes.named(runtime)
        if self.runtime == "coreai":
            precision = {"fp16": "declared", "fp32": "exact"}[options.program_dtype]
        self.precision, self.fast = precision, fast
        self.compute_units, self.hints = compute_units, hints or {}
        self.host = Host(self.manifest)
        self.plane = self.host.plane
        self.undo = UndoDepth(self.manifest)
        # nothing here may hold the decoder itself: one that is dropped shall give its
        # memory back at once
        self._load = partial(
            runtimes.load_shard,
            bundle,
            runtime=runtime,
            precision=precision,
            fast=fast,
            compute_units=compute_units,
            hints=self.hints,
        )
        self.layers = [
            self._load(s)
            for s in self.manifest.shards
            if s.kind in ("layers", "router")
        ]
        self.heads = [self._load(s) for s in bundle.shards("head")]
        self.experts = RoutedExperts(bundle, self._load, self.plane)
        self.chain = ShardChain(self.layers, calls.LINKS)
        self.head_chain = ShardChain(self.heads, {})
        self.begin()

    @property
    def arithmetic(self) -> str:
        """Which of `gates.T_TOLERANCE` holds: that of the portable runtime's precision
        or of exact programs, else the runtime's."""
        if self.runtime == "coreai" and self.precision != "exact":
            return "coreai"
        if self.runtime in ("portable", "coreai"):
            return self.precision
        return "coreml"

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager inside which `begin` may start other sequences, which run the
        literal graph (as with `fast=False`). On exit the earlier sequences continue
        unchanged."""
        names = ("run", "states", "ids", "offsets", "floors", "undone", "times", "fast")
        before = {name: getattr(self, name) for name in names}
        literal = nullcontext
        if self.runtime == "portable":
            literal = methodcaller("literal")
        try:
            self.fast = False
            with self._of_models(literal):
                yield
        finally:
            vars(self).update(before)

    @contextmanager
    def hooked(self, hook_of: Callable[[Shard], Callable | None]) -> Iterator[None]:
        """Context manager that sets the hook `hook_of(shard)` on every model of the
        portable runtime or of Core AI (None: no hook).

        Raises:
            InputError: Core ML shows no operation of a program.
        """
        if self.runtime not in ("portable", "coreai"):
            raise InputError(
                "hook",
                f"runtime {self.runtime}",
                "the portable runtime, which shows each operation",
                "open the bundle with runtime='portable'",
            )
        with self._of_models(lambda model: model.hooked(hook_of(model.shard))):
            yield

    @contextmanager
    def _of_models(
        self, context_of: Callable[[Model], AbstractContextManager]
    ) -> Iterator[None]:
        """Enters `context_of(model)` for every model, including those of experts that
        are loaded inside."""
        load = self.experts.load
        with ExitStack() as contexts:

            def load_within(shard: Shard) -> Model:
                model = load(shard)
                contexts.enter_context(context_of(model))
                return model

            for model in (*self.layers, *self.heads, *self.experts.models.values()):
                contexts.enter_context(context_of(model))
            contexts.callback(setattr, self.experts, "load", load)
            self.experts.load = load_within
            yield

    @cached_property
    def identity(self) -> str:
        """The identity to which snapshots of this decoder are bound; see
        `snapshot.identity`."""
        if self.runtime == "portable":
            return identity(self.manifest, self.precision)
        return identity(self.manifest, self.runtime)

    @property
    def named_states(self) -> list[tuple[State, str]]:
        """Pairs (state of a shard, logical name) for every state of every shard."""
        return [(state, name) for state in self.states for name in state.shard.states]

    def begin(
        self, snapshot: Snapshot | Sequence[Snapshot | None] | None = None
    ) -> None:
        """Starts fresh sequences, one make_state per shard, or continues snapshots
        (batch > 1: a list with one or None each).

        Raises:
            InputError: a snapshot that does not fit; what ran before is untouched then.
        """
        B = self.options.batch
        snapshots = {}
        for seq, each in enumerate(per_sequence(snapshot, B)):
            if each is not None:
                snapshots[seq] = self._fitting(each)
        self.run = object()  # a stream whose `run` this no longer is must not continue
        self.states = [model.make_state() for model in self.layers]
        self.ids: list[list[int]] = [[] for _ in range(B)]
        self.offsets = np.zeros(B, int)
        self.floors = np.zeros(B, int)  # the fewest tokens that each can go back to
        self.undone = np.zeros(B, int)  # tokens undone since the last call
        self.times = Times()
        self._write(snapshots, fresh=True)

    def snapshot(self, seq: int = 0) -> Snapshot:
        """A detached copy of one sequence."""
        ids = tuple(self.ids[checks.sequence(seq, self.options.batch)])
        assert self.offsets[seq] == len(ids), "positions that no token was run for"
        floor, undone, states = int(self.floors[seq]), int(self.undone[seq]), {}
        shapes = layout(self.manifest, len(ids), floor)
        for state, name in self.named_states:
            kind = state.shard.kind_of(name)
            rows = shapes[name][-2]
            states[name] = take(state.read(name)[seq], kind, rows, len(ids), undone)
        return Snapshot(ids, self.identity, states, floor)

    def add(self, seq: int, snapshot: Snapshot) -> None:
        """Puts a snapshot in place of sequence `seq`; the others are unchanged.

        Raises:
            InputError: a snapshot of another bundle, or one with no room; nothing is
                changed then.
        """
        self._write({checks.sequence(seq, self.options.batch): self._fitting(snapshot)})

    def remove(self, seq: int) -> None:
        """Ends sequence `seq` and clears its states."""
        shapes = layout(self.manifest, 0)
        empty = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.add(seq, Snapshot((), self.identity, empty, 0))

    def trim(self, count: int, seq: int = 0) -> int:
        """Undoes the last `count` tokens of a sequence, as if they had never run;
        returns how many it had to undo.

        No state is copied: the next call writes over what these tokens left. Caches go
        back to any token; rings, and with the export option `undo` tails, t_max tokens
        from the most that the sequence has had; pending states to the last call's first
        token. What is left can be snapshotted, trimmed again and continued.

        Raises:
            InputError: a state does not go back that far, which is then unchanged; a
                negative count.
        """
        offset = int(self.offsets[checks.sequence(seq, self.options.batch)])
        count = undoable(count, offset, int(self.floors[seq]))
        self.offsets[seq] -= count
        self.undone[seq] += count
        del self.ids[seq][offset - count :]
        return count

    def _fitting(self, snapshot: Snapshot) -> Snapshot:
        S = self.options.max_seq_len
        subject = f"snapshot of {snapshot.offset} tokens"
        if snapshot.identity != self.identity:
            raise foreign(subject, snapshot.identity, self.identity)
        if snapshot.offset > S:
            raise InputError(
                subject,
                f"{snapshot.offset} rows",
                f"at most max_seq_len = {S}",
                "export a larger cache",
            )
        shapes = layout(self.manifest, snapshot.offset, self._floor(snapshot))
        if not fits(snapshot, shapes):
            raise InputError(
                subject,
                "a state that is missing, unknown or of another shape",
                "this bundle's states",
                "restore a snapshot as it was taken",
            )
        return snapshot

    def _floor(self, snapshot: Snapshot) -> int:
        """The fewest tokens that a sequence can go back to which continues a snapshot
        here."""
        floor = self.undo.floor(snapshot.floor, snapshot.offset)
        return max(snapshot.floor, int(floor))

    def _write(self, snapshots: dict[int, Snapshot], fresh: bool = False) -> None:
        """Writes snapshots in place of their sequences. The other sequences' values are
        read and written back, unless the states are `fresh`."""
        # one for all states that fill the same rows of the same shape: a runtime copies
        # what is written
        batches: dict[tuple, np.ndarray] = {}
        if not snapshots:
            return
        for state, name in self.named_states:
            kind = state.shard.kind_of(name)
            shape = state.shard.states[name].shape
            values = [snapshot.states[name] for snapshot in snapshots.values()]
            if fresh or len(snapshots) == self.options.batch:
                key = kind, *shape, *(value.shape for value in values)
                batch = batches.setdefault(key, np.zeros(shape, values[0].dtype))
            else:
                batch = state.read(name)
                batch[list(snapshots)] = 0
            for seq, snapshot in snapshots.items():
                put(batch[seq], kind, snapshot.states[name], snapshot.offset)
            state.write(name, batch)
        for seq, snapshot in snapshots.items():
            self.offsets[seq], self.ids[seq] = snapshot.offset, list(snapshot.ids)
            self.floors[seq], self.undone[seq] = self._floor(snapshot), 0

    def prefill(self, ids, tile: int | Sequence[int] | None = None) -> np.ndarray:
        """Runs the prompt of each sequence, `tile` tokens a call (default t_max; a
        list: one size after another).

        Args:
            ids: token ids, or one list of ids per sequence when batch > 1 (an empty one
                for a sequence that waits).

        Returns:
            Logits after the last token: [V], or [B, V] when batch > 1.
        """
        prompts = checks.prompts(ids, self.options.batch, self.manifest.dims.V)
        self.host.check(self.offsets, [len(prompt) for prompt in prompts])
        # hidden state of each last valid token
        last = np.zeros((len(prompts), self.manifest.dims.C, 1), np.float32)
        for chunk, hidden in self._chunks(prompts, tile):
            for seq, tokens in enumerate(chunk):
                if tokens:
                    last[seq, :, 0] = hidden[seq, :, len(tokens) - 1]
        return self._shape(self.logits(last))

    def _chunks(self, prompts: list, tile=None) -> Iterator[tuple[list, np.ndarray]]:
        """Runs prompts chunk by chunk: of each call the ids and hidden states [B, C,
        T]."""
        start = 0
        stop = max(len(prompt) for prompt in prompts)
        for limit in cycle(np.ravel(tile or self.options.t_max).tolist()):
            size = self.options.tokens(min(limit, stop - start))
            chunk = [prompt[start : start + size] for prompt in prompts]
            yield chunk, self.advance(chunk, size)
            start += size
            if start >= stop:
                return

    def decode_one_token(self, token) -> np.ndarray:
        """Continues each sequence by one token (batch > 1: a list, None for a sequence
        that waits). Returns logits [V], or [B, V] when batch > 1.

        Raises:
            InputError: no token of the vocabulary, another number of them than
                sequences; nothing is changed then.
        """
        start = time.perf_counter()
        if np.ndim(token) == 0:
            token = [token]
        if len(token) != self.options.batch:
            raise InputError(
                "tokens",
                f"{len(token)} of them",
                f"{self.options.batch}, one for each sequence",
                "give that many",
            )
        prompts = [[] if each is None else [each] for each in token]
        chunk = [checks.token_ids(ids, self.manifest.dims.V) for ids in prompts]
        self.times = Times()
        logits = self.logits(self.advance(chunk, 1)[:, :, :1])
        self.times.total = (time.perf_counter() - start) * 1e3
        return self._shape(logits)

    def stream(
        self, ids, max_new, *, after=None, stop=None, sampling=GREEDY, prefill=None
    ) -> Iterator[Record]:
        """begin(after) + prefill(ids) + decode: yields one record per new token,
        sequence by sequence.

        Args:
            ids: the prompt: all tokens, or those after `after`. With batch > 1 a list
                for each sequence, an empty one for a sequence that stays as it is.
            max_new: new tokens at most; like `stop` and `sampling`, one for all
                sequences or a list with one for each.
            after: what to continue: None for nothing, snapshots (see `begin`), or
                "running" for the decoder's own sequences.
            prefill: replaces the decoder's own prefill; it runs the prompts, leaves
                their sequences in this decoder and returns the logits (see
                `transfer.prefill_by`). `after` must then be None.
            stop: tokens that end a sequence once they are yielded (default: the
                bundle's end-of-sequence tokens).

        Raises:
            InputError: prompts that cannot be run, before anything runs; a stream that
                is continued after another one began.
        """
        prompts = checks.prompts(ids, self.options.batch, self.manifest.dims.V)
        B = self.options.batch
        stops = self._stops(stop)
        samplings = per_sequence(sampling, B)
        limits = [
            checks.count(limit, "new tokens") for limit in per_sequence(max_new, B)
        ]
        if prefill:
            checks.nothing_before(after)
        self._begin_after(after, prompts, limits)
        logits = (prefill or self.prefill)(prompts).reshape(B, -1)
        times = self.times
        self.run = run = object()
        tokens: list[int | None] = [None] * B
        live = [seq for seq in range(B) if prompts[seq] and limits[seq]]
        for step in range(1, max(limits) + 1):
            for seq in live:
                tokens[seq] = samplings[seq].pick(logits[seq], int(self.offsets[seq]))
            for seq in live:
                yield Record(tokens[seq], logits[seq], times, seq)
            for seq in list(live):
                if step >= limits[seq] or tokens[seq] in stops[seq]:
                    live.remove(seq)
                    if self.options.kv_write == "mask":  # a slice moves every one on
                        tokens[seq] = None
            if not live:
                return
            checks.same_run(self.run, run)
            logits = self.decode_one_token(tokens).reshape(B, -1)
            times = self.times

    def _stops(self, stop) -> list:
        """For each sequence the tokens that end it."""
        if stop is None:
            stop = self.manifest.tokens.eos
        if self.options.batch > 1 and len(stop) and np.ndim(stop[0]):
            return per_sequence(list(stop), self.options.batch)
        return [stop] * self.options.batch

    def _begin_after(self, after, prompts: list, limits: list[int]) -> None:
        """Begins after what `stream` is to continue, once prompts and new tokens are
        known to be allowed there."""
        if after == "running":
            checks.room(prompts, limits, self.offsets, self.options.max_seq_len)
            return
        snapshots = per_sequence(after, self.options.batch)
        checks.tokens_after(snapshots, prompts)
        offsets = [getattr(snapshot, "offset", 0) for snapshot in snapshots]
        checks.room(prompts, limits, offsets, self.options.max_seq_len)
        self.begin(snapshots)

    def generate(self, ids, max_new, **options) -> list:
        """All tokens of `stream`: a list, or one list per sequence when batch > 1."""
        tokens: list[list[int]] = [[] for _ in range(self.options.batch)]
        for record in self.stream(ids, max_new, **options):
            tokens[record.seq].append(record.token)
        if self.options.batch == 1:
            return tokens[0]
        return tokens

    def advance(self, chunk: list[Sequence[int]], T: int) -> np.ndarray:
        """Runs every layer once over `chunk` (ids per sequence, at most T each) and
        advances the positions.

        Returns:
            Hidden states [B, C, T].
        """
        T = self.options.width(T)
        counts = np.array([len(tokens) for tokens in chunk])
        ids = np.zeros((len(chunk), T), int)
        for seq, tokens in enumerate(chunk):
            ids[seq, : len(tokens)] = tokens

        before = self.offsets
        floors = np.minimum(self.floors, before)
        io = self.host.inputs(before, counts, T, before - floors, self.undone)
        io[X] = self.plane(self.bundle.embed(ids).transpose(0, 2, 1))
        chain = self.chain.run(io, self.states)
        if chain:
            hidden = chain.outputs[-1][HIDDEN].copy()
            self.times.add_chain(*chain.ms())
        else:
            hidden = self._one_by_one(io, counts)
        self.offsets = before + counts
        self.floors = np.maximum(floors, self.undo.floor(before, self.offsets))
        self.undone = np.zeros_like(before)
        for history, tokens in zip(self.ids, chunk, strict=True):
            history.extend(map(int, tokens))
        return hidden.reshape(len(chunk), -1, T)

    def _one_by_one(self, io: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        """Runs every layer shard and returns the hidden output of the last one."""
        for index in range(len(self.layers)):
            start, cpu_start = time.perf_counter(), time.thread_time()
            io = self.run_layers(index, io, counts)
            self.times.layers.append((time.perf_counter() - start) * 1e3)
            self.times.add_step(cpu_start, self.native_ms)
        return io[X]

    def run_layers(
        self, index: int, io: dict[str, np.ndarray], counts: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Runs layer shard `index` on its state, routed experts included.

        Args:
            io: `Host.inputs` of the call and `x`; for a later shard, `router_state`
                where the family has one.
            counts: [B] valid columns.

        Returns:
            `io` for the next shard: `x` is this one's hidden output, `router_state` the
            state it hands on.
        """
        model = self.layers[index]
        shard = model.shard
        outputs = model.predict(
            {name: io[name] for name in shard.inputs}, self.states[index]
        )
        self.native_ms = [model.last_native_ms]
        if shard.kind == "router":
            outputs[HIDDEN] = self.experts.run(shard.layers[0], outputs, counts)
            self.native_ms += self.experts.native_ms
        return io | calls.following(outputs)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        t_max, T, chain = self.options.t_max, hidden.shape[2], None
        chunks = [hidden[:, :, i : i + t_max] for i in range(0, T, t_max)]
        if len(chunks) == 1:
            chain = self.head_chain.run(*calls.head_inputs(self, chunks), [])
        if chain:
            slices, native_ms = [each[LOGITS] for each in chain.outputs], [None]
            logits = calls.joined(slices, T)
        else:
            parts, native_ms = calls.head_logits(self, chunks)
            logits = np.concatenate(parts, axis=1)
        self.times.head = (time.perf_counter() - start) * 1e3
        self.times.add_step(cpu_start, native_ms)
        return logits

    def sequence_logits(self, sequences: list[list[int]], count: int) -> np.ndarray:
        """Logits [B, count, V] of the last `count` tokens of fresh sequences of one
        length, one for each of the batch."""
        self.begin()
        parts = []
        for chunk, hidden in self._chunks(sequences):
            parts.append(hidden[:, :, : len(chunk[0])])
        return self.logits(np.concatenate(parts, axis=2)[:, :, -count:])

    def prefill_calls(self, count: int) -> int:
        """Calls that the prefill of `count` tokens takes."""
        return -(-count // self.options.t_max)

    def _shape(self, logits: np.ndarray) -> np.ndarray:
        if self.options.batch == 1:
            return logits[0, -1]
        return logits[:, -1]
