"""The decoder: token ids in, logits and tokens out, one state per shard and batch of
sequences.

Each sequence of the batch has an index `seq` and a position of its own, and can be
replaced by a snapshot; no sequence affects another."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import (
    HIDDEN,
    IDS,
    LOGITS,
    MATRIX_STATE,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    X,
)
from workbench.decode import checks
from workbench.decode import snapshot as snapshots
from workbench.decode.checks import whole_number
from workbench.decode.experts import RoutedExperts
from workbench.decode.inputs import Host
from workbench.decode.sampling import Sampling
from workbench.decode.snapshot import Sequences, Snapshot
from workbench.errors import InputError
from workbench.runtime import Model, State

GREEDY = Sampling()
# by the name of an output of a layer shard, the input that it is of the next one
LINKS = {HIDDEN: X, LOGITS: X, ROUTER_STATE_OUT: ROUTER_STATE}
Hook = Callable[[Shard, object, list], list | None]


@dataclass
class Times:
    """Milliseconds of one call: `parts` has for every layer shard and then for the head
    the time on the host's clock, CPU time of the calling thread, and Core ML's own share
    (None if unknown); `total` is the whole call's."""

    parts: list[tuple[float, float, float | None]] = field(default_factory=list)
    total: float = 0.0

    def add(self, start: tuple[float, float], native_ms: list[float | None]) -> None:
        """Adds what began at `clock()` and made predictions of these native times."""
        ms, cpu_ms = (1e3 * (now - then) for now, then in zip(clock(), start))
        native = None if None in native_ms else sum(native_ms)
        self.parts.append((ms, cpu_ms, native))


def clock() -> tuple[float, float]:
    """Seconds of the host's clock, and of this thread's CPU."""
    return time.perf_counter(), time.thread_time()


@dataclass
class Record:
    """One generated token: its id, the logits [V] from which it was picked, the times
    of the call that computed them, and the index of its sequence in the batch."""

    token: int
    logits: np.ndarray
    times: Times
    seq: int = 0


class Decoder:
    """Runs a bundle.

    `fresh` gives sequences, `advance` and `step` run one call of them. `begin`,
    `prefill`, `decode_one_token`, `snapshot`, `add`, `remove` and `trim` do the same to
    the decoder's current sequences, `seqs`; `stream` and `generate` begin new ones.

    Args:
        bundle: an opened bundle or its path.
        runtime: `auto`, `portable`, `coreml`, `stand-in` or a plug-in's.
        precision: arithmetic of the portable runtime (`declared`, `exact`, `narrow`);
            a plug-in's target has its own.
        fast: whether the portable runtime runs groups of operations as one step each in
            `declared`; by default every operation runs as the program states it.
        reads: with `fast`, the rows of a cache that attention reads: `used`, those that
            hold tokens, or `all`, as the program does.
        compute_units: Core ML's compute units.
        hints: Core ML's optimization hints, such as {"reshapeFrequency": "Infrequent"}.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        runtime: str = "auto",
        precision: str = "declared",
        fast: bool = False,
        reads: str = "used",
        compute_units: str = "CPU_AND_NE",
        hints: dict | None = None,
    ):
        bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        bundle.check_contents()
        self.bundle, self.manifest = bundle, bundle.manifest
        self.options, self.host = bundle.manifest.options, Host(bundle.manifest)
        self.plane, plugin = self.host.plane, self.options.plugin
        self.runtime = runtimes.resolve(runtime, plugin)
        self.is_device = runtimes.is_device(self.runtime)
        self.precision = plugin.precision if plugin else precision
        self.fast, self.reads = fast, reads
        self.compute_units, self.hints = compute_units, hints or {}
        # nothing here may hold the decoder itself: one that is dropped shall give its
        # memory back at once
        self.how = {"runtime": self.runtime, "precision": self.precision}
        self.how |= {"compute_units": compute_units, "hints": self.hints}
        load = partial(runtimes.load_shard, bundle, fast=fast, reads=reads, **self.how)
        kinds = "layers", "router"
        self.layers = [load(s) for s in self.manifest.shards if s.kind in kinds]
        self.heads = [load(s) for s in bundle.shards("head")]
        self.experts = RoutedExperts(bundle, load, self.plane)
        models = [*self.layers, *self.heads]
        self.shows_inner_layers = all(m.shows_inner_layers for m in models)
        self.begin()

    @property
    def arithmetic(self) -> str:
        """Whose rounding the results have: a device's, a plug-in's or that of the
        precision."""
        if self.is_device:
            return "coreml"
        plugin = self.options.plugin
        return plugin.arithmetic if plugin else self.precision

    @cached_property
    def identity(self) -> str:
        """What snapshots of this decoder are bound to; see `snapshot.identity`."""
        how = self.runtime if self.is_device else self.precision
        return snapshots.identity(self.manifest, how)

    @cached_property
    def plain(self) -> "Decoder":
        """A decoder of the same bundle that fuses nothing: itself, unless it is
        `fast`."""
        return type(self)(self.bundle, **self.how) if self.fast else self

    def fresh(self, after=None) -> Sequences:
        """New sequences, one make_state per shard: without a token, or `after` a
        snapshot (batch > 1: one for all, or a list with one or None each).

        Raises:
            InputError: a snapshot that does not fit.
        """
        states, B = [model.make_state() for model in self.layers], self.options.batch
        ids = [[] for _ in range(B)]
        seqs = Sequences(self.manifest, self.identity, states, ids, [0] * B)
        for seq, snapshot in enumerate(per_sequence(after, B)):
            if snapshot is not None:
                snapshots.put(seqs, seq, snapshot)
        return seqs

    def advance(
        self,
        seqs: Sequences,
        chunk: Sequence[Sequence[int]],
        hook: Hook | None = None,
        T: int = 0,
        keep: bool = False,
    ) -> tuple[np.ndarray, Times]:
        """Runs every layer shard once over the next tokens of each sequence.

        Args:
            chunk: token ids of each sequence, from none to t_max.
            hook: called as hook(shard, op, outputs) after every operation of a program,
                whose outputs it may replace by those that it returns.
            T: columns of the call at least.
            keep: whether `trim` can go back into the call where states are recurrent
                and a mask writes the caches.

        Returns:
            Hidden states [B, C, T], whose columns beyond a sequence's tokens mean
            nothing, and the times without the head's.

        Raises:
            InputError: more than t_max tokens, a position past max_seq_len, a hook on a
                runtime that shows no operation, a sequence that an interrupted call has
                advanced in part; nothing is changed then.
        """
        if hook and self.is_device:
            raise InputError(
                "hook",
                f"runtime {self.runtime}",
                "the portable runtime, which shows each operation",
                "open the bundle with runtime='portable'",
            )
        counts = np.array([*map(len, chunk)])
        most = self.options.t_max
        if max(T, *counts) > most:
            raise InputError(
                "call",
                f"{max(T, *counts)} tokens",
                f"at most t_max = {most}",
                "make several calls, or export with more --tokens",
            )
        T = self.options.width(max(T, *counts))
        io, times = self.inputs(seqs.offsets, chunk, T), Times()
        seqs.check()
        seqs.kept, seqs.T = [], T
        keep = keep and self.options.kv_write == "mask" and max(counts) > 1
        if keep and snapshots.floor(self.manifest, 1):
            seqs.kept = [snapshots.take(seqs, seq) for seq in range(len(chunk))]
        seqs.raise_floors(counts)
        for model, state in zip(self.layers, seqs.states, strict=True):
            start = clock()
            (io,) = self.run_calls(model, [io], [counts], [state], [hook])
            native = [model.last_native_ms]
            if model.shard.kind == "router":
                native += self.experts.native_ms
            times.add(start, native)
        seqs.append(chunk)
        for seq, before in enumerate(seqs.kept):
            seqs.floors[seq] = before.offset
        return io[X].reshape(len(chunk), -1, T), times

    def inputs(
        self, offsets: np.ndarray, chunk: Sequence[Sequence[int]], T: int
    ) -> dict[str, np.ndarray]:
        """What the first shard reads in a call of T columns: the host's inputs, and the
        embeddings of the tokens as `x`."""
        ids = np.array([[*tokens, *[0] * (T - len(tokens))] for tokens in chunk])
        io = self.host.inputs(offsets, np.array([*map(len, chunk)]), T)
        x = self.plane(self.bundle.embed(ids).transpose(0, 2, 1))
        return io | {X: x, IDS: ids}

    def run_calls(
        self,
        model: Model,
        ios: Sequence[dict[str, np.ndarray]],
        counts: Sequence[np.ndarray],
        states: Sequence[State],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, np.ndarray]]:
        """Runs a layer shard, routed experts included, for one call after another.

        The portable runtime reads each weight once for all of them, but where a state
        is a matrix: it carries the rounding of every earlier token on, so that its sums
        must be those of decoding.

        Args:
            ios: what the shard reads in each call, and perhaps more.
            counts: [B] valid columns of each call.
            states, hooks: of each call.

        Returns:
            `ios` for the next shard: `x` is this one's hidden output, `router_state` the
            state that it hands on where the family has one.
        """
        shard, results = model.shard, []
        inputs = [{name: io[name] for name in shard.inputs} for io in ios]
        calls = inputs, states, [hook and partial(hook, shard) for hook in hooks]
        if any(name.endswith(MATRIX_STATE) for name in shard.states):
            outputs = list(map(model.predict, *calls))
        else:
            outputs = model.predict_calls(*calls)
        for io, out, count, hook in zip(ios, outputs, counts, hooks, strict=True):
            if shard.kind == "router":
                out[HIDDEN] = self.experts.run(shard.layers[0], out, count, hook)
            handed_on = {name: out[key] for key, name in LINKS.items() if key in out}
            results.append(io | handed_on)
        return results

    def logits(
        self, hidden: np.ndarray, times: Times | None = None, hook: Hook | None = None
    ) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call; adds the
        head's times to `times`. Where the layers' packages contain the head, `hidden`
        has the logits [B, V, T] already."""
        start, t_max, native = clock(), self.options.t_max, [None]
        if self.heads:
            parts = np.split(hidden, range(t_max, hidden.shape[2], t_max), axis=2)
            ios = []
            for part in parts:
                T = part.shape[2]
                dummies = 0, self.options.width(T) - T
                io = np.pad(part, ((0, 0), (0, 0), dummies))
                ios.append({X: self.plane(io)})
            slices, native = [], []
            for model in self.heads:
                own = hook and partial(hook, model.shard)
                calls = ios, [None] * len(ios), [own] * len(ios)
                outputs = [out[LOGITS] for out in model.predict_calls(*calls)]
                native.append(model.last_native_ms)
                rows = [
                    each.reshape(*each.shape[:2], -1)[:, :, : part.shape[2]]
                    for each, part in zip(outputs, parts)
                ]
                slices.append(np.concatenate(rows, axis=2))
            hidden = np.concatenate(slices, axis=1)
        if times:
            times.add(start, native)
        return np.ascontiguousarray(hidden.transpose(0, 2, 1))

    def step(
        self, seqs: Sequences, chunk: Sequence[Sequence[int]], hook: Hook | None = None
    ) -> tuple[np.ndarray, Times]:
        """One call of the layers and, for the last token of each sequence, of the head:
        logits [B, V] and the call's times."""
        start = time.perf_counter()
        hidden, times = self.advance(seqs, chunk, hook)
        logits = self.logits(_last(hidden, chunk), times, hook)[:, -1]
        times.total = (time.perf_counter() - start) * 1e3
        return logits, times

    def begin(self, snapshot=None) -> None:
        """Makes `fresh` sequences the current ones; if a snapshot is refused, what ran
        before is untouched."""
        self.seqs = self.fresh(snapshot)

    def prefill(
        self, ids, tile: int | None = None, seqs: Sequences | None = None
    ) -> np.ndarray:
        """Runs the prompt of each sequence, `tile` tokens a call (default t_max).

        Args:
            ids: token ids, or one list of ids per sequence when batch > 1 (an empty one
                for a sequence that waits).
            seqs: the sequences (default: the current ones).

        Returns:
            Logits after the last token: [V], or [B, V] when batch > 1.
        """
        seqs = seqs or self.seqs
        prompts = checks.prompts(ids, self.options.batch, self.manifest.dims.V)
        tile = whole_number(tile or self.options.t_max, "tile")
        self.host.check(seqs.offsets, [*map(len, prompts)])
        last = 0.0
        for chunk, hidden in self.advanced(seqs, prompts, tile):
            runs = np.array([[[len(tokens) > 0]] for tokens in chunk])
            last = np.where(runs, _last(hidden, chunk), last)
        return self._shape(self.logits(last)[:, -1])

    def advanced(
        self,
        seqs: Sequences,
        prompts: list,
        tile: int | None = None,
        hook: Hook | None = None,
    ) -> Iterator[tuple[list[list[int]], np.ndarray]]:
        """The tokens of one call of the prompts after another, and their hidden
        states."""
        stop = max(map(len, prompts))
        for start, end in self.options.calls(stop, tile):
            chunk = [prompt[start:end] for prompt in prompts]
            hidden, _ = self.advance(seqs, chunk, hook, keep=end == stop)
            yield chunk, hidden

    def decode_one_token(self, token) -> np.ndarray:
        """Continues each current sequence by one token (batch > 1: a list, None for a
        sequence that waits). Returns logits [V], or [B, V] when batch > 1.

        Raises:
            InputError: no token of the vocabulary, another number of them than
                sequences; nothing is changed then.
        """
        tokens = [token] if np.ndim(token) == 0 else token
        chunk = [[] if each is None else [each] for each in tokens]
        chunk = checks.prompts(chunk, self.options.batch, self.manifest.dims.V)
        return self._shape(self.step(self.seqs, chunk)[0])

    def stream(
        self, ids, max_new, *, after=None, stop=None, sampling=GREEDY
    ) -> Iterator[Record]:
        """Prefill and decode: yields one record per new token, sequence by sequence.

        Args:
            ids: the prompt: all tokens, or those after `after`. With batch > 1 a list
                for each sequence, an empty one for a sequence without a token, which
                waits.
            max_new: new tokens at most; like `sampling`, one for all sequences or a
                list with one for each.
            after: what to continue: None for nothing, or snapshots (see `begin`). The
                new sequences become the current ones.
            stop: tokens that end a sequence once they are yielded (default: the
                bundle's end-of-sequence tokens).

        Raises:
            InputError: prompts that cannot be run, before anything runs.
        """
        B = self.options.batch
        prompts = checks.prompts(ids, B, self.manifest.dims.V)
        samplings = per_sequence(sampling, B)
        stop = self.manifest.tokens.eos if stop is None else stop
        limits = [whole_number(n, "new tokens") for n in per_sequence(max_new, B)]
        seqs = self.fresh(after)
        if any(ids and not prompt for ids, prompt in zip(seqs.ids, prompts)):
            needed = "at least one token, whose logits give the next one"
            step = "trim the snapshot by a token and give that one"
            raise InputError("prompt after a snapshot", "no token", needed, step)
        # the last new token does not run
        counts = [len(p) and len(p) + max(n - 1, 0) for p, n in zip(prompts, limits)]
        self.host.check(seqs.offsets, counts)
        self.seqs = seqs
        logits, times = self.prefill(prompts, seqs=seqs).reshape(B, -1), Times()
        tokens: list[list[int]] = [[] for _ in range(B)]
        live = [seq for seq in range(B) if prompts[seq] and limits[seq]]
        for done in range(1, max(limits) + 1):
            for seq in list(live):
                token = samplings[seq].pick(logits[seq], len(seqs.ids[seq]))
                yield Record(token, logits[seq], times, seq)
                tokens[seq] = [token]
                if done >= limits[seq] or token in stop:
                    live.remove(seq)
                    if self.options.kv_write == "mask":  # a slice moves every one on
                        tokens[seq] = []
            if not live:
                return
            logits, times = self.step(seqs, tokens)

    def generate(self, ids, max_new, **options) -> list:
        """All tokens of `stream`: a list, or one list per sequence when batch > 1."""
        tokens: list[list[int]] = [[] for _ in range(self.options.batch)]
        for record in self.stream(ids, max_new, **options):
            tokens[record.seq].append(record.token)
        return tokens if self.options.batch > 1 else tokens[0]

    def sequence_logits(self, sequences: list[list[int]], count: int) -> np.ndarray:
        """Logits [B, count, V] of the last `count` tokens of fresh sequences of one
        length, one for each of the batch."""
        advanced = self.advanced(self.fresh(), sequences)
        parts = [hidden[:, :, : len(chunk[0])] for chunk, hidden in advanced]
        return self.logits(np.concatenate(parts, axis=2)[:, :, -count:])

    def snapshot(self, seq: int = 0) -> Snapshot:
        """A detached copy of one of the current sequences."""
        return snapshots.take(self.seqs, seq)

    def add(self, seq: int, snapshot: Snapshot) -> None:
        """Puts a snapshot in place of a current sequence; see `snapshot.put`."""
        snapshots.put(self.seqs, seq, snapshot)

    def remove(self, seq: int) -> None:
        """Ends a current sequence and clears its states."""
        snapshots.put(self.seqs, seq, None)

    def trim(self, count: int, seq: int = 0, seqs: Sequences | None = None) -> int:
        """Takes back the last `count` tokens of a sequence (of `seqs`, by default the
        current ones), as if they had never run; returns how many there were.

        Rows of a cache go back to any token, rings t_max tokens from the most that the
        sequence has had. Recurrent states (convolutions, DeltaNet, Mamba) go back into
        a prompt's last call of several tokens, or one to `keep`: the sequence before it
        is restored, and the tokens that stay run again.

        Raises:
            InputError: a state does not go back that far, which is then unchanged; a
                negative count.
        """
        seqs = seqs or self.seqs
        seqs.check()
        ids = seqs.ids[whole_number(seq, "sequence", self.options.batch)]
        count = snapshots.trimmed(count, len(ids), seqs.floors[seq])
        left, kept, T = ids[: len(ids) - count], seqs.kept, seqs.T
        if count and kept:
            floors = [*seqs.floors]
            snapshots.put(seqs, seq, kept[seq])
            again = [[] for _ in kept]
            again[seq] = left[kept[seq].offset :]
            if again[seq]:
                self.advance(seqs, again, T=T)
            seqs.kept, seqs.T, seqs.floors = kept, T, floors
        seqs.ids[seq] = left
        return count

    def _shape(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.options.batch > 1 else logits[0]


def per_sequence(value, B: int) -> list:
    """One value for every sequence, or the list that already has one for each."""
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


def _last(hidden: np.ndarray, chunk: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, C, 1]: of hidden states [B, C, T] the column of each sequence's last token."""
    ends = [max(len(tokens), 1) - 1 for tokens in chunk]
    return hidden[np.arange(len(chunk)), :, ends][:, :, None]
