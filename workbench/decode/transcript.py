"""Decodes one prompt and returns tokens, text and times, as `workbench generate` prints
them."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from workbench import paths
from workbench.decode import checks
from workbench.decode.checks import whole_number
from workbench.decode.decoder import GREEDY, Decoder
from workbench.decode.sampling import Sampling
from workbench.decode.times import Times
from workbench.errors import InputError, one_line
from workbench.files import check_folder, write_whole

TEMPLATE_SECONDS = 10.0  # limit for a chat template; real ones take milliseconds


def load_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint or of a bundle's `tokenizer` folder. While no file
    of the folder changes, a process reads it once: a vocabulary of 262,144 takes a
    second.

    Raises:
        InputError: no tokenizer in the folder, or a damaged one.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        raise InputError(
            f"tokenizer {folder}",
            "no tokenizer.json",
            "the checkpoint's tokenizer",
            "give --prompt-ids instead of text, or add the tokenizer and export again",
        )
    check_folder(Path(folder), paths.LIMITS)
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    states = tuple((path.name, path.stat().st_mtime_ns) for path in files)
    return _read_tokenizer(Path(folder).resolve(), states)


@lru_cache(maxsize=4)
def _read_tokenizer(folder: Path, states: tuple[tuple[str, int], ...]):
    """The tokenizer of a folder whose files have these names and times of change."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # tokenizers raises nothing more precise
        raise InputError(
            f"tokenizer {folder}",
            one_line(problem),
            "a whole tokenizer.json",
            "run git lfs pull, and export again",
        ) from problem


def encode_text(folder: str | Path, text: str) -> list[int]:
    """Token ids of a text by the tokenizer in `folder`, with the special tokens that
    the tokenizer adds and no others. Where the text itself begins with the
    beginning-of-sequence token that the tokenizer adds, the token stands once."""
    tokenizer = load_tokenizer(folder)
    # Not verbose: the tokenizer would warn of texts longer than the model's context,
    # which are read in windows.
    ids = tokenizer.encode(text, verbose=False)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        return ids[1:]
    return ids


def text_of(folder: Path, ids: Sequence[int]) -> str:
    """The text of token ids without special tokens; the ids themselves where `folder`
    has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return ", ".join(map(str, ids))
    return load_tokenizer(folder).decode(ids, skip_special_tokens=True)


def unknown_share(folder: Path, ids: Sequence[int]) -> float:
    """The share of token ids that stand for text unknown to the tokenizer in `folder`;
    0 without one, or for one that knows every text."""
    if not (folder / "tokenizer.json").is_file():
        return 0.0
    unknown = load_tokenizer(folder).unk_token_id
    return sum(token == unknown for token in ids) / max(1, len(ids))


def token_labels(folder: Path | None, ids: Sequence[int]) -> list[str]:
    """The text of each token for an axis: white space visible, at most 12 characters;
    the id itself where `folder` has no tokenizer."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return [str(token) for token in ids]
    decode = load_tokenizer(folder).decode
    visible_space = str.maketrans(" \n\t", "·↵⇥")
    texts = [decode([int(token)]).translate(visible_space) for token in ids]
    return [text if len(text) <= 12 else f"{text[:11]}…" for text in texts]


def encode_chat(folder: str | Path, message: str) -> list[int]:
    """Token ids of a user's message in the chat template of the tokenizer in `folder`,
    up to where the model's answer begins.

    Raises:
        InputError: a tokenizer without such a template, or with one that cannot be
            rendered.
    """
    turns = [{"role": "user", "content": message}]
    return _render(folder, turns, add_generation_prompt=True, return_dict=False)


def end_of_answer(folder: str | Path) -> int | None:
    """The special token that the chat template of the tokenizer in `folder` writes
    behind a model's answer; None where it writes none.

    Raises:
        InputError: see `encode_chat`; a template that leaves the answer out.
    """
    answer = "Yes"
    turns = [{"role": "user", "content": "Is it?"}]
    turns.append({"role": "assistant", "content": answer})
    text = _render(folder, turns, tokenize=False)
    _, written, rest = text.rpartition(answer)
    if not written:
        subject = f"chat template of tokenizer {folder}"
        step = "check the template"
        raise InputError(subject, "leaves an answer out", "one that writes it", step)
    tokenizer = load_tokenizer(folder)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = tokenizer.encode(rest, add_special_tokens=False)
    return next((token for token in ids if token in special), None)


def _render(folder: str | Path, turns: list[dict[str, str]], **options):
    """The turns of a dialogue in the chat template of the tokenizer in `folder`, as
    token ids, or as text with `tokenize=False`.

    Raises:
        InputError: see `encode_chat`.
    """
    try:
        tokenizer = load_tokenizer(folder)
        with _time_limit(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(turns, **options)
    except InputError:
        raise
    # A template is a program, whose statements may raise anything; transformers raises
    # a ValueError where there is no template.
    except Exception as problem:
        subject = f"chat template of tokenizer {folder}"
        needed = "a checkpoint that was trained for chat, with its template"
        step = "leave --chat out, or export a checkpoint that has one"
        reason = one_line(problem) or type(problem).__name__
        raise InputError(subject, reason, needed, step) from problem


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context manager that raises a TimeoutError in its block after `seconds`, between
    two statements of Python: a template is a program, and may loop for ever. Only a
    main thread has such an alarm; in another thread the block has no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_) -> None:
        raise TimeoutError(f"not rendered in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def transcript(
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
    prefill = {
        "tokens": len(ids),
        "calls": len([*decoder.options.tiling.calls(len(ids))]),
        "ms": prefill_ms,
        "tokens_per_s": len(ids) / prefill_ms * 1e3 if prefill_ms else None,
        "first_calls": len(first_calls_ms),
        "first_calls_ms": sum(first_calls_ms),
    }
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens) if tokenizer else None,
        "prefill": prefill,
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


def _step_times(times: list[Times]) -> dict:
    """The milliseconds of all decoding steps (`samples_ms`); of the steps after the
    first one the tokens per second and the medians of the parts in milliseconds, None
    where there is only one step."""
    samples = [t.total for t in times]
    figures = dict.fromkeys(("tokens_per_s", "layer_ms", "head_ms"))
    if later := times[1:]:
        figures["tokens_per_s"] = 1e3 * len(later) / sum(samples[1:])
        parts = [[ms for ms, *_ in t.parts] for t in later]
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
