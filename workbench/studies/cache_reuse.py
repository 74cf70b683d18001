"""The cache-reuse matrix: every temperature × path × format × batch × context, with a
verdict.

Each cell decodes from a store as a user would. Its rows are compared with those of a
cold prefill, each of its sequences with the cold run and, in a batch, with the sequence
decoded alone from the same restored cache. Predictions are counted at the runtime,
which shows a restore that prefills again."""

import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from workbench.bundle.names import is_cache
from workbench.bundle.states import RING, state_kind
from workbench.check import metrics
from workbench.check.gates import GREEN, NOT_RUN, RED, Gate
from workbench.decode import Decoder, Record, Snapshot
from workbench.decode.snapshot import layout, take
from workbench.errors import InputError
from workbench.prompt_cache import Store, formats
from workbench.prompt_cache.formats import FORMATS, group

CACHES = ("cold", "warm", "hot")
PATHS = ("stream", "generate")
# Relative RMS of one position's logits. In a batch, or with other tiles of the prefill,
# kernels sum in another order, which gives at most 4e-6 on the shipped checkpoints in
# fp32, and more in fp16. One wrong row among 1023 is below the limits of fp16: check
# long contexts in `exact`.
LOGITS = {
    "exact": 1e-4,
    "declared": 5e-2,
    "narrow": 1e-1,
    "coreml": 1e-1,
    "coreai": 1e-1,
}


@dataclass(frozen=True)
class ReuseCell:
    """One run: `tokens` are the numbers of tokens of each sequence, `reason` is the
    first failed check, or a summary of the passed ones."""

    batch: int
    cache: str
    streaming: bool
    context: int
    format: str
    tokens: list[int] | None = None
    verdict: str = NOT_RUN
    reason: str = ""


@dataclass
class Matrix:
    """The cells and their common verdict."""

    cells: list[ReuseCell]
    batches: list[int]

    @property
    def ran(self) -> list[ReuseCell]:
        return [cell for cell in self.cells if cell.verdict != NOT_RUN]

    @property
    def verdict(self) -> str:
        """RED if a cell is RED; GREEN if every temperature × path and every batch has
        run."""
        if RED in (cell.verdict for cell in self.cells):
            return RED
        complete = {(c.cache, c.streaming) for c in self.ran} == set(
            product(CACHES, (True, False))
        )
        if complete and {c.batch for c in self.ran} == set(self.batches):
            return GREEN
        return NOT_RUN

    def gate(self, name: str) -> Gate:
        count = len(self.ran)
        red = [cell for cell in self.cells if cell.verdict == RED]
        green = count - len(red)
        batched = sum(cell.batch > 1 for cell in self.ran)
        reason = f"{green} of {count} cells hold; {batched} ran in a batch"
        if red:
            c = red[0]
            where = f"batch {c.batch}, {c.cache}, {c.format}, context {c.context}"
            reason += f"; first: {where}: {c.reason}"
        return Gate(name, self.verdict, float(green), float(count), reason)

    def json(self) -> dict:
        return {"verdict": self.verdict, "cells": [asdict(c) for c in self.cells]}


@dataclass
class Reference:
    """One prompt's references: its name in the stores, the cold run's records by format
    of the cache after all tokens but the last, and the states at that point."""

    name: str
    ids: list[int]
    cold: dict[str, list[Record]]
    states: dict[str, np.ndarray]


def contexts(block: int) -> list[int]:
    """Prompt lengths around the edges of one and two blocks."""
    return [edge + step for edge in (block, 2 * block) for step in (-1, 0, 1)]


def check_reuse(
    decoder: Decoder,
    together: Decoder | None = None,
    *,
    lengths: Sequence[int] = (),
    max_new: int = 6,
    progress: bool = False,
) -> Matrix:
    """Runs the matrix.

    Args:
        decoder: of a bundle of batch 1.
        together: of a bundle that differs in its batch alone.
        lengths: contexts (default: around one and two blocks of the store).
    """
    from tqdm.auto import tqdm

    both = list(filter(None, (decoder, together)))
    decoders = {each.options.batch: each for each in both}
    same = {each.identity for each in both} == {decoder.identity}
    if decoder.options.batch != 1 or not same:
        other = "another export of the same checkpoint that differs in --batch alone"
        raise InputError(
            "bundles",
            f"batch {', '.join(str(each.options.batch) for each in both)}",
            f"one of batch 1, and {other}",
            "export them so",
        )
    cells = []
    S = decoder.options.max_seq_len
    with tempfile.TemporaryDirectory() as folder:
        stores = {f: Store(Path(folder) / f, decoder) for f in FORMATS}
        every = list(lengths) or contexts(stores["fp16"].block)
        axes = list(product(every, decoders, FORMATS, CACHES, PATHS))
        references: dict[int, list[Reference]] = {}
        shown = tqdm(axes, desc="reuse", unit="cell", disable=not progress)
        for n, batch, format, cache, path in shown:
            cell = ReuseCell(batch, cache, path == "stream", n, format)
            if n + max_new > S or n <= max(decoders):
                reason = f"{n} + {max_new} tokens do not fit max_seq_len = {S}"
                cell = replace(cell, reason=reason)
            elif (cache, format) == ("cold", "q4"):
                cell = replace(cell, reason="a cold run restores nothing")
            else:
                own = references.setdefault(n, [])
                for seq in range(len(own), max(decoders)):
                    own.append(_reference(decoder, stores, n, seq, max_new))
                run = decoder, decoders[batch], stores[format], own[:batch], max_new
                cell = _run_cell(cell, *run)
            cells.append(cell)
    return Matrix(cells, list(decoders))


def _reference(
    decoder: Decoder, stores: dict[str, Store], n: int, seq: int, max_new: int
) -> Reference:
    """The cold runs of one prompt; saves a session's snapshot in every store.

    The snapshot has all tokens, or all but the last if a token cannot be undone. The
    prompt is seeded and has n tokens; every further sequence is one token shorter,
    unless the bundle needs equal positions."""
    length = n if decoder.options.kv_write == "slice" else n - seq
    rng = np.random.default_rng([0, n, seq])
    ids = rng.integers(0, decoder.manifest.dims.V, length).tolist()
    name = f"context{length}-slot{seq}"
    cold = {"fp16": list(decoder.stream(ids, max_new, stop=()))}
    decoder.begin()
    decoder.prefill(ids[:-1])
    states = {key: state.read(key)[0] for state, key in decoder.named_states}
    session = decoder.snapshot()
    if decoder.undo.floor(len(ids) - 1, len(ids)) < len(ids):
        decoder.decode_one_token(ids[-1])
        session = decoder.snapshot()
        decoder.begin()
        decoder.prefill(ids[:-1])
    # rounds K and V to four bits in place, where q4 applies
    for state, key in decoder.named_states:
        if is_cache(key) and four_bit_error(session.states[key]) <= formats.OUTLIER:
            state.write(key, four_bits(state.read(key)))
    cold["q4"] = greedy(decoder, ids[-1], max_new)[0]
    for format, store in stores.items():
        store.save(name, session, format)
    return Reference(name, ids, cold, states)


def _run_cell(
    cell: ReuseCell,
    alone: Decoder,
    decoder: Decoder,
    store: Store,
    sequences: list[Reference],
    max_new: int,
) -> ReuseCell:
    """The cell with its verdict; an error makes it RED."""
    limits = [max_new] * len(sequences)
    if len(limits) > 1:
        limits[0] //= 2
    try:
        records, problems = _check_cell(cell, alone, decoder, store, sequences, limits)
    except Exception as problem:  # a planted or real fault may raise anything
        return replace(cell, verdict=RED, reason=f"{type(problem).__name__}: {problem}")
    counts = list(map(len, records))
    if problems:
        return replace(cell, tokens=counts, verdict=RED, reason=problems[0])
    reason = "rows, tokens, logits, predictions and stored entry as they must be"
    return replace(cell, tokens=counts, verdict=GREEN, reason=reason)


def _check_cell(
    cell, alone, decoder, store, sequences, limits
) -> tuple[list[list[Record]], list[str]]:
    """Records by sequence, and all differences of records and restored rows from the
    references."""
    after = None
    rests = [sequence.ids for sequence in sequences]
    problems = []
    if cell.cache != "cold":
        after, rests, problems = _restored(cell, store, sequences)
    with count_calls(decoder) as calls:
        records = _decode_cell(decoder, rests, limits, after, cell.streaming)
    longest = max(map(len, rests))
    expected = -(-longest // decoder.options.t_max) + max(limits) - 1
    if len(calls) != expected:
        counted = f"{len(calls)} calls of each shard, {expected} expected"
        problems.append(f"{counted}: {longest} tokens, then one by one")
    for seq, sequence in enumerate(sequences):
        others = {"the cold run": sequence.cold[cell.format][: limits[seq]]}
        if decoder is not alone:
            start = after and after[seq]
            rest = alone.stream(rests[seq], limits[seq], after=start, stop=())
            others["decoded alone"] = list(rest)
        for name, other in others.items():
            strict = name == "decoded alone"
            if difference := differs(
                records[seq], other, decoder.arithmetic, strict=strict
            ):
                problems.append(f"slot {seq} against {name}: {difference}")
    if after:  # decoding must not have changed the stored entry
        problems += _restored(cell, store, sequences)[2]
    return records, problems


def _restored(
    cell: ReuseCell, store: Store, sequences: list[Reference]
) -> tuple[list[Snapshot], list[list[int]], list[str]]:
    """The snapshots restored from the store, the tokens left to run, and the problems;
    a snapshot is found by prefix on the streaming path, by name on the other."""
    after = []
    rests = []
    problems = []
    for seq, sequence in enumerate(sequences):
        name = sequence.name
        ids = sequence.ids
        if cell.cache == "warm":
            store.cool(name)
        elif name not in store.hot:
            store.load(name)
        if cell.streaming:
            hit = store.find(ids)
            temperature = getattr(hit, "temperature", "no hit")
            if temperature != cell.cache:
                raise AssertionError(f"slot {seq}: {temperature}, not {cell.cache}")
            snapshot = hit.snapshot
        else:
            snapshot = store.load(name)
        snapshot = snapshot.trim(max(0, snapshot.offset + 1 - len(ids)))
        rest = ids[snapshot.offset :]
        if cell.streaming:
            rest = hit.rest
        if [*snapshot.ids, *rest] != ids or len(rest) != 1:
            problems.append(
                f"slot {seq}: {snapshot.offset} tokens restored, {len(rest)} left"
            )
        shapes = layout(store.manifest, snapshot.offset, snapshot.floor)
        if difference := wrong_rows(snapshot, sequence.states, cell.format, shapes):
            problems.append(f"slot {seq}: {difference}")
        after.append(snapshot)
        rests.append(rest)
    return after, rests, problems


def _decode_cell(
    decoder: Decoder, rests, limits, after, streaming: bool
) -> list[list[Record]]:
    """Records by sequence; on the other path `generate` must return their tokens."""
    records: list[list[Record]] = [[] for _ in rests]
    stream = decoder.stream

    def recording(*arguments, **options):
        for record in stream(*arguments, **options):
            records[record.seq].append(record)
            yield record

    if streaming:
        run = recording(rests, limits, after=after, stop=())
        next(run)
        _offer_foreign(decoder)
        list(run)
        return records
    with patch.object(decoder, "stream", recording):
        tokens = decoder.generate(rests, limits, after=after, stop=())
    streamed = [[record.token for record in own] for own in records]
    if len(rests) == 1:
        streamed = streamed[0]
    if streamed != tokens:
        raise AssertionError("generate does not return what stream yields")
    return records


def _offer_foreign(decoder: Decoder) -> None:
    """Offers another bundle's snapshot, which must be refused without changing the
    sequences."""
    own = decoder.snapshot()
    zeros = {name: 0 * value for name, value in own.states.items()}
    try:
        decoder.add(0, replace(own, identity="another", states=zeros))
    except InputError:
        return
    raise AssertionError("a snapshot of another bundle was taken")


@contextmanager
def count_calls(decoder: Decoder):
    """A list with an item for every call of each layer shard within the block."""
    calls, advance = [], decoder.advance

    def counted(*arguments):
        calls.append(1)
        return advance(*arguments)

    with patch.object(decoder, "advance", counted):
        yield calls


def differs(
    records: list[Record], reference: list[Record], precision: str, strict: bool = False
) -> str:
    """The first difference of two runs in words, or "".

    Up to the first different token, logits must be equal within `LOGITS`. A different
    token is allowed if it is a near tie, except in exact arithmetic with `strict` (one
    cache, one program)."""
    if len(records) != len(reference) or not records:
        return f"{len(records)} tokens, {len(reference)} expected"
    for i, (a, b) in enumerate(zip(records, reference, strict=True)):
        apart = metrics.relative_rms(b.logits, a.logits)
        if not apart <= LOGITS[precision]:
            return f"logits of new token {i} are {apart:.2g} apart"
        if a.token != b.token:
            exact = strict and precision == "exact"
            if metrics.near_tie(b.logits, a.logits) and not exact:
                return ""
            return f"new token {i} is {a.token}, not {b.token}"
    return ""


def wrong_rows(
    snapshot: Snapshot,
    states: dict[str, np.ndarray],
    format: str,
    shapes: dict[str, tuple],
) -> str:
    """The first difference of a snapshot's rows from a cold prefill's states [H_kv, S,
    D], or "".

    fp16 must be equal; q4 within half a step of its group along head_dim (a step is a
    fifteenth of the group's range) and one rounding."""
    for name, cold in states.items():
        rows = snapshot.states.get(name)
        allowed = 0.0
        kind = RING if is_cache(name) else state_kind(name)
        cold = take(cold, kind, shapes[name][-2], snapshot.offset, 0)
        if rows is None or rows.shape != cold.shape:
            return f"{name} is {None if rows is None else list(rows.shape)}, not {list(cold.shape)}"
        if format == "q4" and is_cache(name):
            grouped = _grouped(cold)
            half_step = np.repeat(np.ptp(grouped, -1) / 29.9, grouped.shape[-1], -1)
            allowed = half_step + 2e-3 * np.abs(cold)
        wrong = ~(np.abs(rows.astype(np.float32) - cold) <= allowed)
        if wrong.any():
            return f"{name}: {wrong.sum()} of {wrong.size} values are not the cold prefill's"
    return ""


def greedy(decoder: Decoder, token: int, count: int) -> list[list[Record]]:
    """Continues each of the running sequences from `token` by `count` greedy tokens;
    returns the records by sequence."""
    B = decoder.options.batch
    tokens = [token] * B
    records = [[] for _ in range(B)]
    for _ in range(count):
        logits = decoder.decode_one_token(tokens).reshape(B, -1)
        tokens = logits.argmax(-1).tolist()
        for seq, sequence in enumerate(records):
            sequence.append(Record(tokens[seq], logits[seq], decoder.times, seq))
    return records


def four_bits(rows: np.ndarray) -> np.ndarray:
    """Rows [..., D] rounded to 16 steps above the least value of each group along D;
    step and least value are fp16 and cover the group."""
    grouped = _grouped(rows)
    least = grouped.min(-1, keepdims=True)
    most = grouped.max(-1, keepdims=True)
    low = _fp16_beyond(least, -np.inf)
    step = _fp16_beyond((most - low) / np.float32(15), np.inf)
    zeros = np.zeros_like(grouped)
    codes = np.divide(grouped - low, step, out=zeros, where=step > 0).round()
    return (low + codes * step).reshape(rows.shape).astype(rows.dtype)


def four_bit_error(rows: np.ndarray) -> float:
    """RMS of the error of four bits in rows [H, tokens, D], over the RMS of the
    deviations from the mean over tokens."""
    rows = rows.astype(np.float32)
    change = four_bits(rows) - rows
    spread = rows - rows.mean(1, keepdims=True)
    error, scale = (float(np.sqrt(np.mean(values**2))) for values in (change, spread))
    if scale:
        return error / scale
    return float(error > 0)


def _grouped(rows: np.ndarray) -> np.ndarray:
    """Rows [..., D] as float32 [..., D / group, group]."""
    return rows.astype(np.float32).reshape(*rows.shape[:-1], -1, group(rows.shape[-1]))


def _fp16_beyond(value: np.ndarray, side: float) -> np.ndarray:
    """The nearest fp16 number on the side of `value` that `side` (±inf) names, as
    float32."""
    near = value.astype(np.float16)
    short = near > value if side < 0 else near < value
    beyond = np.nextafter(near, np.float16(side))
    return np.where(short, beyond, near).astype(np.float32)
