"""Softmax and normalisation.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import torch
import torch.nn.functional as F

TABLE = {
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
    # each channel is a group
    "instance_norm": lambda x, gamma=None, beta=None, *, epsilon=1e-5: torch.group_norm(
        x, x.shape[1], gamma, beta, epsilon
    ),
}


def layer_norm(x, gamma=None, beta=None, *, axes=None, epsilon=1e-5):
    axes = axes or list(range(x.dim()))
    shape = [1] * x.dim()
    for axis in axes:
        shape[axis] = x.shape[axis]
    x = x - x.mean(axes, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    if gamma is not None:
        y = y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)
