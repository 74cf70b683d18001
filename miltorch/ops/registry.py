"""The table of MIL operations, and what several families need to fill it.

A rule's positional parameters are arrays, its keyword-only parameters are attributes
(Python ints, floats, bools, strings or lists of them); both are spelled as MIL spells
them, and one rule serves every version of its op. Floats arrive in float32 whatever the
program declares; the interpreter brings results to their declared dtype. A rule returns
a tensor, a list (a MIL list), or a tuple: one element per output. To add an op: write
the function in its family's file under `@operation`, or its one line into a table of
`operations`."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# parameters that are lists even when they hold one value
TUPLES = frozenset({"values", "loop_vars", "elem_shape", "ref_tensors"})
MAX_ELEMENTS = 1 << 28  # of a tensor whose size an attribute decides: 1 GiB in float32


@dataclass(frozen=True)
class Operation:
    function: Callable
    attributes: frozenset[str]
    narrow: Callable | None = None


OPERATIONS: dict[str, Operation] = {}


def operation(
    function: Callable, name: str | None = None, narrow: Callable | None = None
) -> Callable:
    """Registers `function` as the rule of the MIL op `name` (default: the function's
    own name) and returns it.

    `narrow` is the variant whose sums are rounded to fp16 after every 32 terms.
    """
    name = name or function.__name__
    if name in OPERATIONS:
        raise ValueError(f"MIL op {name!r} has two rules")
    parameters = inspect.signature(function).parameters.values()
    attributes = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    OPERATIONS[name] = Operation(function, attributes, narrow)
    return function


def operations(functions: dict[str, Callable]) -> None:
    """Registers functions by the names of their MIL ops."""
    for name, function in functions.items():
        function.__qualname__ = name  # the name in Python's error messages
        operation(function, name)


def bounded(sizes) -> list[int]:
    """`sizes` as a list, refused when a tensor of it would pass `MAX_ELEMENTS`: a
    damaged size, not a computation."""
    sizes = [int(size) for size in sizes]
    if math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS:
        raise ValueError(f"a tensor of shape {sizes}, over {MAX_ELEMENTS} elements")
    return sizes


def padded(
    x: torch.Tensor, pairs, mode: str = "constant", value: float = 0.0
) -> torch.Tensor:
    """x with `pairs` of (before, after) elements added to its last axes, one pair per
    axis."""
    lead = x.dim() - len(pairs)
    bounded(n + sum(pair) for n, pair in zip(x.shape[lead:], pairs, strict=True))
    edges = [edge for pair in reversed(pairs) for edge in pair]
    return F.pad(x, edges, mode, value)
