"""Activation functions."""

import torch
import torch.nn.functional as F

from . import rule
from .elementwise import unary

for _name, _function in {
    "relu": torch.relu, "relu6": F.relu6, "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus,
    "softsign": F.softsign, "tanh": torch.tanh,
}.items():  # fmt: skip
    rule(_name)(unary(_function))


def _by_channel(alpha: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector over channels, ready to meet x [N, C, …]."""
    return alpha.reshape(-1, *[1] * (x.dim() - 2))


@rule()
def clamped_relu(x, *, alpha, beta):
    return torch.clamp(torch.where(x >= 0, x, alpha * x), max=beta)


@rule()
def elu(x, *, alpha=1.0):
    return F.elu(x, alpha)


@rule()
def gelu(x, *, mode="EXACT"):
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


@rule()
def leaky_relu(x, *, alpha=0.01):
    return torch.where(x >= 0, x, alpha * x)


@rule()
def linear_activation(x, *, alpha, beta=0.0):
    return alpha * x + beta


@rule()
def prelu(x, alpha):
    return torch.where(x >= 0, x, _by_channel(alpha, x) * x)


@rule()
def scaled_tanh(x, *, alpha=1.0, beta=1.0):
    return alpha * torch.tanh(beta * x)


@rule()
def sigmoid_hard(x, *, alpha=0.2, beta=0.5):
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


@rule()
def softplus_parametric(x, alpha, beta):
    return _by_channel(alpha, x) * F.softplus(_by_channel(beta, x) * x)


@rule()
def thresholded_relu(x, *, alpha=1.0):
    return torch.where(x >= alpha, x, torch.zeros(()))
