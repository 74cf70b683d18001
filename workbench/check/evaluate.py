"""Perplexity of a bundle over a text of any length, and its distance from Hugging
Face's model.

The text is read in windows as in transformers' documented loop for strided perplexity:
a window begins every `stride` tokens and scores the tokens that no earlier window has
scored. All calls of a window pass one shard before the next one begins, so that each
weight is read once for many of them; on a device the calls run one after another, as in
decoding. The scores of finished windows are stored in a file, from which an
interrupted evaluation resumes."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from workbench.bundle.names import MATRIX_STATE, X
from workbench.check.compare import resampled_means
from workbench.check.fidelity import summarize_kl
from workbench.check.golden import check_exported_from
from workbench.check.hf import Reference, check_ids
from workbench.check.windows import Span, check_sizes, windows
from workbench.decode import Decoder
from workbench.decode.shards import ShardCall
from workbench.errors import InputError
from workbench.files import check_regular, write_whole
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, stage, tick

EVALUATION_FORMAT = 4  # of the stored scores: raised when their figures may change
# the columns of scores [n, 4] of n tokens, as the stored files have them: nats by the
# bundle and by Hugging Face's model, KL in nats, and whether both have the same most
# probable token. nan: GOLDEN_NLL and SAME_TOP without a checkpoint, NLL without logits
# (the package outputs the top token alone), KL in both cases
COLUMN_COUNT = 4
NLL, GOLDEN_NLL, KL, SAME_TOP = range(COLUMN_COUNT)
# Tokens that run through Hugging Face's model for each reading of its weights.
REFERENCE_TOKENS = 2048
# Families whose logits with torch's fused attention are those of eager attention, which
# a test compares. Eager attention writes the scores of a window out.
SDPA_FAMILIES = frozenset(
    """gemma3_text granitemoehybrid hunyuan_v1_dense lfm2 llama ministral3 mistral olmo2
    olmo3 phi3 qwen2 qwen3 qwen3_5_text smollm3""".split()
)
COLUMNS = 256  # of a call, where a program takes any number
# Inputs of calls that pass the shards together: bounds memory, whatever the window.
SEGMENT_BYTES = 1 << 27
SCORED_NUMBERS = 1 << 24  # logits of each side in memory at a time
Report = Callable[[str], None]
"""A function that is called with what is computed next, for the line of a bar."""
MIN_WINDOWS = 8  # fewer say too little of how windows differ for an interval


def evaluate(
    decoder: Decoder,
    ids: Sequence[int],
    checkpoint: Checkpoint | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    folder: Path,
) -> dict:
    """Perplexity of the bundle that `decoder` runs over `ids`, and of Hugging Face's
    model.

    Args:
        checkpoint: Hugging Face's model is run on its weights; None: the bundle alone.
        window: tokens of a window (default: max_seq_len), at least 2.
        stride: tokens from one window's begin to the next (default: half a window).
        folder: where the scores of finished windows are stored.

    Returns:
        tokens (scored), windows, resumed (windows that were stored before), perplexity,
        golden_perplexity, perplexity_ratio, kl (nats), same_top, and 95% intervals of
        these means by a bootstrap over windows. Figures are null without a
        checkpoint, intervals with too few windows, and perplexity and KL for packages
        that output the top token alone (then `not_run` gives the reason).

    Raises:
        InputError: a window longer than max_seq_len, fewer than two tokens, another
            checkpoint than the bundle's.
    """
    ids = check_ids(ids, decoder.manifest.dims.V)
    if checkpoint is not None:
        check_exported_from(checkpoint, decoder.bundle)
    sizes = check_sizes(decoder.options.max_seq_len, window, stride)
    if len(ids) < 2:
        actual, needed = f"{len(ids)} tokens", "at least two"
        raise InputError("text", actual, needed, "give a longer text")
    spans = windows(len(ids), *sizes)
    key = [
        EVALUATION_FORMAT,
        decoder.bundle.identity,  # with it the hash of every file
        call_columns(decoder),
        None if checkpoint is None else checkpoint.sha256,
        hashlib.sha256(ids.tobytes()).hexdigest(),
        spans[:2],
        [decoder.runtime, decoder.precision, decoder.compute_units],
        version("transformers"),
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    path = folder / f"{decoder.bundle.root.name}-{digest}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    counts = [span.end - 1 for span in spans]  # of scores up to each window's end
    scores = _stored_scores(path, counts, checkpoint is not None)
    resumed = counts.index(len(scores)) + 1 if len(scores) else 0
    reference = None if checkpoint is None else open_reference(checkpoint)
    stored = resumed
    try:
        stage("evaluate: scoring windows")
        with bar(total=len(spans), initial=resumed, unit="window") as progress:

            def report(text: str) -> None:
                progress.set_postfix_str(text)
                tick(f"evaluate: {stored} of {len(spans)} windows scored; {text}")

            for group in _groups(spans[resumed:]):
                parts = _score_group(decoder, reference, ids, group, report)
                for window_scores in parts:
                    scores = np.concatenate([scores, window_scores])
                    write_whole(path, partial(np.save, arr=scores))
                    stored += 1
                    progress.update()
    except (KeyboardInterrupt, OSError, MemoryError) as problem:
        text = f"{stored} of {len(spans)} windows kept; the same command resumes"
        problem.add_note(text)
        raise
    result = summarize(scores, spans) | {"resumed": resumed}
    if not decoder.manifest.gives_logits:
        reason = "the argmax is inside, so that no logits come out"
        result["not_run"] = f"perplexity and KL: {reason}"
    return result


def open_reference(checkpoint: Checkpoint) -> Reference:
    """Hugging Face's model on its own weights, with the fastest attention that gives the
    logits of eager attention."""
    is_equal = checkpoint.config.model_type in SDPA_FAMILIES
    return Reference(checkpoint, attention="sdpa" if is_equal else "eager")


def _stored_scores(path: Path, counts: list[int], has_reference: bool) -> np.ndarray:
    """The scores [n, 4] of finished windows in a file, none where it is missing, torn,
    or holds something else.

    Args:
        counts: the numbers of scores that whole windows have.
        has_reference: whether scores have the figures of Hugging Face's model.
    """
    empty = np.empty((0, COLUMN_COUNT))
    try:
        check_regular(path, 1024 + empty.itemsize * COLUMN_COUNT * counts[-1])
        scores = np.load(path)
    except (OSError, ValueError, EOFError):
        return empty
    if scores.dtype != empty.dtype or scores.shape[1:] != empty.shape[1:]:
        return empty
    if len(scores) not in counts or np.isinf(scores).any():
        return empty
    is_compared = np.isfinite(scores[:, [GOLDEN_NLL, SAME_TOP]])
    has_negative = (scores[:, [NLL, GOLDEN_NLL]] < 0).any()
    if (is_compared != has_reference).any() or has_negative:
        return empty
    return scores


def _score_group(
    decoder: Decoder,
    reference: Reference | None,
    ids: np.ndarray,
    group: list[Span],
    report: Report,
) -> Iterator[np.ndarray]:
    """The scores [n, 4] of each window of a group, all of one shape. Hugging Face's model
    runs over the whole group before the first of them; the scores of a window follow as
    soon as the bundle has run it.

    Args:
        report: is called with each layer that begins.
    """
    # the last token of a window is predicted, and predicts none in it
    sequences = [ids[span.begin : span.end - 1].tolist() for span in group]
    count = group[0].end - group[0].first  # scored tokens of each window
    reference_hidden = None  # [windows, count, C]
    if reference:
        with _reported_layers(reference, len(group), report):
            hidden = reference.last_hidden(np.array(sequences), use_cache=False)
        reference_hidden = hidden[:, -count:]
    B = decoder.options.batch
    for start in range(0, len(group), B):
        batch = sequences[start : start + B]
        spans = group[start : start + B]
        targets = [ids[span.first : span.end] for span in spans]
        outputs = last_outputs(decoder, fill_batch(batch, B), count, report)
        scores = [[] for _ in batch]
        for columns in _scored_slices(count, decoder.manifest.dims.V):
            logits = decoder.logits(outputs[:, :, columns])
            for seq in range(len(batch)):
                reference_logits = None
                if reference:
                    expected_hidden = reference_hidden[start + seq, columns]
                    reference_logits = reference.logits(expected_hidden).numpy()
                part = _score(targets[seq][columns], logits[seq], reference_logits)
                scores[seq].append(part)
        yield from map(np.concatenate, scores)


@contextmanager
def _reported_layers(
    reference: Reference, count: int, report: Report
) -> Iterator[None]:
    """Reports each layer of Hugging Face's model that begins within the block. A pass over
    `count` windows takes minutes in a large model."""
    layers = reference.base.layers
    windows_read = "1 window" if count == 1 else f"{count} windows"

    def report_layer(layer, arguments) -> None:
        place = f"layer {layer.index + 1} of {len(layers)}"
        report(f"Hugging Face's model, {windows_read}: {place}")

    handles = [layer.register_forward_pre_hook(report_layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fill_batch(sequences: list[list[int]], B: int) -> list[list[int]]:
    """At most B sequences, the last of them repeated to a batch of B."""
    return sequences + [sequences[-1]] * (B - len(sequences))


def _scored_slices(count: int, V: int) -> Iterator[slice]:
    """Slices of `count` tokens whose logits are at most `SCORED_NUMBERS`, or one
    token's."""
    size = max(1, SCORED_NUMBERS // V)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def call_columns(decoder: Decoder) -> int:
    """The most tokens of a call of an evaluation.

    The portable runtime takes more columns than t_max where a program has any number of
    them, and gives the same values up to the order of sums. Others stay at t_max: fixed
    shapes and functions; slice writes, which move every sequence of a batch alike;
    rings, whose rows are sized for t_max; matrix states, which are rounded once per
    call, so that wider calls round them less often than decoding does."""
    options, shards = decoder.options, decoder.manifest.shards
    states = [state for shard in shards for state in shard.states.items()]
    is_any_number = not (decoder.is_device or options.plugin or options.fixed_sizes)
    has_rings = any(entry.ring for _, entry in states)
    has_matrices = any(name.endswith(MATRIX_STATE) for name, _ in states)
    if is_any_number and options.kv_write == "mask" and not (has_rings or has_matrices):
        return max(COLUMNS, options.t_max)
    return options.t_max


def last_outputs(
    decoder: Decoder,
    sequences: list[list[int]],
    count: int,
    report: Report | None = None,
) -> np.ndarray:
    """Outputs [B, C, count] of the last layer shard at the last `count` tokens of fresh
    sequences of one length, one for each of the batch: hidden states, or the logits
    where the packages contain the head.

    Args:
        report: is called with each shard that begins; on a device, whose calls run one
            after another through all shards, it is called once.
    """
    report = report or _report_nothing
    report("bundle")
    if decoder.is_device:
        calls = decoder.new_sequences().advance_calls(sequences)
        parts = [hidden[:, :, : len(chunk[0])] for chunk, hidden in calls]
        return np.concatenate(parts, axis=2)[:, :, -count:]
    states = [model.make_state() for model in decoder.layer_shards]
    first = len(sequences[0]) - count
    outputs = []
    for segment in _segments(decoder, sequences):
        inputs = [call.inputs for call in segment]
        for index, (model, state) in enumerate(zip(decoder.layer_shards, states)):
            report(f"bundle: shard {index + 1} of {len(states)}")
            calls = [
                ShardCall(values, call.counts, state)
                for values, call in zip(inputs, segment)
            ]
            inputs = decoder.run_calls(model, calls)
        for call, results in zip(segment, inputs):
            if call.end > first:
                x = results[X].reshape(len(sequences), -1, call.width)
                outputs.append(x[:, :, : call.end - call.start])
    return np.concatenate(outputs, axis=2)[:, :, -count:]


def _report_nothing(text: str) -> None:
    """A `Report` without a bar."""


@dataclass(frozen=True)
class WindowCall:
    """One call over the tokens [start, end) of every sequence: `width` columns, and the
    `inputs` of the first shard."""

    start: int
    end: int
    width: int
    inputs: dict[str, np.ndarray]

    @property
    def counts(self) -> np.ndarray:
        """[B] tokens of each sequence."""
        B = len(self.inputs[X])
        return np.full(B, self.end - self.start)


def _segments(
    decoder: Decoder, sequences: list[list[int]]
) -> Iterator[list[WindowCall]]:
    """The calls of fresh sequences of one length, in groups whose inputs take about
    `SEGMENT_BYTES`."""
    tiling = decoder.options.tiling
    segment, size = [], 0
    for start, end in tiling.calls(len(sequences[0]), call_columns(decoder)):
        chunk = [ids[start:end] for ids in sequences]
        width = tiling.width(end - start)
        inputs = decoder.inputs(np.full(len(sequences), start), chunk, width)
        segment.append(WindowCall(start, end, width, inputs))
        size += sum(array.nbytes for array in inputs.values())
        if size >= SEGMENT_BYTES:
            yield segment
            segment, size = [], 0
    if segment:
        yield segment


def _groups(spans: list[Span]) -> Iterator[list[Span]]:
    """Consecutive windows of one shape, in groups that run through Hugging Face's model
    together."""

    def shape(span: Span) -> tuple[int, int]:
        """Tokens that a window reads, and that it scores."""
        return span.end - span.begin, span.end - span.first

    for (n, _), spans_of_shape in groupby(spans, shape):
        group = list(spans_of_shape)
        count = max(1, REFERENCE_TOKENS // n)
        yield from (group[i : i + count] for i in range(0, len(group), count))


def _score(
    targets: np.ndarray, logits: np.ndarray, reference_logits: np.ndarray | None
) -> np.ndarray:
    """The scores [n, 4] float64 of tokens.

    Args:
        targets: [n], their ids.
        logits: [n, V], the bundle's that predict them. All but the top one are −inf
            where the package outputs the top token alone; NLL and KL are then nan.
        reference_logits: [n, V], of Hugging Face's model; None: there is no model, and
            all scores that need it are nan.
    """
    scores = np.full((len(targets), COLUMN_COUNT), np.nan)
    # one row of the vocabulary at a time fits the cache
    for i, target in enumerate(targets):
        # logits less the largest one, whose exponentials do not overflow; log q is
        # `shifted` − `log_sum`
        shifted = np.float64(logits[i])
        shifted -= shifted.max()
        has_logits = not np.isneginf(shifted).any()
        if has_logits:
            log_sum = np.log(np.exp(shifted).sum())
            scores[i, NLL] = log_sum - shifted[target]
        if reference_logits is None:
            continue
        reference_shifted = np.float64(reference_logits[i])
        reference_shifted -= reference_shifted.max()
        weights = np.exp(reference_shifted)
        total = weights.sum()  # p is `weights` / `total`
        scores[i, GOLDEN_NLL] = np.log(total) - reference_shifted[target]
        scores[i, SAME_TOP] = np.argmax(reference_shifted) == np.argmax(shifted)
        if has_logits:
            # KL = Σ p (log p − log q)
            mean_difference = weights @ (reference_shifted - shifted) / total
            nats = mean_difference - np.log(total) + log_sum
            # as in `compare.kl`: rounding may leave a KL near 0 just below it
            scores[i, KL] = np.maximum(nats, 0.0)
    return scores


def summarize(scores: np.ndarray, spans: Sequence[Span]) -> dict:
    """The figures of `evaluate` from the scores [n, 4] of its windows."""
    starts = [span.first - 1 for span in spans]  # of each window's scores
    result = {"tokens": len(scores), "windows": len(spans)}
    for name, value in _figures(scores.mean(0)).items():
        result[name] = None if np.isnan(value) else float(value)
    result["kl"] = result["intervals"] = None
    if result.pop("kl_mean") is not None:
        result["kl"] = summarize_kl(scores[:, KL])
    if len(spans) >= MIN_WINDOWS:
        counts = np.diff([*starts, len(scores)])
        means = resampled_means(np.add.reduceat(scores, starts), counts).T
        result["intervals"] = {
            name: np.percentile(values, [2.5, 97.5]).tolist()
            for name, values in _figures(means).items()
            if not np.isnan(values).any()
        }
    return result


def _figures(means: np.ndarray) -> dict[str, np.ndarray]:
    """The figures of mean scores [4, …] by name."""
    return {
        "perplexity": np.exp(means[NLL]),
        "golden_perplexity": np.exp(means[GOLDEN_NLL]),
        "perplexity_ratio": np.exp(means[NLL] - means[GOLDEN_NLL]),
        "same_top": means[SAME_TOP],
        "kl_mean": means[KL],
    }
