"""The decoder: token ids in, logits and tokens out. It is the loaded shards of a bundle
(`shards.py`) and the sequences that they currently run (`sequences.py`)."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.bundle import Bundle
from workbench.decode.checks import whole_number
from workbench.decode.sampling import Sampling
from workbench.decode.sequences import Sequences
from workbench.decode.shards import LoadedShards
from workbench.decode.snapshot import Snapshot
from workbench.decode.times import Times
from workbench.errors import InputError

GREEDY = Sampling()


@dataclass
class Record:
    """One generated token: its id, the logits [V] from which it was picked (those of
    suppressed tokens included), the times of the call that computed them, and the index
    of its sequence in the batch."""

    token: int
    logits: np.ndarray
    times: Times
    seq: int = 0


class Decoder(LoadedShards):
    """The loaded shards of a bundle, and the sequences that they currently run.

    `new_sequences` gives sequences that stand by themselves; any number of them can take
    turns. For the common case of one at a time the decoder has current ones, `seqs`, and
    methods that are short for theirs. With batch 1 these return the logits or tokens of
    the one sequence, without an axis of sequences.

        begin(after)            seqs = new_sequences(after)
        prefill(ids)            seqs.prefill(ids)
        decode_one_token(id)    seqs.step([[id]])
        snapshot(), trim(n)     the methods of the same names
        add(seq, snapshot)      seqs.put(seq, snapshot)
        remove(seq)             seqs.put(seq, None)

    `stream` and `generate` begin new sequences, and pick tokens.

    Args:
        bundle, runtime and the options: see `LoadedShards`.

    Raises:
        InputError: see `LoadedShards`.
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
        super().__init__(
            bundle, runtime, precision, fast, reads, compute_units, hints, keeps_head
        )
        self.begin()

    def new_sequences(self, after=None) -> Sequences:
        """New sequences.

        Args:
            after: what they continue: one snapshot for every sequence, or a list with a
                snapshot or None for each. None: a sequence without a token.

        Raises:
            InputError: a snapshot that does not fit.
        """
        seqs = Sequences.empty(self)
        for seq, stored in enumerate(per_sequence(after, self.options.batch)):
            if stored is not None:
                seqs.put(seq, stored)
        return seqs

    def _continue_with(self, seqs: Sequences) -> None:
        """Makes sequences the current ones. They refer to the decoder weakly, because
        the decoder refers to them (see `LoadedShards.__init__`)."""
        seqs.decoder = weakref.proxy(self)
        self.seqs = seqs

    def begin(self, snapshot=None) -> None:
        """Makes new sequences, which continue `snapshot`, the current ones; see `after` of
        `new_sequences`. If a snapshot is refused, the earlier sequences stay."""
        self._continue_with(self.new_sequences(snapshot))

    def prefill(self, ids, tile: int | None = None) -> np.ndarray:
        """Runs the prompt of each current sequence; see `Sequences.prefill`. Returns
        logits after the last token: [V], or [B, V] when batch > 1."""
        return self._squeeze_batch(self.seqs.prefill(ids, tile))

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
        return self._squeeze_batch(logits)

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
        self._check_fit(seqs, prompts, limits)
        self._continue_with(seqs)
        # the times of a prompt's calls are in no record
        logits, times = seqs.prefill(prompts), Times()
        next_tokens: list[list[int]] = [[] for _ in range(B)]
        unfinished = [seq for seq in range(B) if prompts[seq] and limits[seq]]
        for token_count in range(1, max(limits) + 1):
            for seq in list(unfinished):
                position = len(seqs.ids[seq])
                token = samplings[seq].pick(logits[seq], position, suppressed)
                yield Record(token, logits[seq], times, seq)
                next_tokens[seq] = [token]
                if token_count >= limits[seq] or token in stop:
                    unfinished.remove(seq)
                    # a slice write moves every sequence on, also one that has ended
                    if self.options.kv_write == "mask":
                        next_tokens[seq] = []
            if not unfinished:
                return
            logits, times = seqs.step(next_tokens)

    def _check_fit(
        self, seqs: Sequences, prompts: list[list[int]], limits: list[int]
    ) -> None:
        """Raises an InputError for prompts after which `limits` new tokens cannot be
        decoded."""
        counts = []
        for prompt, limit, earlier_ids in zip(prompts, limits, seqs.ids):
            if earlier_ids and not prompt:
                needed = "at least one token, whose logits give the next one"
                step = "trim the snapshot by a token and give that one"
                raise InputError("prompt after a snapshot", "no token", needed, step)
            # the last new token does not run
            counts.append(len(prompt) + max(limit - 1, 0) if prompt else 0)
        self.host.check_positions(seqs.offsets, counts)

    def generate(self, ids, max_new, **options) -> list:
        """All tokens of `stream`: a list, or one list per sequence when batch > 1."""
        tokens: list[list[int]] = [[] for _ in range(self.options.batch)]
        for record in self.stream(ids, max_new, **options):
            tokens[record.seq].append(record.token)
        return self._squeeze_batch(tokens)

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

    def _squeeze_batch(self, values):
        """The values of all sequences; of a batch of 1 the value of its sequence."""
        return values if self.options.batch > 1 else values[0]


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
