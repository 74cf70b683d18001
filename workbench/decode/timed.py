"""Decodes one prompt and returns tokens, text and times, as `workbench generate` prints
them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from workbench import paths
from workbench.decode.checks import check_prompts, whole_number
from workbench.decode.decoder import GREEDY, Decoder
from workbench.decode.sampling import Sampling
from workbench.decode.times import Times
from workbench.decode.tokenizer import has_tokenizer, load_tokenizer
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
    if has_tokenizer(decoder.bundle.tokenizer):
        tokenizer = load_tokenizer(decoder.bundle.tokenizer)
    on_token = None
    if tokenizer and on_text:
        on_token = _text_writer(tokenizer, on_text)
    # for logits one step more, for those after the last token
    _check_length(decoder, ids, max_new + 1 if logits else max_new)
    first_calls_ms = _warm_up(decoder, ids)
    keeps_logits = logits is not None
    decoded = _decode(decoder, ids, max_new, sampling, keeps_logits, on_token)
    if keeps_logits:
        rows = np.stack(decoded.logits).astype(np.float32)
        write_whole(logits, partial(np.save, arr=rows))
    tokens = decoded.tokens
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens) if tokenizer else None,
        "prefill": _prefill_times(
            decoder, len(ids), decoded.prefill_ms, first_calls_ms
        ),
        "decode": {"tokens": len(tokens)} | _step_times(decoded.step_times),
        "runtime": decoder.runtime,
        "precision": None if decoder.is_device else decoder.precision,
    }


@dataclass
class Decoded:
    """What one prompt gave.

    Attributes:
        tokens: the new tokens.
        step_times: of the steps that gave the logits of every new token but the first,
            whose logits are the prefill's.
        logits: [V] after the prompt and after each new token, if they are kept.
        prefill_ms: None where no token was decoded.
    """

    tokens: list[int] = field(default_factory=list)
    step_times: list[Times] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    prefill_ms: float | None = None


def _decode(
    decoder: Decoder,
    ids: list[int],
    max_new: int,
    sampling: Sampling,
    keeps_logits: bool,
    on_token: Callable[[int], None] | None,
) -> Decoded:
    """Decodes up to `max_new` tokens, or to an end-of-sequence token.

    Args:
        keeps_logits: also those after the last token. They take one step more, whose
            token is not a new one.
        on_token: called with each token.
    """
    eos = decoder.manifest.tokens.eos
    limit, stop = max_new, eos
    if keeps_logits:
        # A record has the logits from which its token was picked. The logits after the
        # last new token come with one more record, so `stream` must yield that record:
        # the loop below keeps its logits, drops its token and ends.
        limit, stop = max_new + 1, ()
    decoded = Decoded()
    tokens = decoded.tokens
    start = time.perf_counter()
    for record in decoder.stream(ids, limit, stop=stop, sampling=sampling):
        if decoded.prefill_ms is None:  # the first record comes after the prefill
            decoded.prefill_ms = (time.perf_counter() - start) * 1e3
        if keeps_logits:
            decoded.logits.append(record.logits)
        has_last_token = len(tokens) == max_new or (tokens and tokens[-1] in eos)
        if has_last_token:
            break
        if tokens:
            decoded.step_times.append(record.times)
        tokens.append(record.token)
        if on_token:
            on_token(record.token)
    return decoded


def _text_writer(tokenizer, on_text: Callable[[str], None]) -> Callable[[int], None]:
    """A function of each token in turn that calls `on_text` with its text."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)

    def write(token: int) -> None:
        text = stream.step(tokenizer.backend_tokenizer, token)
        if text:  # none while a character is incomplete
            on_text(text)

    return write


def _check_length(decoder: Decoder, ids: list[int], new: int) -> None:
    """Raises the InputError of `Decoder.stream` for a prompt that cannot be decoded,
    before anything runs."""
    if decoder.options.batch == 1:
        (prompt,) = check_prompts(ids, 1, decoder.manifest.dims.V)
        # the last new token does not run
        decoder.host.check_positions([0], [len(prompt) + max(new - 1, 0)])


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
