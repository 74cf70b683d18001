"""Softmax and normalisation."""

import torch
import torch.nn.functional as F

from . import rule


@rule()
def softmax(x, *, axis=-1):
    return torch.softmax(x, axis)


@rule()
def layer_norm(x, gamma=None, beta=None, *, axes=None, epsilon=1e-5):
    axes = [a % x.dim() for a in (axes or range(x.dim()))]
    mean = x.mean(axes, keepdim=True)
    y = (x - mean) * torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)
    shape = [x.shape[a] if a in axes else 1 for a in range(x.dim())]
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@rule()
def batch_norm(x, mean, variance, gamma=None, beta=None, *, epsilon=1e-5):
    return F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)


@rule()
def instance_norm(x, gamma=None, beta=None, *, epsilon=1e-5):
    axes = list(range(2, x.dim()))
    mean = x.mean(axes, keepdim=True)
    y = (x - mean) * torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)
    shape = [1, -1] + [1] * len(axes)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@rule()
def l2_norm(x, *, epsilon=1e-6):
    """x over the Euclidean norm of its last three axes."""
    return x * torch.rsqrt(x.square().sum((-3, -2, -1), keepdim=True) + epsilon)


@rule()
def local_response_norm(x, *, size, alpha=1e-4, beta=0.75, k=1.0):
    return F.local_response_norm(x, size, alpha, beta, k)
