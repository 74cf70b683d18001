"""Tests whether a sequence that is restored from a stored cache continues as the
original sequence did.

Each cell restores prompts from a file (warm) or memory (hot), in one format, alone or
in a batch, and decodes. The restored rows are compared with those of the original, and
the logits with those of the sequence decoded alone. A cold cell restores nothing."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from pathlib import Path

import numpy as np

from workbench.bundle.names import is_cache
from workbench.check import gates
from workbench.check.compare import relative_rms
from workbench.decode import Decoder, Record, Snapshot, store
from workbench.errors import InputError
from workbench.progress import bar

CACHES = [("cold", "fp16"), *product(("warm", "hot"), store.FORMATS)]
NEW_TOKENS = 4  # tokens that are decoded
# Relative RMS of one position's logits. In a batch, or with other tiles of the prefill,
# kernels sum in another order: at most 4e-6 in fp32 on the shipped checkpoints, more in
# fp16, where one wrong row of a thousand stays below the limit.
LOGITS_LIMITS = {"exact": 1e-4, "declared": 5e-2, "narrow": 1e-1, "coreml": 1e-1}


@dataclass(frozen=True)
class ReuseCell:
    """The result of one cell.

    Attributes:
        logits_error: the largest relative RMS between the logits and those of the
            sequence decoded alone; None if no logits were computed.
        reason: the fault; "" if there is none.
    """

    batch: int
    cache: str
    format: str
    context: int
    verdict: str
    logits_error: float | None
    reason: str = ""

    @property
    def is_reference(self) -> bool:
        """Whether the cell repeats the run that its logits are compared with: batch 1, cold
        in fp16, or hot in four bits."""
        repeated = {"fp16": "cold", "q4": "hot"}[self.format]
        return self.batch == 1 and self.cache == repeated


def check_reuse(
    decoder: Decoder, batched_decoder: Decoder | None = None, *, lengths: Sequence[int]
) -> list[ReuseCell]:
    """Every cache × format × batch × context.

    Args:
        decoder: of a bundle of batch 1.
        batched_decoder: of a bundle that differs from it only in its batch.
        lengths: tokens of the first prompt of each batch.

    Raises:
        InputError: bundles that differ in more than their batch; lengths that do not fit.
    """
    decoders = [decoder, *filter(None, [batched_decoder])]
    batches = [candidate.options.batch for candidate in decoders]
    if batches[0] != 1 or len({candidate.identity for candidate in decoders}) > 1:
        needed = "one of batch 1, and another export that differs only in --batch"
        raise InputError("bundles", f"batch {batches}", needed, "export them so")
    least, most = max(batches) + 1, decoder.options.max_seq_len - NEW_TOKENS
    if not lengths or not least <= min(lengths) <= max(lengths) <= most:
        needed = f"{least} to {most} tokens before {NEW_TOKENS} new ones"
        raise InputError("contexts", f"{list(lengths)}", needed, "choose others")
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for n in bar(lengths, desc="reuse"):
            sessions = [
                record_session(decoder, Path(folder), n, seq)
                for seq in range(batches[-1])
            ]
            for candidate, cache in product(decoders, CACHES):
                batch = sessions[: candidate.options.batch]
                cells.append(check_cell(candidate, batch, *cache))
    return cells


def count_cells(cells: Sequence[ReuseCell]) -> str:
    """A sentence: how many cells are comparisons, how many of these restore nothing, and
    how many repeat a reference."""
    compared = [cell for cell in cells if not cell.is_reference]
    cold = sum(cell.cache == "cold" for cell in compared)
    return (
        f"{len(compared)} cells compared, {cold} of which restore nothing; "
        f"{len(cells) - len(compared)} more repeat a reference"
    )


def reuse_gate(cells: list[ReuseCell], name: str = "reuse") -> gates.Gate:
    """The gate `reuse` over all cells; its reason names the first wrong one."""
    wrong = [cell for cell in cells if cell.verdict == gates.RED]
    faults = [
        f"{len(wrong)} of {len(cells)} cells; batch {cell.batch}, {cell.cache}, "
        f"{cell.format}, context {cell.context}: {cell.reason}"
        for cell in wrong[:1]
    ]
    same = "every sequence continues as it does alone"
    return gates.no_faults(name, faults, f"{same}: {count_cells(cells)}")


def record_session(decoder: Decoder, folder: Path, n: int, seq: int) -> "Session":
    """Decodes a seeded prompt of `n` tokens (or n − `seq`, where positions may differ) by
    itself, and stores its sequence in `folder` in every format."""
    length = n if decoder.options.kv_write == "slice" else n - seq
    rng = np.random.default_rng([0, n, seq])
    ids = rng.integers(0, decoder.manifest.dims.V, length).tolist()
    alone = list(decoder.stream(ids, NEW_TOKENS, stop=()))
    decoder.begin()
    decoder.prefill(ids[:-1])
    before = decoder.snapshot()
    decoder.decode_one_token(ids[-1])
    stored = decoder.snapshot()
    if not all(map(is_cache, before.states)):
        # a recurrent state cannot be trimmed by a token
        stored = before
    snapshots = {}
    for format in store.FORMATS:
        store.save(folder / format, f"{n}-{seq}", stored, format)
        snapshots[format] = store.load(folder / format, f"{n}-{seq}")
    rounded = snapshots["q4"].trim(stored.offset - before.offset)
    rest = decoder.stream(ids[-1:], NEW_TOKENS, after=rounded, stop=())
    records = {"fp16": alone, "q4": list(rest)}
    return Session(ids, folder, decoder.identity, before, snapshots, records)


@dataclass(frozen=True, eq=False)
class Session:
    """A prompt that was decoded by itself and stored.

    Attributes:
        ids: the prompt.
        folder: where it is stored, a folder for each format.
        identity: of the decoder.
        before: the sequence before the prompt's last token.
        snapshots: the stored sequence, by format.
        records: the tokens decoded after each, by format.
    """

    ids: list[int]
    folder: Path
    identity: str
    before: Snapshot
    snapshots: dict[str, Snapshot]
    records: dict[str, list[Record]]

    def restore(self, cache: str, format: str) -> Snapshot:
        """The snapshot of the prompt, from its file or from memory.

        Raises:
            ValueError: it differs from the sequence before the prompt's last token.
        """
        if cache == "warm":
            folder = self.folder / format
            snapshot, rest = store.find(folder, self.ids, self.identity)
        else:
            snapshot = self.snapshots[format]
            snapshot = snapshot.trim(snapshot.offset - len(self.before.ids))
            rest = self.ids[snapshot.offset :]
        if (snapshot.ids, rest) != (self.before.ids, self.ids[-1:]):
            restored = f"{snapshot.offset} tokens, {len(rest)} left"
            raise ValueError(f"prompt of {len(self.ids)} tokens: restored {restored}")
        for name, cold in self.before.states.items():
            warm = snapshot.states[name]
            rows = min(cold.shape[-2], warm.shape[-2])  # a ring may hold more
            warm, cold = (np.float32(x[..., -rows:, :]) for x in (warm, cold))
            rounded = format == "q4" and is_cache(name)
            wrong = ~(np.abs(warm - cold) <= (_half_step(cold) if rounded else 0))
            if wrong.any():
                raise ValueError(f"{name}: {wrong.sum()} of {wrong.size} values differ")
        return snapshot

    def distances(self, records: list[Record], limit: int, format: str) -> list[float]:
        """Relative RMS between the logits of `records` and the session's, up to the first
        token that differs."""
        if len(records) != limit:
            raise ValueError(f"{len(records)} tokens, {limit} expected")
        distances = []
        for record, alone in zip(records, self.records[format]):
            distances.append(relative_rms(alone.logits, record.logits))
            if record.token != alone.token:
                break  # later logits are of other tokens
        return distances


def check_cell(
    decoder: Decoder, sessions: list[Session], cache: str, format: str
) -> ReuseCell:
    """Runs one cell. Any exception makes it RED."""
    cell = len(sessions), cache, format, len(sessions[0].ids)
    limits = [NEW_TOKENS] * len(sessions)
    if len(sessions) > 1:
        limits[0] //= 2  # one sequence ends before the others
    distance = after = None
    try:
        prompts = [session.ids for session in sessions]
        if cache != "cold":
            after = [session.restore(cache, format) for session in sessions]
            prompts = [ids[-1:] for ids in prompts]
        records = [[] for _ in sessions]
        for record in decoder.stream(prompts, limits, after=after, stop=()):
            records[record.seq].append(record)
        distances = []
        for session, decoded, limit in zip(sessions, records, limits):
            distances += session.distances(decoded, limit, format)
            if after:  # decoding must not have changed the stored entry
                session.restore(cache, format)
        distance = float(np.max(distances))
        limit = LOGITS_LIMITS[decoder.arithmetic]
        if not distance <= limit:
            raise ValueError(
                f"logits are {distance:.2g} apart, at most {limit:g} allowed"
            )
    except Exception as problem:  # a fault may raise anything
        return ReuseCell(*cell, gates.RED, distance, str(problem))
    return ReuseCell(*cell, gates.GREEN, distance)


def _half_step(rows: np.ndarray) -> np.ndarray:
    """The error [..., D] that storage in four bits may cause: half a step of each group
    along D, plus the rounding of scale and lowest value to fp16."""
    groups = rows.reshape(*rows.shape[:-1], -1, gcd(rows.shape[-1], store.GROUP))
    step = np.ptp(groups, -1, keepdims=True) / 15
    return (0.504 * step + 2e-3 * np.abs(groups)).reshape(rows.shape)
