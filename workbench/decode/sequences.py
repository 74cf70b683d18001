"""The history of one batch of sequences: their token ids and states, and the calls that
continue it, take tokens back, or copy a sequence out and in."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.bundle.names import X, is_cache
from workbench.decode.checks import check_prompts, whole_number
from workbench.decode.hooks import ShardHook
from workbench.decode.shards import LoadedShards, ShardCall
from workbench.decode.snapshot import (
    Snapshot,
    attention_window,
    fill,
    has_recurrent_state,
    shortest_length,
    source_name,
    trimmed_count,
)
from workbench.decode.times import Times, clock
from workbench.errors import InputError
from workbench.runtime import State
from workbench.runtime.base import interrupted_error


@dataclass(frozen=True)
class LastCall:
    """The last call of a prompt, which `trim` can undo in part although states are
    recurrent.

    Args:
        before: a snapshot of each sequence from before the call. It is ignored for
            sequences replaced since, which cannot be trimmed.
        width: columns of the call, dummies included.
    """

    before: list[Snapshot]
    width: int


@dataclass(eq=False)
class Sequences:
    """The history of one batch of sequences, and the methods that continue it.

    `advance` is one call of the layers; `prefill` runs prompts in as many calls as they
    need, and `step` one call and the head. `trim` takes tokens back, to a length that
    depends on the states:

    - a cache has rows of its own for every token: any length;
    - a ring overwrites rows: at most t_max tokens less;
    - a recurrent state is overwritten by every call: no shorter length, except into a
      call with `keep`, for which `last_call` has a copy of the states.

    A call may end early, by an exception in the middle of the shards. Then some layers
    have states with tokens that do not count. If the sequence can be trimmed to its
    length before the call, it continues: the next call overwrites these tokens. Otherwise
    its states are of no use, and every later call refuses it. `_begin_call` therefore
    decides before each call whether the sequence would survive, and `_end_call` clears
    the mark.

    Args:
        decoder: the shards that run the sequences; for a decoder's current sequences a
            weak proxy of it (see `Decoder._continue_with`).
        states: one per layer shard; a state works only with the model that made it.
        ids: the tokens that each sequence has run.
        min_lengths: the shortest length that each sequence can be trimmed to.
        interrupted: whether each sequence was in a call that did not end and that
            overwrote what its earlier tokens need. While such a call runs it is set, too.
        last_call: the last call, if it had `keep` and some states are recurrent.
    """

    decoder: LoadedShards
    states: list[State]
    ids: list[list[int]]
    min_lengths: list[int]
    interrupted: list[bool]
    last_call: LastCall | None = None

    @classmethod
    def empty(cls, decoder: LoadedShards) -> "Sequences":
        """A batch of sequences without a token, one `make_state` per layer shard."""
        B = decoder.options.batch
        states = [model.make_state() for model in decoder.layer_shards]
        return cls(decoder, states, [[] for _ in range(B)], [0] * B, [False] * B)

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
        return check_prompts(ids, len(self.ids), self.decoder.manifest.dims.V)

    def check_not_interrupted(self) -> None:
        """Raises an InputError for a sequence whose states an interrupted call has
        advanced in part."""
        for seq, was_interrupted in enumerate(self.interrupted):
            if was_interrupted:
                raise interrupted_error(f"sequence {seq}")

    def advance(
        self,
        chunk: Sequence[Sequence[int]],
        hook: ShardHook | None = None,
        min_columns: int = 0,
        keep: bool = False,
    ) -> tuple[np.ndarray, Times]:
        """Runs every layer shard once over the next tokens of each sequence.

        Args:
            chunk: token ids of each sequence, from none to t_max.
            hook: see `ShardHook`.
            min_columns: the fewest columns of the call.
            keep: whether to keep a copy of recurrent states from before the call, so
                that `trim` can go back into it. Ignored for a slice write and for a call of
                one token a sequence.

        Returns:
            Hidden states [B, C, T], whose columns beyond a sequence's tokens mean
            nothing (logits [B, V, T] where `LoadedShards.layers_give_logits`), and the
            times of the layers without the head.

        Raises:
            InputError: more than t_max tokens, a position past max_seq_len, a hook on a
                runtime that shows no operation, a sequence that an interrupted call has
                advanced in part; nothing is changed then.
        """
        decoder = self.decoder
        # Everything that can be refused is refused here, before states or lengths change.
        if hook and decoder.is_device:
            raise InputError(
                "hook",
                f"runtime {decoder.runtime}",
                "the portable runtime, which shows each operation",
                "open the bundle with runtime='portable'",
            )
        width = self._width_of_call(chunk, min_columns)
        values = decoder.inputs(self.offsets, chunk, width)
        self.check_not_interrupted()

        counts = np.array([len(tokens) for tokens in chunk])
        self._begin_call(counts, width, keep)
        times = Times()
        for model, state in zip(decoder.layer_shards, self.states, strict=True):
            start = clock()
            call = ShardCall(values, counts, state, hook)
            (values,) = decoder.run_calls(model, [call])
            native_ms = [model.last_native_ms]
            if model.shard.kind == "router":
                native_ms += decoder.experts.native_ms
            times.end_part(start, native_ms)
        self._end_call(chunk)
        return values[X].reshape(len(chunk), -1, width), times

    def _width_of_call(self, chunk: Sequence[Sequence[int]], min_columns: int) -> int:
        """The columns of a call, dummies included.

        Raises:
            InputError: more than t_max.
        """
        options = self.decoder.options
        columns = max(min_columns, *map(len, chunk))
        if columns > options.t_max:
            raise InputError(
                "call",
                f"{columns} tokens",
                f"at most t_max = {options.t_max}",
                "make several calls, or export with more --tokens",
            )
        return options.tiling.width(columns)

    def _begin_call(self, counts: np.ndarray, width: int, keep: bool) -> None:
        """Prepares `trim` for a call of `counts` [B] tokens, and marks the sequences that
        cannot continue if the call does not end; see the class."""
        manifest = self.decoder.manifest
        self.last_call = None
        # A slice write takes no dummy columns, with which the call would run again. A copy
        # for every call of one token would cost time at every token.
        can_rerun = max(counts) > 1 and manifest.options.kv_write == "mask"
        if keep and can_rerun and has_recurrent_state(manifest):
            before = [self.snapshot(seq) for seq in range(len(self.ids))]
            self.last_call = LastCall(before, width)
        for seq, count in enumerate(counts):
            length = len(self.ids[seq])
            after_call = shortest_length(manifest, length + int(count))
            self.min_lengths[seq] = max(self.min_lengths[seq], after_call)
            self.interrupted[seq] = self.min_lengths[seq] > length

    def _end_call(self, chunk: Sequence[Sequence[int]]) -> None:
        """Adds the tokens of a call that has run to its end."""
        self.append(chunk)
        self.interrupted = [False] * len(self.ids)
        if self.last_call:
            self.min_lengths = [before.offset for before in self.last_call.before]

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
        decoder.host.check_positions(self.offsets, [*map(len, prompts)])
        # [B, C, 1] after each sequence's last token so far; zeros before its first
        last_hidden = np.zeros((len(prompts), 1, 1), np.float32)
        for chunk, hidden in self.advance_calls(prompts, tile):
            # a sequence whose prompt has ended keeps the hidden state of its last token
            has_tokens = np.array([len(tokens) > 0 for tokens in chunk])
            last_hidden = np.where(
                has_tokens[:, None, None], _last_columns(hidden, chunk), last_hidden
            )
        return decoder.logits(last_hidden)[:, -1]

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
        self.check_not_interrupted()
        manifest = self.decoder.manifest
        length = len(self.ids[seq])
        # without `last_call`, which a snapshot does not have
        min_length = max(self.min_lengths[seq], shortest_length(manifest, length))
        states = {}
        for state, name in self.named_states:
            if source_name(manifest, name) != name:
                continue  # a copy, which `put` makes again
            value = state.read(name)[seq]
            first = 0
            # older rows of a ring are overwritten already, and no token reads them
            if state.shard.states[name].ring:
                first = max(0, min_length - attention_window(manifest, name) + 1)
            if is_cache(name):
                value = value[:, np.arange(first, length) % value.shape[1]]
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
                rows = stored.states[source_name(manifest, name)]
                fill(batch[seq], rows, stored.offset)
            elif stored:
                batch[seq] = stored.states[name]
            state.write(name, batch)
        self.ids[seq] = list(stored.ids) if stored else []
        self.min_lengths[seq] = shortest_length(manifest, len(self.ids[seq]))
        if stored:
            self.min_lengths[seq] = max(self.min_lengths[seq], stored.min_length)
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
        self.check_not_interrupted()
        ids = self.ids[whole_number(seq, "sequence", len(self.ids))]
        count = trimmed_count(count, len(ids), self.min_lengths[seq])
        remaining = ids[: len(ids) - count]
        if count and self.last_call:
            self._run_again(seq, remaining)
        self.ids[seq] = remaining
        return count

    def _run_again(self, seq: int, ids: list[int]) -> None:
        """Restores a sequence from before the last call and runs the tokens of `ids` that
        belong to the call again, in a call of the same width."""
        last_call, min_lengths = self.last_call, list(self.min_lengths)
        before = last_call.before[seq]
        self.put(seq, before)
        chunk: list[list[int]] = [[] for _ in self.ids]
        chunk[seq] = ids[before.offset :]
        if chunk[seq]:
            self.advance(chunk, min_columns=last_call.width)
        # `put` and `advance` change both, but `trim` may go back into the same call again
        self.last_call, self.min_lengths = last_call, min_lengths


def _last_columns(hidden: np.ndarray, chunk: Sequence[Sequence[int]]) -> np.ndarray:
    """The column of each sequence's last token, [B, C, 1], of hidden states [B, C, T]."""
    ends = [max(len(tokens), 1) - 1 for tokens in chunk]
    return hidden[np.arange(len(chunk)), :, ends][:, :, None]
