"""MIL operations as plain functions on torch tensors, one file per op family, and in
`fused` the operations that stand for groups of them. See `registry`."""

from importlib import import_module

from miltorch.ops.registry import LIST_PARAMETERS, MAX_ELEMENTS, Rule, rules
from miltorch.ops.sums import narrowed

FAMILIES = """compression control convolution elementwise image indexing linear
normalization pooling random recurrent reduction shape state"""
# operations that `miltorch.fuse` puts in the place of groups; no package has them
FUSED = rules(import_module(f"{__name__}.fused"))
OPERATIONS: dict[str, Rule] = dict(FUSED)
for _family in FAMILIES.split():
    OPERATIONS |= rules(import_module(f"{__name__}.{_family}"))
# Rules that take fp16 as it is; all others get it in float32. torch computes these in
# float32 and rounds once, or they pick values; fused ones say how they round.
HALF_OPERANDS = FUSED.keys() | frozenset(
    """abs add cast clip concat cos equal exp expand_dims gather greater greater_equal
    identity less less_equal maximum minimum mul read_state real_div reduce_max reduce_min
    relu reshape select sigmoid silu sin slice_by_index slice_update softmax split sqrt
    squeeze stack sub tanh tile transpose write_state coreml_update_state""".split()
)

__all__ = [
    "FUSED",
    "HALF_OPERANDS",
    "MAX_ELEMENTS",
    "OPERATIONS",
    "LIST_PARAMETERS",
    "Rule",
    "narrowed",
]
