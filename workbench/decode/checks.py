"""Checks of token ids, sequences and counts that a user gives, before anything changes."""

from collections.abc import Iterable
from operator import index

import numpy as np

from workbench.errors import InputError


def whole_number(value, subject: str, stop: int = 1 << 31) -> int:
    """`value` as a plain int from 0 to below `stop`. Floats are refused because their
    fraction would be lost, negative numbers because they would count from the end."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < stop:
        needed = f"a whole number from 0 to {stop - 1}"
        raise InputError(subject, repr(value), needed, "give such a number")
    return number


def token_ids(ids: Iterable, V: int, subject: str = "token id") -> list[int]:
    """Token ids as plain ints, each in a vocabulary of V tokens."""
    return [whole_number(value, subject, V) for value in ids]


def check_prompts(ids, batch: int, V: int) -> list[list[int]]:
    """The prompt of each of `batch` sequences as plain ints; at least one has a token.
    `ids` has one list per sequence; plain ids are the prompt of a single sequence."""
    is_plain = len(ids) and np.ndim(ids[0]) == 0
    lists = [ids] if is_plain else ids
    if len(lists) != batch or not any(map(len, lists)):
        raise InputError(
            "tokens",
            f"{len(lists)} sequences of {[len(prompt) for prompt in lists]} tokens",
            f"{batch}, one of them of at least one token",
            "give a list for each sequence",
        )
    return [token_ids(prompt, V) for prompt in lists]
