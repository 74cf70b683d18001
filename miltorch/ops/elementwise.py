"""Elementwise arithmetic and comparison."""

import torch

from miltorch.ops.registry import operation, operations


def unary(function):
    """A function of one tensor under the parameter name that MIL gives it."""
    return lambda x: function(x)


def _binary(function):
    return lambda x, y: function(x, y)


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum,
    "pow": torch.pow, "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le,
    "greater": torch.gt, "greater_equal": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor, "floor_div": torch.floor_divide, "mod": torch.remainder,
}.items():  # fmt: skip
    operation(_name)(_binary(_function))

# what torch calls as MIL does
for _name in "abs acos asin atan atanh ceil cos cosh erf exp exp2 floor logical_not round sign sin sinh sqrt square tan".split():
    operation(_name)(unary(getattr(torch, _name)))


@operation()
def real_div(x, y):
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    return torch.div(x, y, rounding_mode="trunc")  # integer operands stay integers in MIL


operations({
    "identity": lambda x: x,
    "rsqrt": lambda x, *, epsilon=1e-12: torch.rsqrt(x + epsilon),
    "inverse": lambda x, *, epsilon=1e-4: 1.0 / (x + epsilon),  # the epsilon is MIL's own and biases the result
    "log": lambda x, *, epsilon=1e-45: torch.log(x + epsilon),
    "clip": lambda x, *, alpha, beta: torch.clamp(x, alpha, beta),
    "threshold": lambda x, *, alpha: torch.clamp(x, min=alpha),
    "cast": lambda x, *, dtype: x,  # the declared type of the result says the same
    "select": lambda cond, a, b: torch.where(cond.bool(), a, b),
})  # fmt: skip
