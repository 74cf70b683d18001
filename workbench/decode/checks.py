"""What callers hand in, judged before anything changes: token ids, slots, counts."""

from operator import index

from workbench.errors import InputError


def whole_number(value, subject: str, needed: str, next_step: str, stop: float = float("inf")) -> int:
    """`value` as a plain int from 0 to below `stop`. A float would lose its fraction, a negative index count from the end."""
    try:
        found = index(value)
    except TypeError:
        found = -1
    if not 0 <= found < stop:
        raise InputError(subject, repr(value), needed, next_step)
    return found


def token(value, V: int) -> int:
    return whole_number(value, "token id", f"ids from 0 to {V - 1}", "encode the prompt with this bundle's tokenizer", V)


def slot(value, batch: int) -> int:
    return whole_number(value, "slot", f"a slot from 0 to {batch - 1}", "choose one, or export with a larger --batch", batch)


def count(value, subject: str) -> int:
    return whole_number(value, subject, "a whole number, 0 or more", "give such a number")
