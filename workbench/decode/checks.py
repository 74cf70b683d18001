"""Checks of what a user gives, before anything changes: token ids, sequences, counts,
room."""

from collections.abc import Iterable
from operator import index

import numpy as np

from workbench.errors import InputError


def whole_number(
    value, subject: str, needed: str, next_step: str, stop: float = float("inf")
) -> int:
    """`value` as a plain int from 0 to below `stop`. Floats are refused because their
    fraction would be lost, negative numbers because they would count from the end."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < stop:
        raise InputError(subject, repr(value), needed, next_step)
    return number


def count(value, subject: str) -> int:
    return whole_number(
        value, subject, "a whole number, 0 or more", "give such a number"
    )


def sequence(value, batch: int) -> int:
    """The index of a sequence in the batch as a plain int."""
    needed = f"a sequence from 0 to {batch - 1}"
    next_step = "choose one, or export with a larger --batch"
    return whole_number(value, "sequence", needed, next_step, batch)


def token_ids(ids: Iterable, V: int, subject: str = "token id") -> list[int]:
    """Token ids as plain ints, each in a vocabulary of V tokens."""
    needed = f"ids from 0 to {V - 1}"
    next_step = "encode the prompt with this bundle's tokenizer"
    return [whole_number(value, subject, needed, next_step, V) for value in ids]


def prompts(ids, batch: int, V: int) -> list[list[int]]:
    """The prompt of each sequence, from those or, as plain ids, that of the only
    one."""
    lists = ids
    if len(ids) and np.ndim(ids[0]) == 0:
        lists = [ids]
    if len(lists) != batch or not any(map(len, lists)):
        raise InputError(
            "prompt",
            f"{len(lists)} sequences of {[len(p) for p in lists]} tokens",
            f"{batch}, one of them of at least one token",
            "give one prompt per sequence",
        )
    return [token_ids(prompt, V) for prompt in lists]


def tokens(ids, batch: int, V: int) -> list[list[int]]:
    """The next token of each sequence (None: it waits) as the chunk of a call."""
    if len(ids) != batch:
        needed = f"{batch}, one for each sequence"
        raise InputError("tokens", f"{len(ids)} of them", needed, "give that many")
    return [[] if each is None else token_ids([each], V) for each in ids]


def tokens_after(snapshots: list, prompts: list[list[int]]) -> None:
    """Refuses a snapshot (None: there is none) with an empty prompt."""
    if any(each and not prompt for each, prompt in zip(snapshots, prompts)):
        raise InputError(
            "prompt after a snapshot",
            "no token",
            "at least one token, whose logits give the next one",
            "trim the snapshot by a token and give that one",
        )


def room(prompts: list[list[int]], limits: list[int], offsets, S: int) -> None:
    """Refuses prompts that with all new tokens but the last need more than S
    positions."""
    for prompt, limit, offset in zip(prompts, limits, offsets, strict=True):
        end = len(prompt) + offset
        if prompt and end + max(limit - 1, 0) > S:
            raise InputError(
                "prompt and new tokens",
                f"{end} + {limit}",
                f"at most max_seq_len = {S} positions",
                "shorten them, or export with a larger --max-seq-len",
            )
