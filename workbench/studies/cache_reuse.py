"""The cache-reuse matrix: every temperature × path × format × batch × context, each cell against its sequences alone.

Decoders flow in, cells with a verdict and a reason flow out. Each cell decodes from a store as a user would, and is
held against what cannot share its mistake: its rows against those of a cold prefill, each of its sequences against that
sequence decoded alone from the same restored cache (batch > 1) and against the cold run. Predictions are counted at
the runtime, so that a restore that prefills again shows.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from workbench.bundle.manifest import is_cache
from workbench.check import metrics
from workbench.check.gates import GREEN, NOT_RUN, RED, Gate
from workbench.decode import Decoder, Record, Snapshot
from workbench.decode.snapshot import trimmable
from workbench.errors import InputError
from workbench.prompt_cache import Store
from workbench.prompt_cache.formats import FORMATS, group

CACHES, PATHS = ("cold", "warm", "hot"), ("stream", "generate")
# Relative RMS of one position's logits. Alone and in a batch, or prefilled in other tiles, kernels sum in another order
# (at most 4e-6 on the shipped checkpoints in fp32); in fp16 roundings then fall differently. One wrong row among 1023
# stays below the limits of fp16: judge long contexts in `exact`.
LOGITS = {"exact": 1e-4, "declared": 5e-2, "narrow": 1e-1, "coreml": 1e-1}


@dataclass(frozen=True)
class ReuseCell:
    """One run: `tokens` is how many each sequence produced, `reason` the first check that failed, or what held."""

    batch: int
    cache: str
    streaming: bool
    context: int
    format: str
    tokens: list[int] | None
    verdict: str
    reason: str


@dataclass
class Matrix:
    """The cells, and the verdict they add up to."""

    cells: list[ReuseCell]
    batches: list[int]

    @property
    def verdict(self) -> str:
        """RED if any cell is; GREEN once every temperature × path has run, and a batch above 1 where there is one."""
        ran = [c for c in self.cells if c.verdict != NOT_RUN]
        if any(c.verdict == RED for c in ran):
            return RED
        covered = {(c.cache, c.streaming) for c in ran} == set(product(CACHES, (True, False)))
        return GREEN if covered and {c.batch for c in ran} == set(self.batches) else NOT_RUN

    def gate(self, name: str) -> Gate:
        ran = [c for c in self.cells if c.verdict != NOT_RUN]
        red = [c for c in ran if c.verdict == RED]
        said = f"{len(ran) - len(red)} of {len(ran)} cells hold; {sum(c.batch > 1 for c in ran)} ran in a batch"
        for c in red[:1]:
            said += f"; first: batch {c.batch}, {c.cache}, {c.format}, context {c.context}: {c.reason}"
        return Gate(name, self.verdict, float(len(ran) - len(red)), float(len(ran)), said)

    def json(self) -> dict:
        return {"verdict": self.verdict, "cells": [asdict(c) for c in self.cells]}


@dataclass
class Reference:
    """One prompt's references: the cold run's records, by format of the cache it goes on with after all tokens but
    the last, and the states at that point."""

    ids: list[int]
    cold: dict[str, list[Record]]
    states: dict[str, np.ndarray]


def contexts(block: int) -> list[int]:
    """Prompt lengths around the edges of one and two blocks."""
    return [block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1]


def check_reuse(decoder: Decoder, together: Decoder | None = None, *, lengths: Sequence[int] = (), max_new: int = 6, seed: int = 0,
        make_store: Callable[..., Store] = Store, progress: bool = False) -> Matrix:  # fmt: skip
    """Runs the matrix.

    Args:
        decoder: of a bundle of batch 1.
        together: of a bundle that differs in its batch alone.
        lengths: contexts (default: around one and two blocks of the store).
        make_store: `Store`, or one with a planted fault.
    """
    from tqdm.auto import tqdm

    decoders = {d.options.batch: d for d in (decoder, together) if d}
    if decoder.options.batch != 1 or (together and together.identity != decoder.identity):
        raise InputError("bundles", f"batch {decoder.options.batch}" + (f", {together.options.batch}" if together else ""),
                         "one of batch 1, and another export of the same checkpoint that differs in --batch alone",
                         "export them so")  # fmt: skip
    cells, S = [], decoder.options.max_seq_len
    with tempfile.TemporaryDirectory() as folder:
        stores = {f: make_store(Path(folder) / f, decoder) for f in FORMATS}
        every = list(lengths) or contexts(stores["fp16"].block)
        axes = list(product(every, decoders, FORMATS, CACHES, PATHS))
        references: dict[int, list[Reference]] = {}
        for n, batch, format, cache, path in tqdm(axes, desc="reuse", unit="cell", disable=not progress):
            shown = dict(batch=batch, cache=cache, streaming=path == "stream", context=n, format=format)
            why = "a cold run restores nothing" if (cache, format) == ("cold", "q4") else ""
            if n + max_new > S or n <= max(decoders):
                why = f"{n} + {max_new} tokens do not fit max_seq_len = {S}"
            if why:
                cells.append(ReuseCell(**shown, tokens=None, verdict=NOT_RUN, reason=why))
                continue
            if n not in references:
                references[n] = [_reference(decoder, stores, _cell_prompt(decoder, n, slot, seed), slot, max_new)
                                 for slot in range(max(decoders))]  # fmt: skip
            cells.append(_cell(decoder, decoders[batch], stores[format], references[n][:batch], max_new, shown))
    return Matrix(cells, list(decoders))


def _cell_prompt(decoder: Decoder, n: int, slot: int, seed: int) -> list[int]:
    """Seeded tokens; every slot one token shorter than the one before, unless the bundle needs equal positions."""
    length = n if decoder.options.kv_write == "slice" else n - slot
    return np.random.default_rng([seed, n, slot]).integers(0, decoder.manifest.dims.V, length).tolist()


def _reference(decoder: Decoder, stores: dict[str, Store], ids: list[int], slot: int, max_new: int) -> Reference:
    """The cold runs of one prompt; on the way, every store gets what a session leaves: all tokens, or all but the last
    where a token cannot be taken back."""
    cold = {"fp16": list(decoder.stream(ids, max_new, stop=()))}
    decoder.begin()
    decoder.prefill(ids[:-1])
    states = {n: state.read(n)[0] for state in decoder.states for n in state.shard.states}
    left = decoder.snapshot()
    cold["q4"] = _quantized(decoder, ids[-1], max_new)
    if trimmable(decoder.manifest, len(ids)):
        decoder.begin()
        decoder.prefill(ids[:-1])
        decoder.decode_one_token(ids[-1])
        left = decoder.snapshot()
    for format, store in stores.items():
        store.save(f"context{len(ids)}-slot{slot}", left, format)
    return Reference(ids, cold, states)


def _cell(alone: Decoder, decoder: Decoder, store: Store, sequences: list[Reference], max_new: int, shown: dict) -> ReuseCell:
    """Runs and judges one cell; whatever it raises is its reason to be RED."""
    limits = [max_new // 2 if slot == 0 and len(sequences) > 1 else max_new for slot in range(len(sequences))]
    try:
        found, problems = _run_cells(alone, decoder, store, sequences, limits, shown)
    except Exception as problem:  # a planted or real fault may raise anything
        return ReuseCell(**shown, tokens=None, verdict=RED, reason=f"{type(problem).__name__}: {problem}")
    reason = problems[0] if problems else "rows, tokens, logits, predictions and stored entry as they must be"
    return ReuseCell(**shown, tokens=[len(records) for records in found], verdict=RED if problems else GREEN, reason=reason)


def _run_cells(alone, decoder, store, sequences, limits, shown) -> tuple[list[list[Record]], list[str]]:
    cold = shown["cache"] == "cold"
    after, rests, problems = (None, [s.ids for s in sequences], []) if cold else _restored(store, sequences, shown)
    with count_verdicts(decoder) as calls:
        found = _decode_cell(decoder, rests, limits, after, shown["streaming"])
    longest = max(map(len, rests))
    expected = -(-longest // decoder.options.t_max) + max(limits) - 1
    if len(calls) != expected:
        problems.append(f"{len(calls)} calls of each shard, {expected} expected: {longest} tokens, then one by one")
    for slot, (records, sequence) in enumerate(zip(found, sequences, strict=True)):
        others = {"the cold run": sequence.cold[shown["format"]][: limits[slot]]}
        if decoder is not alone:
            held = after[slot] if after else None
            others["decoded alone"] = list(alone.stream(rests[slot], limits[slot], after=held, stop=()))
        for name, other in others.items():
            precision = decoder.precision if decoder.runtime == "portable" else "coreml"
            said = differs(records, other, precision, strict=name == "decoded alone")
            problems += [f"slot {slot} against {name}: {said}"] * bool(said)
    if not cold:
        problems += _restored(store, sequences, shown)[2]  # decoding must not have changed the entry
    return found, problems


def _restored(store: Store, sequences: list[Reference], shown: dict) -> tuple[list[Snapshot], list[list[int]], list[str]]:
    """What the store gives back: by prefix for the streaming path, by name for the other."""
    after, rests, problems = [], [], []
    for slot, sequence in enumerate(sequences):
        name = f"context{len(sequence.ids)}-slot{slot}"
        if shown["cache"] == "warm":
            store.cool(name)
        elif name not in store.hot:
            store.load(name)
        hit = store.find(sequence.ids) if shown["streaming"] else None
        if shown["streaming"] and (hit is None or hit.temperature != shown["cache"]):
            raise AssertionError(f"slot {slot}: {'no hit' if hit is None else hit.temperature}, not {shown['cache']}")
        snapshot = hit.snapshot if hit else store.load(name)
        snapshot = snapshot.trim(max(0, snapshot.offset + 1 - len(sequence.ids)))
        rests.append(hit.rest if hit else sequence.ids[snapshot.offset :])
        after.append(snapshot)
        if list(snapshot.ids) + rests[-1] != sequence.ids or len(rests[-1]) != 1:
            problems.append(f"slot {slot}: {snapshot.offset} tokens restored, {len(rests[-1])} left")
        said = wrong_rows(snapshot, sequence.states, shown["format"])
        problems += [f"slot {slot}: {said}"] * bool(said)
    return after, rests, problems


def _decode_cell(decoder: Decoder, rests, limits, after, streaming: bool) -> list[list[Record]]:
    """Records by slot; on the other path the tokens that `generate` returns take the place of the streamed ones."""
    one = decoder.options.batch == 1
    ids, limit, held = (rests[0], limits[0], after[0] if after else None) if one else (rests, limits, after)
    seen: list[list[Record]] = [[] for _ in rests]
    if streaming:
        for i, record in enumerate(decoder.stream(ids, limit, after=held, stop=())):
            seen[record.seq].append(record)
            if i == 0:
                _offer_foreign(decoder)
        return seen
    stream = decoder.stream

    def watched(*arguments, **options):
        for record in stream(*arguments, **options):
            seen[record.seq].append(record)
            yield record

    with patch.object(decoder, "stream", watched):
        tokens = decoder.generate(ids, limit, after=held, stop=())
    if [[r.token for r in records] for records in seen] != ([tokens] if one else tokens):
        raise AssertionError("generate does not return what stream yields")
    return seen


def _offer_foreign(decoder: Decoder) -> None:
    """Another bundle's snapshot must be refused, and leave the running sequence as it is."""
    own = decoder.snapshot()
    try:
        decoder.add(0, replace(own, identity="another", states={n: 0 * v for n, v in own.states.items()}))
    except InputError:
        return
    raise AssertionError("a snapshot of another bundle was taken")


@contextmanager
def count_verdicts(decoder: Decoder):
    """A list that grows by one with every prediction of the first layer shard."""
    model, calls = decoder.layers[0], []
    predict = model.predict
    with patch.object(model, "predict", lambda *arguments: (calls.append(1), predict(*arguments))[1]):
        yield calls


def differs(found: list[Record], reference: list[Record], precision: str, strict: bool = False) -> str:
    """Where two runs part, or "". Up to the first other token, logits must agree; another token is allowed where it is
    a near tie, never in exact arithmetic when `strict` (one cache, one program)."""
    if len(found) != len(reference) or not found:
        return f"{len(found)} tokens, {len(reference)} expected"
    for i, (a, b) in enumerate(zip(found, reference, strict=True)):
        apart = metrics.relative_rms(b.logits, a.logits)
        if not apart <= LOGITS[precision]:
            return f"logits of new token {i} are {apart:.2g} apart"
        if a.token != b.token:
            tie = metrics.near_tie(b.logits, a.logits) and not (strict and precision == "exact")
            return "" if tie else f"new token {i} is {a.token}, not {b.token}"
    return ""


def wrong_rows(snapshot: Snapshot, states: dict[str, np.ndarray], format: str) -> str:
    """What a snapshot holds that a cold prefill's states [H_kv, S, D] do not, or "": fp16 must be equal, q4 within half
    a step of its group along head_dim (a fifteenth of the group's range) and one rounding."""
    for name, cold in states.items():
        found = snapshot.states.get(name)
        wanted = cold
        if is_cache(name):
            last = np.arange(max(0, snapshot.offset - cold.shape[1]), snapshot.offset)
            wanted = cold[:, last % cold.shape[1]]
        if found is None or found.shape != wanted.shape:
            return f"{name} is {None if found is None else list(found.shape)}, not {list(wanted.shape)}"
        allowed = 0.0
        if format == "q4" and is_cache(name):
            grouped = wanted.astype(np.float32).reshape(*wanted.shape[:-1], -1, group(wanted.shape[-1]))
            allowed = np.repeat(np.ptp(grouped, -1) / 29.9, grouped.shape[-1], -1) + 2e-3 * np.abs(wanted)
        wrong = ~(np.abs(found.astype(np.float32) - wanted) <= allowed)
        if wrong.any():
            return f"{name}: {wrong.sum()} of {wrong.size} values are not the cold prefill's"
    return ""


def _quantized(decoder: Decoder, token: int, max_new: int) -> list[Record]:
    """Goes on from `token` after every K and V row of the running sequence went through four bits in place."""
    for state in decoder.states:
        for name in filter(is_cache, state.shard.states):
            state.write(name, four_bits(state.read(name)))
    records = []
    for _ in range(max_new):
        logits = decoder.decode_one_token(token)
        token = int(np.argmax(logits))
        records.append(Record(token, logits, decoder.times))
    return records


def four_bits(rows: np.ndarray) -> np.ndarray:
    """Rows [..., D] on 16 steps above the least of each group along D; step and least are fp16 and contain the group."""
    grouped = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, group(rows.shape[-1]))
    low = grouped.min(-1, keepdims=True).astype(np.float16)
    low = np.where(low > grouped.min(-1, keepdims=True), np.nextafter(low, np.float16(-np.inf)), low).astype(np.float32)
    wanted = (grouped.max(-1, keepdims=True) - low) / np.float32(15)
    step = wanted.astype(np.float16)
    step = np.where(step < wanted, np.nextafter(step, np.float16(np.inf)), step).astype(np.float32)
    codes = np.divide(grouped - low, step, out=np.zeros_like(grouped), where=step > 0).round()
    return (low + codes * step).reshape(rows.shape).astype(rows.dtype)
