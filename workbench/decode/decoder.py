"""The decoder: token ids in, logits and tokens out.

`Decoder` holds the weights: the loaded shards of a bundle. `Sequences` holds the history
of one batch of sequences: their token ids, and one state per layer shard. Every
sequence of a batch has an index `seq` and a position of its own, and no sequence
affects another."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import (
    HIDDEN,
    IDS,
    K_ROWS,
    LOGITS,
    MATRIX_STATE,
    PER_LAYER,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    V_ROWS,
    X0,
    X,
    is_cache,
)
from workbench.decode import checks, snapshot
from workbench.decode.checks import whole_number
from workbench.decode.experts import RoutedExperts
from workbench.decode.inputs import Host
from workbench.decode.sampling import Sampling
from workbench.decode.snapshot import Snapshot
from workbench.decode.times import Times, clock
from workbench.errors import InputError
from workbench.runtime import Model, Settings, State
from workbench.runtime.base import OnCall, interrupted_error

GREEDY = Sampling()
# Output of a layer shard → input of the next shard. Packages of another exporter contain
# the head: what leaves the last of them as `x` are logits (see `Decoder.logits`).
NEXT_INPUTS = {HIDDEN: X, LOGITS: X, ROUTER_STATE_OUT: ROUTER_STATE}
# Called as hook(shard, op, outputs) after every operation of a program, with its results;
# it may return other results, which replace them.
ShardHook = Callable[[Shard, object, list], list | None]


@dataclass(frozen=True)
class LastCall:
    """The last call of a prompt, which `trim` can undo in part although states are
    recurrent.

    Args:
        before: a snapshot of each sequence from before the call. It is ignored for
            sequences replaced since, which cannot be trimmed.
        T: columns of the call.
    """

    before: list[Snapshot]
    T: int


@dataclass(eq=False)
class Sequences:
    """The history of one batch of sequences, and the methods that continue it.

    Tokens are taken back by `trim`. A cache goes back by its length alone, a ring by at
    most t_max tokens, before which its rows are overwritten: `min_lengths` says how far.
    A recurrent state goes back only by a copy from before a call, which a call with
    `keep` leaves in `last_call`. A call that ends early leaves values of tokens that do
    not count; where these are in states that cannot go back, the sequence is
    `interrupted` and refused.

    Args:
        decoder: holds the weights that run the sequences.
        states: one per layer shard; a state works only with the model that made it.
        ids: the tokens that each sequence has run.
        min_lengths: the shortest length that each sequence can be trimmed to. A call
            raises them before it runs.
        interrupted: whether the last call of each sequence has begun to overwrite
            values of the tokens before it, and has not ended (see `check_whole`).
        last_call: for `trim`, if states are recurrent.
    """

    decoder: "Decoder"
    states: list[State]
    ids: list[list[int]]
    min_lengths: list[int]
    interrupted: list[bool]
    last_call: LastCall | None = None

    @property
    def offsets(self) -> np.ndarray:
        """[B] tokens in the caches of each sequence: the position of its next token."""
        return np.array([len(ids) for ids in self.ids])

    @property
    def named_states(self) -> list[tuple[State, str]]:
        """(state of a shard, logical name) for every state of every shard."""
        return [(state, name) for state in self.states for name in state.shard.states]

    def check_tokens(self, ids) -> list[list[int]]:
        """Token ids of the next call or prompt as one list of plain ints per sequence;
        plain ids are those of a single sequence.

        Raises:
            InputError: another number of lists than sequences, no token at all, an id
                outside the vocabulary.
        """
        return checks.prompts(ids, len(self.ids), self.decoder.manifest.dims.V)

    def check_whole(self) -> None:
        """Raises an InputError for a sequence whose states an interrupted call has
        advanced in part."""
        for seq, was_interrupted in enumerate(self.interrupted):
            if was_interrupted:
                raise interrupted_error(f"sequence {seq}")

    def advance(
        self,
        chunk: Sequence[Sequence[int]],
        hook: ShardHook | None = None,
        T: int = 0,
        keep: bool = False,
    ) -> tuple[np.ndarray, Times]:
        """Runs every layer shard once over the next tokens of each sequence.

        Args:
            chunk: token ids of each sequence, from none to t_max.
            hook: see `ShardHook`.
            T: the fewest columns of the call.
            keep: whether `trim` can go back into the call where states are
                recurrent and a mask writes the caches.

        Returns:
            Hidden states [B, C, T], whose columns beyond a sequence's tokens mean
            nothing, and the times of the layers without the head.

        Raises:
            InputError: more than t_max tokens, a position past max_seq_len, a hook on a
                runtime that shows no operation, a sequence that an interrupted call has
                advanced in part; nothing is changed then.
        """
        decoder = self.decoder
        options = decoder.options
        if hook and decoder.is_device:
            raise InputError(
                "hook",
                f"runtime {decoder.runtime}",
                "the portable runtime, which shows each operation",
                "open the bundle with runtime='portable'",
            )
        counts = np.array([len(tokens) for tokens in chunk])
        columns = max(T, *counts)
        if columns > options.t_max:
            raise InputError(
                "call",
                f"{columns} tokens",
                f"at most t_max = {options.t_max}",
                "make several calls, or export with more --tokens",
            )
        T = options.tiling.width(columns)
        # Everything that can be refused is refused here, before states or lengths change.
        values = decoder.inputs(self.offsets, chunk, T)
        self.check_whole()
        self.last_call = None
        if keep and max(counts) > 1 and options.kv_write == "mask":
            self._keep_last_call(T)
        self._begin_call(counts)
        times = Times()
        for model, state in zip(decoder.layer_shards, self.states, strict=True):
            start = clock()
            values = decoder.run_calls(model, [values], [counts], [state], [hook])[0]
            native = [model.last_native_ms]
            if model.shard.kind == "router":
                native += decoder.experts.native_ms
            times.add(start, native)
        self.append(chunk)
        self.interrupted = [False] * len(self.ids)
        # The call completed: the snapshots taken before it allow trimming into it.
        if self.last_call:
            self.min_lengths = [before.offset for before in self.last_call.before]
        return values[X].reshape(len(chunk), -1, T), times

    def _keep_last_call(self, T: int) -> None:
        """Takes a snapshot of every sequence if a state is recurrent: a call overwrites
        such a state."""
        if snapshot.has_recurrent_state(self.decoder.manifest):
            before = [self.snapshot(seq) for seq in range(len(self.ids))]
            self.last_call = LastCall(before, T)

    def _begin_call(self, counts: np.ndarray) -> None:
        """Raises the minimal lengths to those after a call of `counts` [B] tokens, and
        marks sequences that cannot continue if the call does not end."""
        manifest = self.decoder.manifest
        for seq, end in enumerate(self.offsets + counts):
            min_length = snapshot.min_length(manifest, int(end))
            self.min_lengths[seq] = max(self.min_lengths[seq], min_length)
            # Cache rows behind a sequence's tokens are written again by the next call.
            # A recurrent state is overwritten: its minimal length is that of the end.
            self.interrupted[seq] = self.min_lengths[seq] > len(self.ids[seq])

    def append(self, chunk: Sequence[Sequence[int]]) -> None:
        """Adds the tokens of a call that has run."""
        for ids, tokens in zip(self.ids, chunk):
            ids += map(int, tokens)

    def advance_calls(
        self,
        prompts: Sequence[Sequence[int]],
        tile: int | None = None,
        hook: ShardHook | None = None,
    ) -> Iterator[tuple[list[Sequence[int]], np.ndarray]]:
        """Runs prompts call by call, `tile` tokens a call (default t_max): yields the
        tokens of each call and their hidden states [B, C, T]."""
        stop = max(map(len, prompts))
        for start, end in self.decoder.options.tiling.calls(stop, tile):
            chunk = [prompt[start:end] for prompt in prompts]
            hidden, _ = self.advance(chunk, hook, keep=end == stop)
            yield chunk, hidden

    def prefill(self, ids, tile: int | None = None) -> np.ndarray:
        """Runs the prompt of each sequence, `tile` tokens a call (default t_max).

        Args:
            ids: one list of token ids per sequence, an empty one for a sequence that
                waits; plain ids for a single sequence.

        Returns:
            Logits [B, V] after the last token of each sequence.

        Raises:
            InputError: ids or positions that cannot be run, before anything runs.
        """
        decoder = self.decoder
        prompts = self.check_tokens(ids)
        tile = whole_number(tile or decoder.options.t_max, "tile")
        decoder.host.check(self.offsets, [*map(len, prompts)])
        last = 0.0  # stands for the hidden state of a sequence without a token
        for chunk, hidden in self.advance_calls(prompts, tile):
            # a sequence whose prompt has ended keeps the hidden state of its last token
            has_tokens = np.array([[[len(tokens) > 0]] for tokens in chunk])
            last = np.where(has_tokens, _last_columns(hidden, chunk), last)
        return decoder.logits(last)[:, -1]

    def step(self, ids) -> tuple[np.ndarray, Times]:
        """One call of the layers and, for the last token of each sequence, of the head.

        Args:
            ids: as of `prefill`, at most t_max of each sequence.

        Returns:
            Logits [B, V] and the times of the call.
        """
        start = time.perf_counter()
        chunk = self.check_tokens(ids)
        hidden, times = self.advance(chunk)
        logits = self.decoder.logits(_last_columns(hidden, chunk), times)[:, -1]
        times.total = (time.perf_counter() - start) * 1e3
        return logits, times

    def snapshot(self, seq: int = 0) -> Snapshot:
        """A detached copy of one sequence."""
        seq = whole_number(seq, "sequence", len(self.ids))
        self.check_whole()
        manifest = self.decoder.manifest
        offset = len(self.ids[seq])
        min_length = snapshot.min_length(manifest, offset)
        min_length = max(self.min_lengths[seq], min_length)
        states = {}
        for state, name in self.named_states:
            if snapshot.source_name(manifest, name) != name:
                continue  # a copy, which `put` makes again
            value = state.read(name)[seq]
            first = 0
            # older rows of a ring are overwritten already, and no token reads them
            if state.shard.states[name].ring:
                first = max(0, min_length - snapshot.window(manifest, name) + 1)
            if is_cache(name):
                value = value[:, np.arange(first, offset) % value.shape[1]]
            states[name] = value
        return Snapshot(tuple(self.ids[seq]), self.decoder.identity, states, min_length)

    def put(self, seq: int, stored: Snapshot | None) -> None:
        """Replaces one sequence by a snapshot, or by an empty sequence if it is None. The
        other sequences are unchanged.

        Raises:
            InputError: a snapshot of another bundle, or of more tokens than a cache
                holds; nothing is changed then.
        """
        seq = whole_number(seq, "sequence", len(self.ids))
        manifest = self.decoder.manifest
        if stored:
            stored.check_fits(self.decoder.identity, manifest.options.max_seq_len)
        for state, name in self.named_states:
            # A runtime reads and writes whole tensors, with all sequences of the batch.
            batch = state.read(name)
            batch[seq] = 0
            if stored and is_cache(name):
                rows = stored.states[snapshot.source_name(manifest, name)]
                snapshot.fill(batch[seq], rows, stored.offset)
            elif stored:
                batch[seq] = stored.states[name]
            state.write(name, batch)
        self.ids[seq] = list(stored.ids) if stored else []
        min_length = snapshot.min_length(manifest, len(self.ids[seq]))
        if stored:
            min_length = max(min_length, stored.min_length)
        self.min_lengths[seq] = min_length
        self.interrupted[seq] = False

    def trim(self, count: int, seq: int = 0) -> int:
        """Takes back the last `count` tokens of a sequence, as if they had never run
        (all of them, if it has fewer); returns the number taken back.

        Caches can be trimmed to any length; rings by at most t_max tokens below the
        longest length that the sequence has had. Recurrent states (convolutions,
        DeltaNet, Mamba) can be trimmed into the last call of a prompt, or into a call
        with `keep`: the sequence before it is restored, and the tokens that remain run
        again.

        Raises:
            InputError: a state that cannot be trimmed so far, which is then unchanged; a
                negative count.
        """
        self.check_whole()
        ids = self.ids[whole_number(seq, "sequence", len(self.ids))]
        count = snapshot.trimmed(count, len(ids), self.min_lengths[seq])
        remaining = ids[: len(ids) - count]
        if count and self.last_call:
            self._run_again(seq, remaining)
        self.ids[seq] = remaining
        return count

    def _run_again(self, seq: int, ids: list[int]) -> None:
        """Restores a sequence from before the last call and runs the tokens of `ids` that
        belong to the call again, in a call of the same width."""
        last_call = self.last_call
        min_lengths = list(self.min_lengths)
        before = last_call.before[seq]
        self.put(seq, before)
        chunk: list[list[int]] = [[] for _ in self.ids]
        chunk[seq] = ids[before.offset :]
        if chunk[seq]:
            self.advance(chunk, T=last_call.T)
        self.last_call = last_call
        self.min_lengths = min_lengths


@dataclass
class Record:
    """One generated token: its id, the logits [V] from which it was picked (those of
    suppressed tokens included), the times of the call that computed them, and the index
    of its sequence in the batch."""

    token: int
    logits: np.ndarray
    times: Times
    seq: int = 0


class Decoder:
    """The loaded shards of a bundle, and the sequences that they currently run.

    `new_sequences` gives sequences that stand by themselves (see `Sequences`). `begin`,
    `prefill`, `decode_one_token`, `snapshot`, `add`, `remove` and `trim` call the
    methods of the current sequences, `seqs`; `stream` and `generate` begin new ones.

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
        keeps_head: whether the portable runtime keeps the weights of the head between
            calls; otherwise each slice is read whenever logits are computed, which
            suits few calls of many tokens.

    Raises:
        InputError: no whole bundle, no such runtime here, a shard that does not load.
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
        keeps_head: bool = True,
    ):
        bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        bundle.check_contents()
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.options = bundle.manifest.options
        self.host = Host(bundle.manifest)
        self.plane = self.host.plane
        plugin = self.options.plugin
        self.runtime = runtimes.resolve(runtime, plugin)
        self.is_device = runtimes.is_device(self.runtime)
        self.precision = plugin.precision if plugin else precision
        self.fast = fast
        self.reads = reads
        self.compute_units = compute_units
        self.hints = hints or {}
        self.settings = Settings(
            self.runtime,
            self.precision,
            fast,
            reads,
            compute_units,
            self.hints,
            keeps_head,
        )
        # Nothing here may refer to the decoder itself, so that dropping a decoder frees its
        # memory at once, without the garbage collector.
        load = partial(runtimes.load_shard, bundle, settings=self.settings)
        kinds = "layers", "router"
        self.layer_shards = [load(s) for s in self.manifest.shards if s.kind in kinds]
        self.heads = [load(s) for s in bundle.shards("head")]
        self.experts = RoutedExperts(bundle, load, self.plane)
        # experts load when they are picked; they are packages like the others
        models = [*self.layer_shards, *self.heads]
        self.shows_inner_layers = all(m.shows_inner_layers for m in models)
        self.begin()

    @property
    def arithmetic(self) -> str:
        """The arithmetic that rounds the results: `coreml` on a device, a plug-in's, or
        the precision."""
        if self.is_device:
            return "coreml"
        plugin = self.options.plugin
        return plugin.arithmetic if plugin else self.precision

    @cached_property
    def identity(self) -> str:
        """The identity that snapshots of this decoder carry; see `snapshot.identity`."""
        arithmetic = self.runtime if self.is_device else self.precision
        return snapshot.identity(self.manifest, arithmetic)

    @property
    def plain(self) -> "Decoder":
        """A decoder of the same bundle that fuses nothing: itself, unless it is
        `fast`."""
        return self._unfused if self.settings.fast else self

    @cached_property
    def _unfused(self) -> "Decoder":
        return type(self)(self.bundle, **asdict(replace(self.settings, fast=False)))

    def new_sequences(self, after=None) -> Sequences:
        """New sequences, one `make_state` per shard.

        Args:
            after: None; one snapshot, which every sequence continues; or a list with a
                snapshot or None for each sequence.

        Raises:
            InputError: a snapshot that does not fit.
        """
        B = self.options.batch
        states = [model.make_state() for model in self.layer_shards]
        seqs = Sequences(self, states, [[] for _ in range(B)], [0] * B, [False] * B)
        for seq, stored in enumerate(per_sequence(after, B)):
            if stored is not None:
                seqs.put(seq, stored)
        return seqs

    def _continue_with(self, seqs: Sequences) -> None:
        """Makes sequences the current ones. They refer to the decoder weakly, because
        the decoder refers to them (see `__init__`)."""
        seqs.decoder = weakref.proxy(self)
        self.seqs = seqs

    def inputs(
        self, offsets: np.ndarray, chunk: Sequence[Sequence[int]], T: int
    ) -> dict[str, np.ndarray]:
        """The inputs of the first shard in a call of T columns: those that the host
        computes, and the embeddings of the tokens as `x`."""
        ids = np.array([[*tokens, *[0] * (T - len(tokens))] for tokens in chunk])
        counts = np.array([len(tokens) for tokens in chunk])
        x = self.plane(self.bundle.embed(ids).transpose(0, 2, 1))
        values = self.host.inputs(offsets, counts, T) | {X: x, IDS: ids}
        if self.manifest.dims.P:
            rows = self.bundle.embed_per_layer(ids)
            values[X0] = x
            values[PER_LAYER] = self.plane(rows.transpose(0, 2, 1))
        return values

    def read_inputs(
        self, shard: Shard, values: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """What a shard reads of `values`. Of `per_layer` it reads only the channels of
        its own layers."""
        inputs = {name: values[name] for name in shard.inputs}
        if PER_LAYER in inputs:
            start, stop = (layer * self.manifest.dims.P for layer in shard.layers)
            inputs[PER_LAYER] = np.ascontiguousarray(values[PER_LAYER][:, start:stop])
        return inputs

    def run_calls(
        self,
        model: Model,
        values: Sequence[dict[str, np.ndarray]],
        counts: Sequence[np.ndarray],
        states: Sequence[State],
        hooks: Sequence[ShardHook | None],
        on_call: OnCall | None = None,
    ) -> list[dict[str, np.ndarray]]:
        """Runs a layer shard, routed experts included, for one call after another.

        The portable runtime reads each weight once for all calls, except where a state
        is a matrix: a matrix accumulates the rounding of all tokens, so that every call
        must add up in the order of decoding.

        Args:
            values: what each call has computed so far, by name; the shard reads its
                inputs among them.
            counts: [B] valid columns of each call.
            states, hooks: of each call.
            on_call: called before every call of a package, those of experts and of the
                parts of another exporter's shard included. The calls then run one by
                one, so that it sees the states from which every call starts.

        Returns:
            `values` for the next shard: `x` is this shard's hidden output,
            `router_state` its router state where the family has one; cache rows that
            later layers copy have their names; all others are passed on.
        """
        shard = model.shard
        inputs = [self.read_inputs(shard, call_values) for call_values in values]
        calls = inputs, states, [_of_shard(hook, shard) for hook in hooks]
        if on_call:
            outputs = [
                model.predict_observed(*call, on_call)
                for call in zip(*calls, strict=True)
            ]
        # see above: joined calls would sum in another order
        elif any(name.endswith(MATRIX_STATE) for name in shard.states):
            outputs = [model.predict(*call) for call in zip(*calls, strict=True)]
        else:
            outputs = model.predict_calls(*calls)
        next_values = []
        for call_values, out, count, hook in zip(
            values, outputs, counts, hooks, strict=True
        ):
            if shard.kind == "router":
                layer = shard.layers[0]
                out[HIDDEN] = self.experts.run(layer, out, count, hook, on_call)
            replaced = {}
            for name, value in out.items():
                if name in NEXT_INPUTS:
                    replaced[NEXT_INPUTS[name]] = value
                elif name.startswith((K_ROWS, V_ROWS)):
                    replaced[name] = value
            next_values.append(call_values | replaced)
        return next_values

    def logits(
        self,
        hidden: np.ndarray,
        times: Times | None = None,
        hook: ShardHook | None = None,
    ) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call; adds the
        head's times to `times`. Where the layers' packages contain the head, `hidden`
        has the logits [B, V, T] already."""
        start = clock()
        native = [None]  # without a head, Core ML has no time of it
        if self.heads:
            slices, native = zip(*self.run_heads([hidden], hook))
            hidden = np.concatenate([logits for (logits,) in slices], axis=1)
        if times:
            times.add(start, [*native])
        return np.ascontiguousarray(hidden.transpose(0, 2, 1))

    def logit_slices(self, hidden: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """The logits [B, T, rows] of each of `hidden` [B, C, T], one slice of the
        vocabulary after another, so that no array has all of it; see `logits`."""
        if not self.heads:
            yield [values.transpose(0, 2, 1) for values in hidden]
            return
        for logits, _ in self.run_heads(hidden):
            yield [values.transpose(0, 2, 1) for values in logits]

    def run_heads(
        self, hidden: Sequence[np.ndarray], hook: ShardHook | None = None
    ) -> Iterator[tuple[list[np.ndarray], float | None]]:
        """For every slice of the vocabulary the logits [B, rows, T] of each of `hidden`
        [B, C, T], and Core ML's own time."""
        t_max = self.options.t_max
        calls, widths = [], []
        for values in hidden:
            parts = np.split(values, range(t_max, values.shape[2], t_max), axis=2)
            widths.append([part.shape[2] for part in parts])
            for part in parts:
                T = part.shape[2]
                # a head of fixed shapes takes whole calls, too
                dummies = 0, self.options.tiling.width(T) - T
                calls.append({X: self.plane(np.pad(part, ((0, 0), (0, 0), dummies)))})
        for model in self.heads:
            hooks = [_of_shard(hook, model.shard)] * len(calls)
            outputs = iter(model.predict_calls(calls, [None] * len(calls), hooks))
            logits = []
            for of_values in widths:
                columns = []
                for T in of_values:
                    output = next(outputs)[LOGITS]
                    columns.append(output.reshape(*output.shape[:2], -1)[:, :, :T])
                logits.append(np.concatenate(columns, axis=2))
            yield logits, model.last_native_ms

    def begin(self, snapshot=None) -> None:
        """Makes `new_sequences` the current ones; if a snapshot is refused, the earlier
        ones stay."""
        self._continue_with(self.new_sequences(snapshot))

    def prefill(self, ids, tile: int | None = None) -> np.ndarray:
        """Runs the prompt of each current sequence; see `Sequences.prefill`. Returns
        logits after the last token: [V], or [B, V] when batch > 1."""
        return self._of_batch(self.seqs.prefill(ids, tile))

    def decode_one_token(self, token) -> np.ndarray:
        """Continues each current sequence by one token (batch > 1: a list, None for a
        sequence that waits). Returns logits [V], or [B, V] when batch > 1.

        Raises:
            InputError: no token of the vocabulary, another number of them than
                sequences; nothing is changed then.
        """
        tokens = [token] if np.ndim(token) == 0 else token
        chunk = [[] if token is None else [token] for token in tokens]
        logits, _ = self.seqs.step(chunk)
        return self._of_batch(logits)

    def stream(
        self, ids, max_new, *, after=None, stop=None, sampling=GREEDY
    ) -> Iterator[Record]:
        """Prefill and decode: yields one record per new token, sequence by sequence.
        Tokens that the manifest suppresses are never picked.

        Args:
            ids: the prompt: all tokens, or those after `after`. With batch > 1 a list
                for each sequence, an empty one for a sequence without a token, which
                waits.
            max_new: new tokens at most; like `sampling`, one for all sequences or a
                list with one for each.
            after: snapshots to continue, see `new_sequences`. The new sequences become
                the current ones.
            stop: tokens that end a sequence once they are yielded (default: the
                bundle's end-of-sequence tokens).

        Raises:
            InputError: prompts that cannot be run, before anything runs.
        """
        B = self.options.batch
        stop = self.manifest.tokens.eos if stop is None else stop
        suppressed = self.manifest.tokens.suppressed
        samplings = per_sequence(sampling, B)
        limits = [whole_number(n, "new tokens") for n in per_sequence(max_new, B)]
        # All checks come first: sequences that are refused never become current.
        seqs = self.new_sequences(after)
        prompts = seqs.check_tokens(ids)
        counts = []
        for prompt, limit, earlier in zip(prompts, limits, seqs.ids):
            if earlier and not prompt:
                needed = "at least one token, whose logits give the next one"
                step = "trim the snapshot by a token and give that one"
                raise InputError("prompt after a snapshot", "no token", needed, step)
            # the last new token does not run
            counts.append(len(prompt) + max(limit - 1, 0) if prompt else 0)
        self.host.check(seqs.offsets, counts)
        self._continue_with(seqs)
        logits, times = seqs.prefill(prompts), Times()
        tokens: list[list[int]] = [[] for _ in range(B)]
        unfinished = [seq for seq in range(B) if prompts[seq] and limits[seq]]
        for token_count in range(1, max(limits) + 1):
            for seq in list(unfinished):
                position = len(seqs.ids[seq])
                token = samplings[seq].pick(logits[seq], position, suppressed)
                yield Record(token, logits[seq], times, seq)
                tokens[seq] = [token]
                if token_count >= limits[seq] or token in stop:
                    unfinished.remove(seq)
                    # a slice write moves every sequence on
                    if self.options.kv_write == "mask":
                        tokens[seq] = []
            if not unfinished:
                return
            logits, times = seqs.step(tokens)

    def generate(self, ids, max_new, **options) -> list:
        """All tokens of `stream`: a list, or one list per sequence when batch > 1."""
        tokens: list[list[int]] = [[] for _ in range(self.options.batch)]
        for record in self.stream(ids, max_new, **options):
            tokens[record.seq].append(record.token)
        return self._of_batch(tokens)

    def sequence_logits(self, sequences: list[list[int]], count: int) -> np.ndarray:
        """Logits [B, count, V] of the last `count` tokens of new sequences of one
        length, one for each of the batch."""
        calls = self.new_sequences().advance_calls(sequences)
        parts = [hidden[:, :, : len(chunk[0])] for chunk, hidden in calls]
        return self.logits(np.concatenate(parts, axis=2)[:, :, -count:])

    def snapshot(self, seq: int = 0) -> Snapshot:
        """A detached copy of one of the current sequences."""
        return self.seqs.snapshot(seq)

    def add(self, seq: int, snapshot: Snapshot) -> None:
        """Puts a snapshot in place of a current sequence; see `Sequences.put`."""
        self.seqs.put(seq, snapshot)

    def remove(self, seq: int) -> None:
        """Makes a current sequence an empty one, whose states are zeros."""
        self.seqs.put(seq, None)

    def trim(self, count: int, seq: int = 0) -> int:
        """Takes back the last tokens of a current sequence; see `Sequences.trim`."""
        return self.seqs.trim(count, seq)

    def _of_batch(self, values):
        """One value per sequence as the public methods return it: without the list if the
        batch is 1."""
        return values if self.options.batch > 1 else values[0]


def _of_shard(hook: ShardHook | None, shard: Shard) -> Callable | None:
    """The hook of a model of this shard, which is called without the shard."""
    return None if hook is None else partial(hook, shard)


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


def _last_columns(hidden: np.ndarray, chunk: Sequence[Sequence[int]]) -> np.ndarray:
    """The column of each sequence's last token, [B, C, 1], of hidden states [B, C, T]."""
    ends = [max(len(tokens), 1) - 1 for tokens in chunk]
    return hidden[np.arange(len(chunk)), :, ends][:, :, None]
