"""MIL operations as plain functions on torch tensors, one file per op family. See
`registry`."""

from importlib import import_module

from miltorch.ops.registry import MAX_ELEMENTS, TUPLES, Operation, rules
from miltorch.ops.sums import narrowed

FAMILIES = """compression control convolution elementwise image indexing linear
normalization pooling random recurrent reduction shape state"""
OPERATIONS: dict[str, Operation] = {}
for _family in FAMILIES.split():
    OPERATIONS |= rules(import_module(f"{__name__}.{_family}"))

__all__ = ["MAX_ELEMENTS", "OPERATIONS", "TUPLES", "Operation", "narrowed"]
