"""Random programs of prefill, decode, trim, snapshot, restore, add and remove, compared with runs
of the tokens that remain.

A program runs on a batch of three sequences. The test notes the history of every sequence: its
calls, and for each call T, the tokens that remain of it, and the sequence's place in the batch (a
kernel's order of sums depends on the place). At the end new sequences run each history alone while
the others wait: in `exact`, one more call must compute the same bits, and every state must hold
them."""

import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from workbench import Decoder, InputError
from workbench.decode import Sequences, Snapshot, store
from workbench.decode.snapshot import has_recurrent_state

B, S, T_MAX, STEPS = 3, 28, 4, 12
OPERATIONS = {  # how often each is drawn
    "prefill": 4,
    "decode": 4,
    "trim": 8,
    "snapshot": 2,
    "restore": 1,
    "add": 2,
    "remove": 1,
}
RINGS = "gemma3_text", "mistral", "olmo3"  # families with windows
SHAPES = ({"layers_per_shard": 3}, {"layers_per_shard": 1, "layout": "bc1t"})


@dataclass
class Call:
    """A call of T columns: the tokens of one sequence that remain of it, and the sequence's place
    in the batch."""

    T: int
    tokens: list[int]
    place: int


@dataclass
class Lineage:
    """The history of a sequence.

    Attributes:
        most_tokens: the most that the sequence has had.
        undoable: how many tokens remain of the last call, in which the sequence may have waited; 0
            after a call of one token of each sequence, for which no recurrent state is kept.
    """

    calls: list[Call] = field(default_factory=list)
    most_tokens: int = 0
    undoable: int = 0

    @property
    def ids(self) -> list[int]:
        return [token for call in self.calls for token in call.tokens]

    def add(self, call: Call, is_undoable: bool) -> None:
        if call.tokens:
            self.calls.append(call)
        self.undoable = len(call.tokens) if is_undoable else 0
        self.most_tokens = max(self.most_tokens, len(self.ids))

    def undo(self, count: int) -> None:
        self.undoable = max(0, self.undoable - count)
        for call in reversed(self.calls):
            removed = min(count, len(call.tokens))
            del call.tokens[len(call.tokens) - removed :]
            count -= removed


class Program:
    """One random program on a decoder; `lineages` has the history of each sequence, `stored` each
    snapshot with its history."""

    def __init__(self, decoder: Decoder, seed: int):
        self.decoder, self.rng = decoder, np.random.default_rng(seed)
        self.lineages = [Lineage() for _ in range(B)]
        self.stored: list[tuple[Snapshot, Lineage]] = []
        self.done: list[str] = []  # operations

    def run(self) -> None:
        self.decoder.begin()
        shares = np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
        for _ in range(STEPS):
            operation = self.rng.choice(list(OPERATIONS), p=shares)
            self.done.append(operation)
            getattr(self, operation)()

    def note_call(self, chunk: list[list[int]], is_undoable: bool) -> None:
        """Notes a call in every lineage; `is_undoable`: whether recurrent states go back into
        it."""
        T = max(map(len, chunk))
        for seq, tokens in enumerate(chunk):
            self.lineages[seq].add(Call(T, tokens, place=seq), is_undoable)

    def room(self, seq: int) -> int:
        """How many tokens a sequence can still take, but for the one of the last call."""
        return S - 1 - len(self.lineages[seq].ids)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.decoder.manifest.dims.V, count).tolist()

    def prefill(self) -> None:
        prompts = [
            self.tokens(min(self.rng.integers(0, 9), self.room(seq)))
            for seq in range(B)
        ]
        tile = int(self.rng.integers(1, T_MAX + 1))
        if any(prompts):
            self.decoder.prefill(prompts, tile)
            for start in range(0, max(map(len, prompts)), tile):
                chunk = [prompt[start : start + tile] for prompt in prompts]
                self.note_call(chunk, is_undoable=max(map(len, chunk)) > 1)

    def decode(self) -> None:
        takes_token = [
            self.room(seq) > 0 and self.rng.random() < 0.8 for seq in range(B)
        ]
        if any(takes_token):
            chunk = [self.tokens(1) if takes else [] for takes in takes_token]
            self.decoder.decode_one_token([ids[0] if ids else None for ids in chunk])
            self.note_call(chunk, is_undoable=False)

    def trim(self) -> None:
        """Within the promised depth a trim must work; beyond it a trim may be refused, and then
        changes nothing."""
        seq, count = int(self.rng.integers(B)), int(self.rng.integers(1, T_MAX + 3))
        lineage = self.lineages[seq]
        before = self.decoder.snapshot(seq)
        try:
            count = self.decoder.trim(count, seq)
            lineage.undo(count)
        except InputError:
            assert count > self.promised(lineage), f"trim {count} of {len(lineage.ids)}"
            assert not differing(self.decoder.snapshot(seq), before)

    def promised(self, lineage: Lineage) -> int:
        """How many tokens can be trimmed at least: from the most that the sequence has had, t_max
        tokens; with recurrent states, those of the last call."""
        depth = T_MAX - (lineage.most_tokens - len(lineage.ids))
        if has_recurrent_state(self.decoder.manifest):
            return min(depth, lineage.undoable)
        return depth

    def snapshot(self) -> None:
        seq = int(self.rng.integers(B))
        snapshot, lineage = self.decoder.snapshot(seq), deepcopy(self.lineages[seq])
        count = (
            int(self.rng.integers(0, snapshot.offset - snapshot.min_length + 1)) // 2
        )
        lineage.undo(count)
        lineage.undoable = 0
        with tempfile.TemporaryDirectory() as folder:
            store.save(folder, "sequence", snapshot.trim(count))
            self.stored.append((store.load(folder, "sequence"), lineage))

    def restore(self) -> None:
        picks = [self.pick() for _ in range(B)]
        self.decoder.begin([pick and pick[0] for pick in picks])
        self.lineages = [deepcopy(pick[1]) if pick else Lineage() for pick in picks]

    def add(self) -> None:
        seq, pick = int(self.rng.integers(B)), self.pick()
        if pick:
            self.decoder.add(seq, pick[0])
            self.lineages[seq] = deepcopy(pick[1])

    def remove(self) -> None:
        seq = int(self.rng.integers(B))
        self.decoder.remove(seq)
        self.lineages[seq] = Lineage()

    def pick(self) -> tuple[Snapshot, Lineage] | None:
        index = int(self.rng.integers(-1, len(self.stored)))
        return self.stored[index] if index >= 0 else None

    def differences(self) -> Iterator[str]:
        """The differences between the sequences and runs of their histories alone."""
        decoder = self.decoder
        last_tokens = [self.tokens(1) for _ in range(B)]
        hidden, _ = decoder.seqs.advance(last_tokens)
        snapshots = [decoder.snapshot(seq) for seq in range(B)]
        for seq, lineage in enumerate(self.lineages):
            seqs, place = decoder.new_sequences(), seq
            for call in [*lineage.calls, Call(1, last_tokens[seq], place=seq)]:
                if call.tokens:
                    move(seqs, place, call.place)
                    place = call.place
                    chunk = [call.tokens if s == place else [] for s in range(B)]
                    hidden_alone, _ = seqs.advance(chunk, min_columns=call.T)
            if not np.array_equal(hidden_alone[seq, :, 0], hidden[seq, :, 0]):
                yield f"the hidden state of sequence {seq}"
            for name in differing(snapshots[seq], seqs.snapshot(seq)):
                yield f"{name} of sequence {seq}"


def move(seqs: Sequences, source: int, target: int) -> None:
    """Moves a sequence to another place of the batch, without a snapshot."""
    order = np.arange(B)
    order[[source, target]] = target, source
    for state, name in seqs.named_states if source != target else ():
        state.write(name, state.read(name)[order])
    seqs.ids = [seqs.ids[seq] for seq in order]
    seqs.min_lengths = [seqs.min_lengths[seq] for seq in order]


def differing(a: Snapshot, b: Snapshot) -> list[str]:
    """Names of the states of two snapshots that differ in the rows that both hold."""
    names = [] if a.ids == b.ids else ["ids"]
    for name, value in a.states.items():
        other = b.states[name]
        rows = min(value.shape[-2], other.shape[-2])
        value, other = (v[..., v.shape[-2] - rows :, :] for v in (value, other))
        names += [] if np.array_equal(value, other) else [name]
    return names


def options(family: str, shape: int) -> dict:
    """Export options of a family's bundle, with the shards of one of `SHAPES`."""
    ring = {"sliding": "ring"} if family in RINGS else {}
    sizes = {"max_seq_len": S, "tokens": f"1-{T_MAX}", "batch": B}
    return sizes | ring | SHAPES[shape]


def find_differences(decoder: Decoder, seed: int) -> str:
    """The differences at the end of the program of a seed, and its operations; "" without a
    difference."""
    program = Program(decoder, seed)
    program.run()
    differences = list(program.differences())
    if not differences:
        return ""
    return f"{', '.join(differences)} after {', '.join(program.done)}"
