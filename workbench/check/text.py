"""The text on which a model is judged if the user gives none: English, or the language
of the small trained models in `data`.

Random token ids are no text: a language model's distributions on them are flat, and its
layers work outside the range for which they were trained. The cost of compression on
random ids says little about its cost in use."""

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files

import numpy as np

from workbench import paths
from workbench.bundle import Bundle
from workbench.decode.tokenizer import encode_text, load_tokenizer
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

COUNT = 48  # tokens of the default prompt
# text of the small trained models, whose 256 words are not English
TASKS = "data/tasks/heldout.jsonl"
# A text that has so many tokens in a row in common with another one is a part of it.
SHARED_TOKENS = 64
# A tokenizer with a larger share of unknown tokens lacks the text's language.
UNKNOWN_SHARE = 0.1


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
    """Checks that no part of a text on which `bundle` will be judged has decided its
    weights or their formats.

    Raises:
        InputError: `ids` share `SHARED_TOKENS` in a row with the text of the bundle's
            calibration, or with the one on which its formats were chosen.
    """
    if len(ids) < SHARED_TOKENS:
        return
    manifest = bundle.manifest
    texts = []
    if manifest.calibration:
        purpose = "weights were calibrated"
        texts.append((bundle.calibration_ids, manifest.calibration.source, purpose))
    if manifest.selection:
        purpose = "formats were chosen"
        texts.append((bundle.selection_ids, manifest.selection.source, purpose))
    for windows, source, purpose in texts:
        if share_part([ids], windows):
            raise InputError(
                "text",
                f"{SHARED_TOKENS} tokens in a row of {source}, with which the bundle's "
                f"{purpose}",
                "a text that the bundle was not fitted to",
                "give another text",
            )


def share_part(first: Iterable[Sequence[int]], second: Iterable[Sequence[int]]) -> bool:
    """Whether two texts, each in rows of token ids, have `SHARED_TOKENS` in a row in
    common."""
    runs = set().union(*map(_runs, first))
    return not runs.isdisjoint(set().union(*map(_runs, second)))


def _runs(ids: Sequence[int]) -> set[bytes]:
    """All `SHARED_TOKENS` in a row of some token ids."""
    ids = np.asarray(ids, np.int32)
    if len(ids) < SHARED_TOKENS:
        return set()
    views = np.lib.stride_tricks.sliding_window_view(ids, SHARED_TOKENS)
    return {view.tobytes() for view in views}


def task_text() -> str:
    """The prompts and answers of `TASKS` in a row; empty outside a checkout."""
    file = paths.find(TASKS)
    if not file.is_file():
        return ""
    lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
    tasks = map(json.loads, lines)
    return " ; ".join(f"{task['prompt']} {task['answer']}" for task in tasks)
