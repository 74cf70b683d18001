"""Decodes one prompt and returns tokens, text and times, as `workbench generate` prints
them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from workbench.decode.checks import whole_number
from workbench.decode.decoder import GREEDY, Decoder, Times
from workbench.decode.sampling import Sampling
from workbench.errors import InputError


def load_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint or of a bundle's `tokenizer` folder; refuses a
    folder that has none."""
    from transformers import PreTrainedTokenizerFast

    if not (Path(folder) / "tokenizer.json").is_file():
        raise InputError(
            f"tokenizer {folder}",
            "no tokenizer.json",
            "the checkpoint's tokenizer",
            "give --prompt-ids instead of text, or add the tokenizer and export again",
        )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode_text(folder: str | Path, text: str) -> list[int]:
    """Token ids of a text by the tokenizer in `folder`: its beginning-of-sequence token
    first where it has one, no other special token."""
    tokenizer = load_tokenizer(folder)
    bos = tokenizer.bos_token_id
    # verbose: it warns of texts longer than the model's context, which are read in
    # windows
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return [bos] * (bos is not None) + ids


def token_labels(folder: Path | None, ids: Sequence[int]) -> list[str]:
    """The text of each token for an axis: white space visible, at most 12 characters;
    the id itself without a tokenizer in `folder`."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return [str(i) for i in ids]
    decode = load_tokenizer(folder).decode
    white = str.maketrans(" \n\t", "·↵⇥")
    texts = [decode([int(i)]).translate(white) for i in ids]
    return [text if len(text) <= 12 else f"{text[:11]}…" for text in texts]


def encode_chat(folder: str | Path, message: str) -> list[int]:
    """Token ids of a user's message in the chat template of the tokenizer in `folder`,
    up to where the model's answer begins.

    Raises:
        InputError: a tokenizer without such a template, or with one that cannot be
            rendered.
    """
    from jinja2 import TemplateError

    tokenizer = load_tokenizer(folder)
    actual = "none in it"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": message}]
        try:
            return tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False
            )
        except TemplateError as problem:
            actual = str(problem)
    raise InputError(
        f"chat template of tokenizer {folder}",
        actual,
        "a checkpoint that was trained for chat, with its template",
        "leave --chat out, or export a checkpoint that has one",
    )


def transcript(
    decoder: Decoder,
    ids: list[int],
    max_new: int,
    logits: Path | None = None,
    sampling: Sampling = GREEDY,
    on_text: Callable[[str], None] | None = None,
) -> dict:
    """Decodes one prompt and sums up.

    Args:
        logits: file for [max_new + 1, V] float32: row 0 after the prompt, then one row
            per generated token.
        on_text: is called with the text of each token as soon as it is decoded, where
            the bundle has a tokenizer; the pieces add up to `text`.

    Returns:
        The JSON of `workbench generate`. The first step after the prompt compiles and
        allocates: it is in `samples_ms` alone, and the figures are None without another.

    Raises:
        InputError: what cannot be decoded, or kept, before any token is.
    """
    tokenizer = prefill_ms = None
    positions = len(ids) + whole_number(max_new, "new tokens")
    _check_options(decoder, positions, logits, sampling)
    if (decoder.bundle.tokenizer / "tokenizer.json").exists():
        from tokenizers.decoders import DecodeStream

        tokenizer = load_tokenizer(decoder.bundle.tokenizer)
        pieces = DecodeStream(skip_special_tokens=False)
    records, start = [], time.perf_counter()
    for record in decoder.stream(ids, max_new, sampling=sampling):
        prefill_ms = prefill_ms or (time.perf_counter() - start) * 1e3
        records.append(record)
        if tokenizer and on_text:
            text = pieces.step(tokenizer.backend_tokenizer, record.token)
            if text:  # none while a character is incomplete
                on_text(text)
    tokens, times = [r.token for r in records], [r.times for r in records[1:]]
    if logits:
        rows = [record.logits for record in records]
        rows.append(_last_logits(decoder, tokens, ids))
        with logits.open("wb") as file:  # np.save appends .npy to a name
            np.save(file, np.stack(rows).astype(np.float32))
    text = tokenizer.decode(tokens) if tokenizer else None
    return {
        "tokens": tokens,
        "text": text,
        "prefill": {
            "tokens": len(ids),
            "calls": -(-len(ids) // decoder.options.t_max),
            "ms": prefill_ms,
        },
        "decode": {"tokens": len(tokens)} | _step_times(times),
        "runtime": decoder.runtime,
        "precision": None if decoder.is_device else decoder.precision,
    }


def _step_times(times: list[Times]) -> dict:
    """The ms of all decoding steps; tokens per second and medians in ms without the
    first step, None where there is no other."""
    samples = [t.total for t in times]
    figures = dict.fromkeys(("tokens_per_s", "layer_ms", "head_ms"))
    if later := times[1:]:
        figures["tokens_per_s"] = 1e3 / float(np.median([t.total for t in later]))
        figures["layer_ms"] = np.median([t.layers for t in later], axis=0).tolist()
        figures["head_ms"] = float(np.median([t.head for t in later]))
    return figures | {"samples_ms": samples}


def _last_logits(decoder: Decoder, tokens: list[int], ids) -> np.ndarray:
    """The logits after the last of all tokens, from which none was picked."""
    if tokens:
        return decoder.decode_one_token(tokens[-1])
    decoder.begin()
    return decoder.prefill(ids)


def _check_options(
    decoder: Decoder, positions: int, logits: Path | None, sampling: Sampling
) -> None:
    """Raises an InputError for an option that needs logits, if the packages give none,
    and if those of all tokens, the last one included, could not be computed or
    written."""
    options = {"--logits": logits, "--temperature": sampling.temperature}
    for option, value in options.items():
        if value and not decoder.gives_logits:
            actual = "packages with the argmax inside"
            needed = "packages that put out logits"
            raise InputError(option, actual, needed, "leave it out")
    if not logits:
        return
    S = decoder.options.max_seq_len
    if positions > S:
        raise InputError(
            "prompt and new tokens, with a row of logits for each",
            f"{positions} tokens",
            f"at most max_seq_len = {S}",
            "ask for fewer, or export with a larger --max-seq-len",
        )
    if logits.is_dir() or not logits.parent.is_dir():
        raise InputError(
            f"logits {logits}",
            "a folder" if logits.is_dir() else f"no folder {logits.parent}",
            "a file in a folder that is there",
            "make the folder, or choose another file",
        )
