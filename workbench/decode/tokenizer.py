"""The tokenizer of a checkpoint or of a bundle: text and chat messages to token ids, and
token ids to text."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import checkpoint_checks
from workbench.errors import InputError, one_line
from workbench.files import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_SECONDS = 10.0  # limit for a chat template; real ones take milliseconds


def has_tokenizer(folder: str | Path) -> bool:
    """Whether there is a tokenizer in the folder of a checkpoint, or in the `tokenizer`
    folder of a bundle."""
    return (Path(folder) / "tokenizer.json").is_file()


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a checkpoint or of a bundle's `tokenizer` folder. While no file
    of the folder changes, a process reads it once: a vocabulary of 262,144 takes a
    second.

    Raises:
        InputError: no tokenizer in the folder, or a damaged one.
    """
    if not has_tokenizer(folder):
        raise InputError(
            f"tokenizer {folder}",
            "no tokenizer.json",
            "the checkpoint's tokenizer",
            "give --prompt-ids instead of text, or add the tokenizer and export again",
        )
    check_folder(Path(folder), checkpoint_checks.MAX_FILE_BYTES)
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    file_times = tuple((path.name, path.stat().st_mtime_ns) for path in files)
    return _read_tokenizer(Path(folder).resolve(), file_times)


@lru_cache(maxsize=4)
def _read_tokenizer(
    folder: Path, file_times: tuple[tuple[str, int], ...]
) -> "PreTrainedTokenizerFast":
    """The tokenizer of a folder.

    Args:
        file_times: the name and the time of the last change of every file. They are not
            read here: a change of a file makes `lru_cache` read the folder again.
    """
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
    if not has_tokenizer(folder):
        return ", ".join(map(str, ids))
    return load_tokenizer(folder).decode(ids, skip_special_tokens=True)


def unknown_share(folder: Path, ids: Sequence[int]) -> float:
    """The share of token ids that stand for text unknown to the tokenizer in `folder`;
    0 without one, or for one that knows every text."""
    if not has_tokenizer(folder):
        return 0.0
    unknown = load_tokenizer(folder).unk_token_id
    return sum(token == unknown for token in ids) / max(1, len(ids))


def token_labels(folder: Path | None, ids: Sequence[int]) -> list[str]:
    """The text of each token for an axis: white space visible, at most 12 characters;
    the id itself where `folder` has no tokenizer."""
    if folder is None or not has_tokenizer(folder):
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


def has_chat_template(folder: str | Path) -> bool:
    """Whether the tokenizer in `folder`, where there is one, has a chat template."""
    return has_tokenizer(folder) and bool(load_tokenizer(folder).chat_template)


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
