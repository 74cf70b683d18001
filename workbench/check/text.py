"""The text on which a model is judged if the user gives none: English, or the language
of the small trained models in `data`.

Random token ids are no text: a language model's distributions on them are flat, and its
layers work outside the range for which they were trained. The cost of compression on
random ids says little about its cost in use."""

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from workbench import paths
from workbench.bundle import Bundle
from workbench.decode.tokenizer import encode_text, has_tokenizer, load_tokenizer
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

    def encode_start(folder: Path, text: str) -> list[int]:
        return encode_text(folder, text)[:count]

    encoded = first_known_texts(source, [[paragraphs()], [task_text()]], encode_start)
    if encoded:
        return next(iter(encoded.values()))
    V, bos = _vocabulary(source)
    ids = np.random.default_rng(0).integers(0, V, count).tolist()
    return ids if bos is None else [bos, *ids[1:]]


def first_known_texts(
    source: Checkpoint | Bundle,
    candidates: Iterable[Iterable[str]],
    encode: Callable[[Path, str], list[int]],
) -> dict[str, list[int]]:
    """The first of several lists of texts whose words the tokenizer of a checkpoint or
    of a bundle knows: text → token ids. Empty without a tokenizer, or with one that
    knows none of them.

    Args:
        encode: (folder of the tokenizer, text) → token ids.
    """
    folder = source.tokenizer
    if not has_tokenizer(folder):
        return {}
    V, _ = _vocabulary(source)
    unknown = load_tokenizer(folder).unk_token_id
    for texts in candidates:
        encoded = {text: encode(folder, text) for text in texts if text}
        ids = [id for ids in encoded.values() for id in ids]
        unknown_count = sum(id == unknown or id >= V for id in ids)
        if ids and unknown_count <= UNKNOWN_SHARE * len(ids):
            return encoded
    return {}


def _vocabulary(source: Checkpoint | Bundle) -> tuple[int, int | None]:
    """The size of a model's vocabulary, and its beginning-of-sequence token."""
    if isinstance(source, Bundle):
        return source.manifest.dims.V, source.manifest.tokens.bos
    return source.config.vocab_size, source.config.bos_token_id


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
    texts = [f"{task['prompt']} {task['answer']}" for task in held_out_tasks()]
    return " ; ".join(texts)


def held_out_tasks() -> list[dict]:
    """The objects in `TASKS`; none outside a checkout."""
    file = paths.find(TASKS)
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
