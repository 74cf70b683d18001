"""Random programs of prefill, decode, trim, snapshot, restore, add and remove, compared with runs
of the tokens that remain.

A program runs on a batch of three sequences. The test notes the history of every sequence: its
calls, and for each call T, the tokens that remain of it, and the sequence's place in the batch, on
which a kernel's order of sums depends. At the end new sequences run each history alone while the
others wait: in `exact`, one more call must compute the same bits, and every state must hold them.
"""

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
class Lineage:
    """The history of a sequence: its calls as [T, tokens that remain, place in the batch]; `high`,
    the most tokens that it has had; and `last`, how many tokens remain of the last call, in which
    the sequence may have waited. `last` is 0 after a call of one token of each sequence, for which
    no recurrent state is kept."""

    calls: list[list] = field(default_factory=list)
    high: int = 0
    last: int = 0

    @property
    def ids(self) -> list[int]:
        return [token for _, tokens, _ in self.calls for token in tokens]

    def add(self, T: int, tokens: list[int], place: int, is_undoable: bool) -> None:
        if tokens:
            self.calls.append([T, tokens, place])
        self.last = is_undoable * len(tokens)
        self.high = max(self.high, len(self.ids))

    def undo(self, count: int) -> None:
        self.last = max(0, self.last - count)
        for call in self.calls[::-1]:
            removed = min(count, len(call[1]))
            del call[1][len(call[1]) - removed :]
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
            self.done.append(self.rng.choice(list(OPERATIONS), p=shares))
            getattr(self, self.done[-1])()

    def ran(self, chunk: list[list[int]], is_undoable: bool) -> None:
        """Notes a call; `is_undoable`: whether recurrent states go back into it."""
        for seq, tokens in enumerate(chunk):
            self.lineages[seq].add(max(map(len, chunk)), tokens, seq, is_undoable)

    def room(self, seq: int) -> int:
        return S - 1 - len(self.lineages[seq].ids)  # one place for the last call

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
                self.ran(chunk, max(map(len, chunk)) > 1)

    def decode(self) -> None:
        going = [self.room(seq) > 0 and self.rng.random() < 0.8 for seq in range(B)]
        if any(going):
            tokens = [self.tokens(1) if go else [] for go in going]
            self.decoder.decode_one_token([t[0] if t else None for t in tokens])
            self.ran(tokens, False)

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
        depth = T_MAX - (lineage.high - len(lineage.ids))
        if has_recurrent_state(self.decoder.manifest):
            return min(depth, lineage.last)
        return depth

    def snapshot(self) -> None:
        seq = int(self.rng.integers(B))
        snapshot, lineage = self.decoder.snapshot(seq), deepcopy(self.lineages[seq])
        count = (
            int(self.rng.integers(0, snapshot.offset - snapshot.min_length + 1)) // 2
        )
        lineage.undo(count)
        lineage.last = 0
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

    def faults(self) -> Iterator[str]:
        """The differences between the sequences and runs of their histories alone."""
        decoder, last = self.decoder, [self.tokens(1) for _ in range(B)]
        hidden, _ = decoder.seqs.advance(last)
        left = [decoder.snapshot(seq) for seq in range(B)]
        for seq, lineage in enumerate(self.lineages):
            seqs, before = decoder.new_sequences(), seq
            for T, tokens, place in [*lineage.calls, [1, last[seq], seq]]:
                if tokens:
                    move(seqs, before, place)
                    chunk = [tokens if s == place else [] for s in range(B)]
                    alone, _ = seqs.advance(chunk, min_columns=T)
                    before = place
            if not np.array_equal(alone[seq, :, 0], hidden[seq, :, 0]):
                yield f"the hidden state of sequence {seq}"
            for name in differing(left[seq], seqs.snapshot(seq)):
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


def fault_of(decoder: Decoder, seed: int) -> str:
    """The differences at the end of the program of a seed, and its operations; "" without a
    difference."""
    program = Program(decoder, seed)
    program.run()
    faults = list(program.faults())
    return f"{', '.join(faults)} after {', '.join(program.done)}" if faults else ""
