"""The text on which a model is judged if the user gives none: English, or the language
of the small trained models in `data`.

Random token ids are no text: a language model's distributions on them are flat, and its
layers work outside the range for which they were trained. The cost of compression on
random ids says little about its cost in use."""

import json
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from workbench import paths
from workbench.bundle import Bundle
from workbench.decode.transcript import encode_text, load_tokenizer
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

COUNT = 48
"""Tokens of the default prompt."""
TASKS = "data/tasks/heldout.jsonl"
"""Text of the small trained models, whose 256 words are not English."""
SHARED_TOKENS = 64
"""A text that has so many tokens in a row in common with another one is a part of it."""
UNKNOWN_SHARE = 0.1
"""A tokenizer with a larger share of unknown tokens lacks the text's language."""


def paragraphs() -> str:
    """Plain English prose of about 800 tokens."""
    return files(__package__).joinpath("paragraphs.txt").read_text(encoding="utf-8")


def default_ids(source: Checkpoint | Bundle, count: int = COUNT) -> list[int]:
    """At most `count` token ids on which the model of a checkpoint or of a bundle is
    judged: of `paragraphs`, or, if its tokenizer does not know English, of the held-out
    tasks of the small trained models.

    Without a tokenizer, or with one that knows neither text: seeded random ids, after
    the beginning-of-sequence token if the model has one."""
    if isinstance(source, Bundle):
        manifest = source.manifest
        folder, V, bos = source.tokenizer, manifest.dims.V, manifest.tokens.bos
    else:
        config = source.config
        folder, V, bos = source.tokenizer, config.vocab_size, config.bos_token_id
    if (folder / "tokenizer.json").is_file():
        unknown = load_tokenizer(folder).unk_token_id
        for text in (paragraphs(), task_text()):
            ids = encode_text(folder, text)[:count]
            words = [id for id in ids if id != unknown and id < V]
            if ids and len(words) >= (1 - UNKNOWN_SHARE) * len(ids):
                return ids
    ids = np.random.default_rng(0).integers(0, V, count).tolist()
    return ids if bos is None else [bos, *ids[1:]]


def check_held_out(bundle: Bundle, ids: Sequence[int]) -> None:
    """Checks that the weights of `bundle` were not fitted to a part of a text that is to
    judge them.

    Raises:
        InputError: `ids` share `SHARED_TOKENS` in a row with the text of the bundle's
            calibration.
    """
    fitted = bundle.calibration_ids
    if fitted is None or len(ids) < SHARED_TOKENS:
        return

    def runs(row: Sequence[int]) -> set[bytes]:
        row = np.asarray(row, np.int32)
        if len(row) < SHARED_TOKENS:
            return set()
        views = np.lib.stride_tricks.sliding_window_view(row, SHARED_TOKENS)
        return {view.tobytes() for view in views}

    seen = set().union(*map(runs, fitted))
    if not seen.isdisjoint(runs(ids)):
        source = bundle.manifest.calibration.source
        raise InputError(
            "text",
            f"{SHARED_TOKENS} tokens in a row of {source}, with which the bundle's "
            "weights were calibrated",
            "a text that the weights were not fitted to",
            "give another text",
        )


def task_text() -> str:
    """The prompts and answers of `TASKS` in a row; empty outside a checkout."""
    file = paths.find(TASKS)
    if not file.is_file():
        return ""
    lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
    tasks = map(json.loads, lines)
    return " ; ".join(f"{task['prompt']} {task['answer']}" for task in tasks)
