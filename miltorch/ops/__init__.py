"""MIL operations as plain functions on torch tensors, one file per op family. See
`registry`."""

from miltorch.ops import (  # noqa: F401  (each family fills OPERATIONS)
    activation,
    compression,
    control,
    convolution,
    elementwise,
    image,
    indexing,
    linear,
    normalization,
    pooling,
    random,
    recurrent,
    reduction,
    shape,
    state,
)
from miltorch.ops.registry import MAX_ELEMENTS, OPERATIONS, TUPLES, Operation, operation

__all__ = ["MAX_ELEMENTS", "OPERATIONS", "TUPLES", "Operation", "operation"]
