"""Perplexity of a bundle over a text of any length, and its distance from Hugging
Face's model.

In: a decoder, token ids, and what to compare with. Out: one row per scored token. The
text is read in windows as in transformers' documented loop for strided perplexity: a
window begins every `stride` tokens and scores the tokens that no window before it has
scored. Logits of one window (of a batch) are in memory at a time; the rows of finished
windows are in a file, from which an interrupted evaluation goes on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from workbench.check.compare import log_softmax
from workbench.check.golden import check_exported_from
from workbench.check.hf import Reference, check_ids
from workbench.check.validate import summarize_kl
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.files import check_regular, write_whole
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar

EVALUATION_FORMAT = 3  # of the stored rows: raised when what they hold changes
ROW = ("nll", "golden_nll", "kl", "same_top")
# run through Hugging Face's model for each reading of its weights
REFERENCE_TOKENS = 2048
MIN_WINDOWS = 8  # fewer say too little of how windows differ for an interval
RESAMPLES = 1000

Span = tuple[int, int, int]


def windows(n: int, window: int, stride: int) -> list[Span]:
    """(begin, first, end) of every window over n tokens: it reads the tokens from
    `begin` to before `end` and scores those from `first` on. Every token but number 0
    is scored once."""
    begins = range(0, max(n - window, 0) + stride, stride)
    return [(b, b - stride + window if b else 1, min(b + window, n)) for b in begins]


def evaluate(
    decoder: Decoder,
    ids: Sequence[int],
    reference: Checkpoint | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    folder: Path,
) -> dict:
    """Perplexity of the bundle that `decoder` runs over `ids`, and of Hugging Face's
    model.

    Args:
        reference: the checkpoint, whose model is run on its own weights; None: the
            bundle alone.
        window: tokens of a window (default: max_seq_len), at least 2.
        stride: tokens from one window's begin to the next (default: half a window).
        folder: where rows of finished windows are stored.

    Returns:
        tokens (scored), windows, resumed (windows that were stored before), perplexity,
        golden_perplexity, perplexity_ratio, kl (nats), same_top, and 95% intervals of
        these means by a bootstrap over windows; null where there is no reference or are
        too few windows, and what needs logits where packages give top tokens alone
        (then `not_run` says so).

    Raises:
        InputError: a window longer than max_seq_len, fewer than two tokens, another
            checkpoint than the bundle's.
    """
    ids = check_ids(ids, decoder.manifest.dims.V)
    if reference:
        check_exported_from(reference, decoder.bundle)
    spans = windows(len(ids), *_check_sizes(decoder, len(ids), window, stride))
    key = [
        EVALUATION_FORMAT,
        decoder.bundle.identity,
        reference and reference.sha256,
        hashlib.sha256(ids.tobytes()).hexdigest(),
        spans[:2],
        [decoder.runtime, decoder.precision, decoder.compute_units],
        version("transformers"),
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    path = folder / f"{decoder.bundle.root.name}-{digest}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    ends = [end - 1 for _, _, end in spans]  # rows up to each window's end
    rows = _stored_rows(path, ends, bool(reference))
    resumed = ends.index(len(rows)) + 1 if len(rows) else 0
    model = reference and Reference(reference)
    stored = resumed
    try:
        with bar(total=len(spans), initial=resumed, unit="window") as shown:
            for group in _groups(spans[resumed:]):
                rows = np.concatenate([rows, *_score_group(decoder, model, ids, group)])
                write_whole(path, partial(np.save, arr=rows))
                stored += len(group)
                shown.update(len(group))
    except (KeyboardInterrupt, OSError, MemoryError) as problem:
        text = f"{stored} of {len(spans)} windows kept; the same command resumes"
        problem.add_note(text)
        raise
    result = summarize(rows, spans) | {"resumed": resumed}
    if not decoder.manifest.gives_logits:
        reason = "the argmax is inside, so that no logits come out"
        result["not_run"] = f"perplexity and KL: {reason}"
    return result


def _stored_rows(path: Path, ends: list[int], compared: bool) -> np.ndarray:
    """The rows [n, 4] of finished windows in a file, none where it is missing, torn, or
    holds something else.

    Args:
        ends: the numbers of rows that windows end at.
        compared: whether rows have the reference's figures."""
    empty = np.empty((0, len(ROW)))
    try:
        check_regular(path, 1024 + empty.itemsize * len(ROW) * ends[-1])
        rows = np.load(path)
    except (OSError, ValueError, EOFError):
        return empty
    form = rows.dtype == empty.dtype and rows.ndim == 2 and rows.shape[1] == len(ROW)
    if not form or len(rows) not in ends or np.isinf(rows).any():
        return empty
    if (np.isfinite(rows[:, [1, 3]]) != compared).any() or (rows[:, :2] < 0).any():
        return empty
    return rows


def _score_group(
    decoder: Decoder, model: Reference | None, ids: np.ndarray, group: list[Span]
) -> Iterator[np.ndarray]:
    """The rows of each window of a group."""
    sequences = [ids[begin : end - 1].tolist() for begin, _, end in group]
    if model:
        hidden = model.last_hidden(np.array(sequences), use_cache=False)
    B = decoder.options.batch
    golden = None
    for i, (_, first, end) in enumerate(group):
        if i % B == 0:
            part = sequences[i : i + B]
            part += [part[-1]] * (B - len(part))
            logits = decoder.sequence_logits(part, end - first)
        if model:
            golden = model.logits(hidden[i, first - end :]).numpy()
        yield _score(ids[first:end], logits[i % B], golden)


def _groups(spans: list[Span]) -> Iterator[list[Span]]:
    """Windows of one shape, as many as Hugging Face's model reads at a time."""
    shapes = groupby(spans, lambda span: (span[2] - span[0], span[2] - span[1]))
    for (n, _), alike in shapes:
        group = list(alike)
        count = max(1, REFERENCE_TOKENS // n)
        yield from (group[i : i + count] for i in range(0, len(group), count))


def _score(
    targets: np.ndarray, actual: np.ndarray, golden: np.ndarray | None
) -> np.ndarray:
    """`ROW` [n, 4], float64, of tokens that logits [n, V] predict; nan where there is
    no golden, and where only the top token's logit is known (the others are −inf)."""
    rows = np.full((len(targets), len(ROW)), np.nan)
    # one row of the vocabulary at a time fits the cache
    for i, target in enumerate(targets):
        known = not np.isneginf(actual[i]).any()
        if known:
            q = log_softmax(actual[i])
            rows[i, 0] = -q[target]
        if golden is not None:
            p = log_softmax(golden[i])
            rows[i, 1] = -p[target]
            rows[i, 3] = np.argmax(golden[i]) == np.argmax(actual[i])
            if known:
                rows[i, 2] = (np.exp(p) * (p - q)).sum()
    return rows


def summarize(rows: np.ndarray, spans: Sequence[Span]) -> dict:
    """The figures of `evaluate` from the rows [n, 4] of its windows."""
    starts = [first - 1 for _, first, _ in spans]
    result = {"tokens": len(rows), "windows": len(spans)}
    for name, value in _figures(rows.mean(0)).items():
        result[name] = None if np.isnan(value) else float(value)
    known = result.pop("kl_mean") is not None
    result |= {"kl": summarize_kl(rows[:, 2]) if known else None, "intervals": None}
    if len(spans) >= MIN_WINDOWS:
        draws = np.random.default_rng(0).integers(
            0, len(spans), (RESAMPLES, len(spans))
        )
        counts = np.diff([*starts, len(rows)])[draws].sum(1)
        means = np.add.reduceat(rows, starts)[draws].sum(1).T / counts
        result["intervals"] = {
            name: np.percentile(values, [2.5, 97.5]).tolist()
            for name, values in _figures(means).items()
            if not np.isnan(values).any()
        }
    return result


def _figures(means: np.ndarray) -> dict[str, np.ndarray]:
    """Named figures of mean rows [4, …]."""
    nll, golden_nll, kl, same = means
    return {
        "perplexity": np.exp(nll),
        "golden_perplexity": np.exp(golden_nll),
        "perplexity_ratio": np.exp(nll - golden_nll),
        "same_top": same,
        "kl_mean": kl,
    }


def _check_sizes(
    decoder: Decoder, n: int, window: int | None, stride: int | None
) -> tuple[int, int]:
    """Window and stride with their defaults."""
    S = decoder.options.max_seq_len
    if n < 2:
        raise InputError("text", f"{n} tokens", "at least two", "give a longer text")
    window = S if window is None else window
    if not 2 <= window <= S:
        needed = f"at least 2 and at most max_seq_len = {S}"
        step = "choose a shorter one, or export with a larger --max-seq-len"
        raise InputError("--window", f"{window} tokens", needed, step)
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        needed = (
            f"1 … {window - 1}, so that every token follows another one in its window"
        )
        step = "choose a stride below the window"
        raise InputError("--stride", str(stride), needed, step)
    return window, stride
