"""Finds the rule of an operation, and has the functions that several families share.

Every public function of a family's module, and every entry of its TABLE, is the rule of
the MIL operation of its name. A rule's positional parameters are arrays, its keyword-only
parameters are attributes (Python ints, floats, bools, strings or lists of them); both are
spelled as MIL spells them, and one rule serves every version of its operation. Floats
arrive in float32 whatever the program declares; the interpreter brings results to their
declared dtype. A rule returns a tensor, a list (a MIL list), or a tuple: one element per
output."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

# parameters that are lists even when they hold one value
LIST_PARAMETERS = frozenset({"values", "loop_vars", "elem_shape", "ref_tensors"})
MAX_ELEMENTS = 1 << 28  # of a tensor whose size an attribute decides: 1 GiB in float32


@dataclass(frozen=True)
class Rule:
    """The rule of an operation: its function, the names of its arrays, and its attributes
    with their defaults."""

    function: Callable
    operands: tuple[str, ...]
    attributes: dict[str, object]


def rules(family: ModuleType) -> dict[str, Rule]:
    """The rules of a family's module, by the names of their operations."""
    functions = dict(getattr(family, "TABLE", {}))
    operations = {}
    for name, function in vars(family).items():
        # imported functions belong to other modules
        is_defined_here = (
            inspect.isfunction(function) and function.__module__ == family.__name__
        )
        if is_defined_here and not name.startswith("_"):
            functions[name] = function
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters.values()
        attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        operands = tuple(p.name for p in parameters if p.name not in attributes)
        operations[name] = Rule(function, operands, attributes)
    return operations


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


def padding(
    sizes, kernel, strides, dilations, pad_type: str, pad
) -> list[tuple[int, int]]:
    """(before, after) per spatial axis for MIL's pad_type: valid, same (extra at the
    end), same_lower, custom."""
    pad_type = pad_type.lower()
    if pad_type == "custom":
        return list(zip(pad[::2], pad[1::2], strict=True))
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"pad_type {pad_type!r}")
    pairs = []
    for size, taps, stride, dilation in zip(
        sizes, kernel, strides, dilations, strict=True
    ):
        reach = (taps - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        before = total // 2
        if pad_type == "same_lower":
            before = total - before
        pairs.append((before, total - before))
    return pairs


def window(
    begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
) -> tuple:
    """MIL's parameters of a slice as an index. A squeezed axis takes one element; a
    masked begin or end is open."""
    absent = [None] * len(begin)
    optional = stride, begin_mask, end_mask, squeeze_mask
    columns = [values or absent for values in optional]
    index = []
    for first, last, step, begin_is_open, end_is_open, is_squeezed in zip(
        begin, end, *columns, strict=True
    ):
        start = None if begin_is_open else first
        stop = None if end_is_open else last
        index.append((start or 0) if is_squeezed else slice(start, stop, step))
    return tuple(index)


def assign(x: np.ndarray, index: tuple, update: torch.Tensor) -> None:
    """Writes an update into a window of `x`, which must have the update's shape."""
    shape = list(update.shape)
    window_shape = list(x[index].shape)  # the end of `x` may cut it short
    if shape != window_shape:
        raise IndexError(f"an update of shape {shape} for a window of {window_shape}")
    x[index] = update.numpy()
