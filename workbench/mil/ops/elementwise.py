"""Elementwise arithmetic and comparison."""

import torch

from . import rule


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
    rule(_name)(_binary(_function))

for _name, _function in {
    "abs": torch.abs, "acos": torch.acos, "asin": torch.asin, "atan": torch.atan, "atanh": torch.atanh,
    "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf, "exp": torch.exp, "exp2": torch.exp2,
    "floor": torch.floor, "identity": lambda x: x, "logical_not": torch.logical_not, "round": torch.round,
    "sign": torch.sign, "sin": torch.sin, "sinh": torch.sinh, "sqrt": torch.sqrt, "square": torch.square,
    "tan": torch.tan,
}.items():  # fmt: skip
    rule(_name)(unary(_function))


@rule()
def real_div(x, y):
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    return torch.div(x, y, rounding_mode="trunc")  # integer operands stay integers in MIL


@rule()
def rsqrt(x, *, epsilon=1e-12):
    return torch.rsqrt(x + epsilon)


@rule()
def inverse(x, *, epsilon=1e-4):
    """1 / (x + epsilon): the epsilon, 1e-4 unless set, is MIL's own and biases the result."""
    return 1.0 / (x + epsilon)


@rule()
def log(x, *, epsilon=1e-45):
    return torch.log(x + epsilon)


@rule()
def clip(x, *, alpha, beta):
    return torch.clamp(x, alpha, beta)


@rule()
def threshold(x, *, alpha):
    return torch.clamp(x, min=alpha)


@rule()
def cast(x, *, dtype):
    return x  # the declared type of the result says the same


@rule()
def select(cond, a, b):
    return torch.where(cond.bool(), a, b)
