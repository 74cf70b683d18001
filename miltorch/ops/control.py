"""Control flow, lists and class labels. A MIL list is a Python list that is never
changed in place.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import torch

from miltorch.ops.registry import bounded

MAX_ITERATIONS = 100_000  # of one loop: more is taken for a damaged program

TABLE = {
    "list_length": lambda ls: torch.tensor(len(ls)),
    "list_read": lambda ls, *, index: ls[index],
    "list_gather": lambda ls, *, indices: torch.stack([ls[i] for i in indices]),
}


def cond(*, pred, blocks):
    """`blocks` are functions of the enclosing values: what to do if true, and if
    not."""
    then, otherwise = blocks
    if pred:
        return tuple(then())
    return tuple(otherwise())


def while_loop(loop_vars, *, blocks):
    condition, body = blocks
    for _ in range(MAX_ITERATIONS):
        if not condition(*loop_vars)[0]:
            return tuple(loop_vars)
        loop_vars = body(*loop_vars)
    raise ValueError(f"a loop of more than {MAX_ITERATIONS} iterations")


def make_list(*, init_length=1, dynamic_length=True, elem_shape, dtype="fp32"):
    """Zeros, or None where the shape of an element has a symbol in it and is known only
    once one is written."""
    if not all(isinstance(size, int) for size in elem_shape):
        bounded([init_length])
        return [None] * init_length
    bounded([init_length, *elem_shape])
    return [torch.zeros(elem_shape)] * init_length


def list_write(ls, value, *, index):
    bounded([index])
    ls = ls + [torch.zeros_like(value)] * (index + 1 - len(ls))
    ls[index] = value
    return ls


def list_scatter(ls, value, *, indices):
    for index, element in zip(indices, value, strict=True):
        ls = list_write(ls, element, index=index)
    return ls


def classify(probabilities, *, classes):
    """The most probable label, and every label's probability."""
    probabilities = probabilities.reshape(-1)
    label = classes[int(probabilities.argmax())]
    if not isinstance(label, str):
        label = torch.tensor(label)
    return label, dict(zip(classes, probabilities.tolist(), strict=True))
