"""MIL operations as plain functions on torch tensors, one file per op family.

A rule's positional parameters are arrays, its keyword-only parameters are attributes (Python ints, floats, bools,
strings or lists of them); both are spelled as MIL spells them. Floats arrive in float32 whatever the program
declares; the interpreter rounds results. To add an op: write the function in its family's file under `@rule()`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    function: Callable
    attributes: frozenset[str]
    narrow: Callable | None = None


RULES: dict[str, Rule] = {}


def rule(*names: str, narrow: Callable | None = None):
    """Registers a function as the meaning of MIL ops `names` (default: its own name).

    `narrow` is the variant whose sums are rounded to fp16 after every 32 products.
    """

    def register(function: Callable) -> Callable:
        parameters = inspect.signature(function).parameters.values()
        attributes = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        for name in names or (function.__name__.rstrip("_"),):
            if name in RULES:
                raise ValueError(f"MIL op {name!r} has two rules")
            RULES[name] = Rule(function, attributes, narrow)
        return function

    return register


TORCH = {
    "fp16": torch.float32, "fp32": torch.float32, "fp64": torch.float32, "bool": torch.bool, "int8": torch.int8,
    "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "uint16": torch.int32,
    "uint32": torch.int64,
}  # fmt: skip

from . import compression, elementwise, linear, reduction, shape, state  # noqa: E402,F401  (fills RULES)
