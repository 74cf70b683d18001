"""Elementwise arithmetic, comparison and activation."""

import torch
import torch.nn.functional as F

from . import TORCH, rule


def _binary(name: str, function):
    def op(x, y):
        return function(torch.as_tensor(x), torch.as_tensor(y))

    op.__name__ = name
    rule(name)(op)


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum,
    "pow": torch.pow, "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le,
    "greater": torch.gt, "greater_equal": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor, "floor_div": torch.floor_divide, "mod": torch.remainder,
}.items():  # fmt: skip
    _binary(_name, _function)


@rule()
def real_div(x, y):
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    return torch.div(x, y, rounding_mode="trunc")  # integer operands stay integers in MIL


def _unary(name: str, function):
    def op(x):
        return function(x)

    op.__name__ = name
    rule(name)(op)


for _name, _function in {
    "abs": torch.abs, "acos": torch.acos, "asin": torch.asin, "atan": torch.atan, "atanh": torch.atanh,
    "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf, "exp": torch.exp, "exp2": torch.exp2,
    "floor": torch.floor, "logical_not": torch.logical_not, "relu": torch.relu, "round": torch.round,
    "sigmoid": torch.sigmoid, "sign": torch.sign, "silu": F.silu, "sin": torch.sin, "sinh": torch.sinh,
    "softsign": F.softsign, "sqrt": torch.sqrt, "square": torch.square, "tan": torch.tan, "tanh": torch.tanh,
    "identity": lambda x: x, "relu6": F.relu6,
}.items():  # fmt: skip
    _unary(_name, _function)


@rule()
def rsqrt(x, *, epsilon=0.0):
    return torch.rsqrt(x + epsilon)


@rule()
def inverse(x, *, epsilon=0.0):
    """1 / (x + epsilon): the epsilon, 1e-4 unless set, is MIL's own and biases the result."""
    return 1.0 / (x + epsilon)


@rule()
def log(x, *, epsilon=0.0):
    return torch.log(x + epsilon)


@rule()
def clip(x, *, alpha, beta):
    return torch.clamp(x, alpha, beta)


@rule()
def cast(x, *, dtype):
    return x.to(TORCH[dtype])


@rule()
def gelu(x, *, mode="EXACT"):
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


@rule()
def softplus(x):
    return F.softplus(x)


@rule()
def select(cond, a, b):
    return torch.where(cond.bool(), a, b)
