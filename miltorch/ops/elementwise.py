"""Elementwise arithmetic and comparison."""

import torch

from miltorch.ops.registry import operation, operations


def unary(function):
    """A function of one tensor under the parameter name that MIL gives it."""
    return lambda x: function(x)


def _binary(function):
    return lambda x, y: function(x, y)


# names of MIL that torch has too
UNARY = """abs acos asin atan atanh ceil cos cosh erf exp exp2 floor logical_not round sign sin sinh
sqrt square tan"""
BINARY = """add sub mul maximum minimum pow not_equal less less_equal greater greater_equal
logical_and logical_or logical_xor"""

for _name in UNARY.split():
    operation(unary(getattr(torch, _name)), _name)
for _name in BINARY.split():
    operation(_binary(getattr(torch, _name)), _name)
for _name, _function in {
    "equal": torch.eq,
    "floor_div": torch.floor_divide,
    "mod": torch.remainder,
}.items():
    operation(_binary(_function), _name)


@operation
def real_div(x, y):
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    # integer operands stay integers in MIL
    return torch.div(x, y, rounding_mode="trunc")


operations(
    {
        "identity": lambda x: x,
        "rsqrt": lambda x, *, epsilon=1e-12: torch.rsqrt(x + epsilon),
        "inverse": lambda x, *, epsilon=1e-4: (
            1.0 / (x + epsilon)
        ),  # the epsilon is MIL's own and biases the result
        "log": lambda x, *, epsilon=1e-45: torch.log(x + epsilon),
        "clip": lambda x, *, alpha, beta: torch.clamp(x, alpha, beta),
        "threshold": lambda x, *, alpha: torch.clamp(x, min=alpha),
        "cast": lambda x, *, dtype: x,  # the declared type of the result says the same
        "select": lambda cond, a, b: torch.where(cond.bool(), a, b),
    }
)
