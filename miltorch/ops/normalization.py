"""Softmax and normalisation."""

import torch
import torch.nn.functional as F

from miltorch.ops.registry import operation, operations

operations(
    {
        "softmax": lambda x, *, axis=-1: torch.softmax(x, axis),
        # over the Euclidean norm of the last three axes
        "l2_norm": lambda x, *, epsilon=1e-6: (
            x * torch.rsqrt(x.square().sum((-3, -2, -1), keepdim=True) + epsilon)
        ),
        "local_response_norm": lambda x, *, size, alpha=1e-4, beta=0.75, k=1.0: (
            F.local_response_norm(x, size, alpha, beta, k)
        ),
        "batch_norm": lambda x, mean, variance, gamma=None, beta=None, *, epsilon=1e-5: (
            F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)
        ),
    }
)


def _normalized(x, axes, gamma, beta, shape, epsilon):
    """x less its mean over `axes`, over its deviation there, times gamma and plus beta
    laid out as `shape`."""
    x = x - x.mean(axes, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@operation
def layer_norm(x, gamma=None, beta=None, *, axes=None, epsilon=1e-5):
    axes = [a % x.dim() for a in (axes or range(x.dim()))]
    return _normalized(
        x,
        axes,
        gamma,
        beta,
        [n if a in axes else 1 for a, n in enumerate(x.shape)],
        epsilon,
    )


@operation
def instance_norm(x, gamma=None, beta=None, *, epsilon=1e-5):
    axes = list(range(2, x.dim()))
    return _normalized(x, axes, gamma, beta, [1, -1] + [1] * len(axes), epsilon)
