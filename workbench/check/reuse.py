"""Whether a stored cache continues as the sequence did that it was taken from.

Each cell restores prompts from a file (warm) or memory (hot), in one format, alone or
in a batch, and decodes. The restored rows are compared with those of the sequence, the
logits with those of the sequence decoded alone; a cold cell restores nothing."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from workbench.bundle.names import is_cache
from workbench.check import gates, metrics
from workbench.decode import Decoder, Record, Snapshot, store
from workbench.errors import InputError

CACHES = [("cold", "fp16"), *product(("warm", "hot"), store.FORMATS)]
# Relative RMS of one position's logits. In a batch, or with other tiles of the prefill,
# kernels sum in another order: at most 4e-6 in fp32 on the shipped checkpoints, more in
# fp16, where one wrong row of a thousand stays below the limit.
LOGITS = {"exact": 1e-4, "declared": 5e-2, "narrow": 1e-1, "coreml": 1e-1}


@dataclass(frozen=True)
class ReuseCell:
    """`apart` is the largest relative RMS between the logits and those of the sequence
    alone (null where none came), `reason` what is wrong, or ""."""

    batch: int
    cache: str
    format: str
    context: int
    verdict: str = gates.GREEN
    apart: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Session:
    """A prompt, its name in the store, the sequence before the prompt's last token, and
    by format of the cache what is kept in memory, and what follows the prompt."""

    name: str
    ids: list[int]
    before: Snapshot
    kept: dict[str, Snapshot]
    records: dict[str, list[Record]]


def contexts(S: int) -> list[int]:
    """Prompt lengths around the edges of one and two blocks of 256 rows, as caches that
    grow in steps have them; of a smaller power of two where a cache of S rows has fewer
    than four."""
    block = min(256, max(4, 1 << (S // 4).bit_length() - 1))
    return [edge + step for edge in (block, 2 * block) for step in (-1, 0, 1)]


def check_reuse(
    decoder: Decoder,
    together: Decoder | None = None,
    *,
    lengths: Sequence[int] = (),
    max_new: int = 4,
    progress: bool = False,
) -> list[ReuseCell]:
    """Every cache × format × batch × context.

    Args:
        decoder: of a bundle of batch 1.
        together: of a bundle that differs in its batch alone.
        lengths: tokens of the first prompt of each batch (default: see `contexts`).

    Raises:
        InputError: bundles that do not belong together; lengths without room.
    """
    from tqdm.auto import tqdm

    decoders = [decoder, *filter(None, [together])]
    batches = [each.options.batch for each in decoders]
    if batches[0] != 1 or len({each.identity for each in decoders}) > 1:
        needed = "one of batch 1, and another export that differs in --batch alone"
        raise InputError("bundles", f"batch {batches}", needed, "export them so")
    most = decoder.options.max_seq_len - max_new
    if outside := [n for n in lengths if not max(batches) < n <= most]:
        needed = f"{max(batches) + 1} to {most} tokens before {max_new} new ones"
        raise InputError("context", f"{outside}", needed, "choose others")
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        folders = {format: Path(folder) / format for format in store.FORMATS}
        edges = contexts(decoder.options.max_seq_len)
        usual = [n for n in edges if max(batches) < n <= most]
        for n in tqdm(lengths or usual, desc="reuse", disable=not progress):
            sessions = [
                _session(decoder, folders, n, seq, max_new)
                for seq in range(batches[-1])
            ]
            for each, (cache, format) in product(decoders, CACHES):
                cell = ReuseCell(each.options.batch, cache, format, n)
                held = sessions[: cell.batch]
                cells.append(_checked(cell, each, folders[format], held, max_new))
    return cells


def reuse_gate(cells: list[ReuseCell]) -> gates.Gate:
    """The gate `reuse` over all cells; its reason names the first wrong one."""
    wrong = [cell for cell in cells if cell.verdict == gates.RED]
    faults = [
        f"{len(wrong)} of {len(cells)} cells; batch {cell.batch}, {cell.cache}, "
        f"{cell.format}, context {cell.context}: {cell.reason}"
        for cell in wrong[:1]
    ]
    same = "every restored cache continues as its sequence does alone"
    return gates.none("reuse", faults, f"{same} ({len(cells)} cells)")


def _session(
    decoder: Decoder, folders: dict[str, Path], n: int, seq: int, max_new: int
) -> Session:
    """Runs a seeded prompt of `n` tokens, or `seq` fewer where positions may differ, and
    saves it in every format."""
    length = n if decoder.options.kv_write == "slice" else n - seq
    rng = np.random.default_rng([0, n, seq])
    ids = rng.integers(0, decoder.manifest.dims.V, length).tolist()
    records = {"fp16": list(decoder.stream(ids, max_new, stop=()))}
    decoder.begin()
    decoder.prefill(ids[:-1])
    before = decoder.snapshot()
    decoder.decode_one_token(ids[-1])
    stored, name = decoder.snapshot(), f"{n}-{seq}"
    if not all(map(is_cache, before.states)):
        stored = before  # a recurrent state does not go back by a token
    kept = {}
    for format, folder in folders.items():
        store.save(folder, name, stored, format)
        kept[format] = store.load(folder, name)
    rounded = kept["q4"].trim(stored.offset - before.offset)
    records["q4"] = list(decoder.stream(ids[-1:], max_new, after=rounded, stop=()))
    return Session(name, ids, before, kept, records)


def _checked(
    cell: ReuseCell,
    decoder: Decoder,
    folder: Path,
    sessions: list[Session],
    max_new: int,
) -> ReuseCell:
    """The cell with its results; whatever is raised makes it RED."""
    limits = [max_new] * len(sessions)
    if len(sessions) > 1:
        limits[0] //= 2  # one sequence ends before the others
    try:
        after, prompts = None, [session.ids for session in sessions]
        if cell.cache != "cold":
            after = [_restored(cell, decoder, folder, each) for each in sessions]
            prompts = [ids[-1:] for ids in prompts]
        records = [[] for _ in sessions]
        for record in decoder.stream(prompts, limits, after=after, stop=()):
            records[record.seq].append(record)
        apart = max(map(_apart, records, sessions, limits, [cell.format] * len(limits)))
        if after:  # decoding leaves the stored entry as it was
            for session in sessions:
                _restored(cell, decoder, folder, session)
    except Exception as problem:  # a fault may raise anything
        return replace(cell, verdict=gates.RED, reason=str(problem))
    limit = LOGITS[decoder.arithmetic]
    if apart <= limit:
        return replace(cell, apart=apart)
    reason = f"logits are {apart:.2g} apart, at most {limit:g} allowed"
    return replace(cell, verdict=gates.RED, apart=apart, reason=reason)


def _restored(
    cell: ReuseCell, decoder: Decoder, folder: Path, session: Session
) -> Snapshot:
    """The snapshot of a prompt, from its file or from memory; refuses one that differs
    from the sequence before the prompt's last token."""
    if cell.cache == "warm":
        snapshot, rest = store.find(folder, session.ids, decoder.identity)
    else:
        snapshot = session.kept[cell.format]
        snapshot = snapshot.trim(snapshot.offset - len(session.before.ids))
        rest = session.ids[snapshot.offset :]
    if (snapshot.ids, rest) != (session.before.ids, session.ids[-1:]):
        found = f"{snapshot.offset} tokens, {len(rest)} left"
        raise ValueError(f"prompt {session.name}: restored {found}")
    for name, cold in session.before.states.items():
        restored = snapshot.states[name]
        rows = min(cold.shape[-2], restored.shape[-2])  # a ring may hold more
        restored, cold = (np.float32(x[..., -rows:, :]) for x in (restored, cold))
        allowed = np.zeros_like(cold)
        if cell.format == "q4" and is_cache(name):
            allowed = _half_step(cold)
        wrong = ~(np.abs(restored - cold) <= allowed)
        if wrong.any():
            raise ValueError(f"{name}: {wrong.sum()} of {wrong.size} values differ")
    return snapshot


def _half_step(rows: np.ndarray) -> np.ndarray:
    """The error [..., D] that four bits may cause: half a step of each group along D,
    and the rounding of scale and lowest value to fp16."""
    groups = rows.reshape(*rows.shape[:-1], -1, store.group(rows.shape[-1]))
    step = np.ptp(groups, -1, keepdims=True) / 15
    return (0.504 * step + 2e-3 * np.abs(groups)).reshape(rows.shape)


def _apart(records: list[Record], session: Session, limit: int, format: str) -> float:
    """The largest relative RMS between the logits of two runs, as far as both have the
    same tokens."""
    if len(records) != limit:
        raise ValueError(f"{len(records)} tokens, {limit} expected")
    distances = []
    for own, alone in zip(records, session.records[format]):
        distances.append(metrics.relative_rms(alone.logits, own.logits))
        if own.token != alone.token:  # the logits of these two decide
            break
    return float(np.max(distances))
