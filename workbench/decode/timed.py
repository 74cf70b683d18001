"""Decodes one prompt and returns tokens, text and times, as `workbench generate` prints
them."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from workbench import paths
from workbench.decode import checks
from workbench.decode.checks import whole_number
from workbench.decode.decoder import GREEDY, Decoder
from workbench.decode.sampling import Sampling
from workbench.decode.times import Times
from workbench.decode.tokenizer import load_tokenizer
from workbench.errors import InputError
from workbench.files import write_whole


def timed_generation(
    decoder: Decoder,
    ids: list[int],
    max_new: int,
    logits: Path | None = None,
    sampling: Sampling = GREEDY,
    on_text: Callable[[str], None] | None = None,
) -> dict:
    """Decodes one prompt and measures it.

    Args:
        logits: file for [max_new + 1, V] float32: row 0 after the prompt, then one row
            per generated token.
        on_text: called with the text of each token as soon as it is decoded, where the
            bundle has a tokenizer; the pieces add up to `text`.

    Returns:
        The JSON of `workbench generate`. First calls compile and allocate, and no figure
        contains them: the first call of each width of the prompt runs once more, on
        separate sequences, before the prompt is timed (`prefill.first_calls`,
        `first_calls_ms`); the first step after the prompt is in `samples_ms` alone
        (`decode.first_calls`), and the figures of `decode` are None without another
        step.

    Raises:
        InputError: a prompt that cannot be decoded, a file that cannot be written;
            before any token is decoded.
    """
    max_new = whole_number(max_new, "new tokens")
    _check_options(decoder, logits, sampling)
    tokenizer = None
    if (decoder.bundle.tokenizer / "tokenizer.json").exists():
        from tokenizers.decoders import DecodeStream

        tokenizer = load_tokenizer(decoder.bundle.tokenizer)
        pieces = DecodeStream(skip_special_tokens=False)
    eos = decoder.manifest.tokens.eos
    stream_limit, stop = max_new, eos
    if logits:
        # one step more, for the logits after the last token, which may be an eos
        stream_limit, stop = max_new + 1, ()
    _check_length(decoder, ids, stream_limit)
    first_calls_ms = _warm_up(decoder, ids)
    tokens, times, rows = [], [], []
    prefill_ms = None
    start = time.perf_counter()
    for record in decoder.stream(ids, stream_limit, stop=stop, sampling=sampling):
        if prefill_ms is None:  # the first record comes after the prefill
            prefill_ms = (time.perf_counter() - start) * 1e3
        if logits:
            rows.append(record.logits)
        has_ended = bool(tokens) and tokens[-1] in eos
        if has_ended or len(tokens) == max_new:
            break
        tokens.append(record.token)
        times.append(record.times)
        if tokenizer and on_text:
            text = pieces.step(tokenizer.backend_tokenizer, record.token)
            if text:  # none while a character is incomplete
                on_text(text)
    if logits:
        write_whole(logits, partial(np.save, arr=np.stack(rows).astype(np.float32)))
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens) if tokenizer else None,
        "prefill": _prefill_times(decoder, len(ids), prefill_ms, first_calls_ms),
        "decode": {"tokens": len(tokens)} | _step_times(times[1:]),
        "runtime": decoder.runtime,
        "precision": None if decoder.is_device else decoder.precision,
    }


def _check_length(decoder: Decoder, ids: list[int], new: int) -> None:
    """Raises the InputError of `Decoder.stream` for a prompt that cannot be decoded,
    before anything runs."""
    if decoder.options.batch == 1:
        prompts = checks.prompts(ids, 1, decoder.manifest.dims.V)
        decoder.host.check([0], [len(prompts[0]) + max(new - 1, 0)])


def _warm_up(decoder: Decoder, ids: list[int]) -> list[float]:
    """Runs the first call of each width that the prompt needs on new sequences;
    returns the milliseconds of each."""
    if decoder.options.batch > 1:
        return []
    options = decoder.options
    sizes = [end - start for start, end in options.tiling.calls(len(ids))]
    size_of_width = {options.tiling.width(size): size for size in sizes}
    durations_ms = []
    for size in size_of_width.values():
        start = time.perf_counter()
        decoder.new_sequences().prefill(ids[:size])
        durations_ms.append((time.perf_counter() - start) * 1e3)
    return durations_ms


def _prefill_times(
    decoder: Decoder, count: int, ms: float | None, first_calls_ms: list[float]
) -> dict:
    """The field `prefill` of `timed_generation`.

    Args:
        count: tokens of the prompt.
        ms: of the prefill; None: no token was decoded.
        first_calls_ms: of the calls of `_warm_up`.
    """
    return {
        "tokens": count,
        "calls": len([*decoder.options.tiling.calls(count)]),
        "ms": ms,
        "tokens_per_s": count / ms * 1e3 if ms else None,
        "first_calls": len(first_calls_ms),
        "first_calls_ms": sum(first_calls_ms),
    }


def _step_times(times: list[Times]) -> dict:
    """The milliseconds of all decoding steps (`samples_ms`); of the steps after the
    first one the tokens per second and the medians of the parts in milliseconds, None
    where there is only one step."""
    samples = [t.total for t in times]
    figures = dict.fromkeys(("tokens_per_s", "layer_ms", "head_ms"))
    if later := times[1:]:
        figures["tokens_per_s"] = 1e3 * len(later) / sum(samples[1:])
        parts = [[part.ms for part in t.parts] for t in later]
        *layers, head = np.median(parts, axis=0).tolist()
        figures |= {"layer_ms": layers, "head_ms": head}
    first_calls = len(times) - len(later)
    return figures | {"first_calls": first_calls, "samples_ms": samples}


def _check_options(decoder: Decoder, logits: Path | None, sampling: Sampling) -> None:
    """Raises an InputError for an option that needs logits where the packages give
    none, and for a file of logits that cannot be written."""
    options = {"--logits": logits, "--temperature": sampling.temperature}
    for option, value in options.items():
        if value and not decoder.manifest.gives_logits:
            actual = "packages with the argmax inside"
            needed = "packages that put out logits"
            raise InputError(option, actual, needed, "leave it out")
    if logits:
        paths.prepare_output("--logits", logits)
