"""Activation functions."""

import torch
import torch.nn.functional as F

from miltorch.ops.elementwise import unary
from miltorch.ops.registry import operation, operations

for _function in (
    torch.relu,
    F.relu6,
    torch.sigmoid,
    F.silu,
    F.softplus,
    F.softsign,
    torch.tanh,
):
    operation(unary(_function), _function.__name__)


def _by_channel(alpha: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector over channels, ready to meet x [N, C, …]."""
    return alpha.reshape(-1, *[1] * (x.dim() - 2))


operations(
    {
        "clamped_relu": lambda x, *, alpha, beta: torch.clamp(
            torch.where(x >= 0, x, alpha * x), max=beta
        ),
        "elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
        "leaky_relu": lambda x, *, alpha=0.01: torch.where(x >= 0, x, alpha * x),
        "linear_activation": lambda x, *, alpha, beta=0.0: alpha * x + beta,
        "prelu": lambda x, alpha: torch.where(x >= 0, x, _by_channel(alpha, x) * x),
        "scaled_tanh": lambda x, *, alpha=1.0, beta=1.0: alpha * torch.tanh(beta * x),
        "sigmoid_hard": lambda x, *, alpha=0.2, beta=0.5: torch.clamp(
            alpha * x + beta, 0.0, 1.0
        ),
        "softplus_parametric": lambda x, alpha, beta: (
            _by_channel(alpha, x) * F.softplus(_by_channel(beta, x) * x)
        ),
        "thresholded_relu": lambda x, *, alpha=1.0: torch.where(
            x >= alpha, x, torch.zeros(())
        ),
    }
)


@operation
def gelu(x, *, mode="EXACT"):
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    if mode == "TANH_APPROXIMATION":
        return F.gelu(x, approximate="tanh")
    return F.gelu(x)
