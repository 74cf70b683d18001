"""Elementwise arithmetic, comparison and activation.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import torch
import torch.nn.functional as F

_TORCH = vars(F) | vars(torch)


def _unary(function):
    """A function of one tensor under the parameter name that MIL gives it."""
    return lambda x: function(x)


def _binary(function):
    return lambda x, y: function(x, y)


# names of MIL that torch has too
UNARY = """abs acos asin atan atanh ceil cos cosh erf exp exp2 floor logical_not relu relu6
round sigmoid sign silu sin sinh softplus softsign sqrt square tan tanh"""
BINARY = """add sub mul maximum minimum pow not_equal less less_equal greater greater_equal
logical_and logical_or logical_xor"""
# MIL's name → torch's
OTHERS = {"equal": "eq", "floor_div": "floor_divide", "mod": "remainder"}


def _by_channel(alpha: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector over channels, ready to meet x [N, C, …]."""
    return alpha.reshape(-1, *[1] * (x.dim() - 2))


def _leaky(x, alpha):
    return torch.where(x >= 0, x, alpha * x)


TABLE = {name: _unary(_TORCH[name]) for name in UNARY.split()}
TABLE |= {name: _binary(_TORCH[name]) for name in BINARY.split()}
TABLE |= {name: _binary(_TORCH[theirs]) for name, theirs in OTHERS.items()}
TABLE |= {
    "identity": lambda x: x,
    "rsqrt": lambda x, *, epsilon=1e-12: torch.rsqrt(x + epsilon),
    # the epsilon is MIL's own and biases the result
    "inverse": lambda x, *, epsilon=1e-4: 1.0 / (x + epsilon),
    "log": lambda x, *, epsilon=1e-45: torch.log(x + epsilon),
    "clip": lambda x, *, alpha, beta: torch.clamp(x, alpha, beta),
    "threshold": lambda x, *, alpha: torch.clamp(x, min=alpha),
    "cast": lambda x, *, dtype: x,  # the declared type of the result says the same
    "select": lambda cond, a, b: torch.where(cond.bool(), a, b),
    "clamped_relu": lambda x, *, alpha, beta: _leaky(x, alpha).clamp(max=beta),
    "elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
    "leaky_relu": lambda x, *, alpha=0.01: _leaky(x, alpha),
    "linear_activation": lambda x, *, alpha, beta=0.0: alpha * x + beta,
    "prelu": lambda x, alpha: _leaky(x, _by_channel(alpha, x)),
    "scaled_tanh": lambda x, *, alpha=1.0, beta=1.0: alpha * torch.tanh(beta * x),
    "sigmoid_hard": lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "softplus_parametric": lambda x, alpha, beta: (
        _by_channel(alpha, x) * F.softplus(_by_channel(beta, x) * x)
    ),
    "thresholded_relu": lambda x, *, alpha=1.0: torch.where(x >= alpha, x, 0.0),
}


def real_div(x, y):
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    # integer operands stay integers in MIL
    return torch.div(x, y, rounding_mode="trunc")


def gelu(x, *, mode="EXACT"):
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")
