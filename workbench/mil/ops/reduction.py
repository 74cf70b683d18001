"""Reductions, softmax and normalisation."""

import torch

from . import rule


def narrow_sum(x: torch.Tensor, axes: list[int], keep_dims: bool) -> torch.Tensor:
    """Sum over `axes`, the running sum rounded to fp16 after every 32 terms."""
    axes = [a % x.dim() for a in axes]
    kept = [a for a in range(x.dim()) if a not in axes]
    flat = x.permute(*kept, *axes).reshape(*(x.shape[a] for a in kept), -1)
    total = torch.zeros(flat.shape[:-1])
    for part in flat.split(32, dim=-1):
        total = (total + part.sum(-1)).half().float()
    return total.reshape([1 if a in axes else x.shape[a] for a in range(x.dim())]) if keep_dims else total


def _reduce(name: str, function, narrow=None):
    """Registers a reduction; absent axes mean all of them, as in MIL."""

    def over(apply):
        def op(x, *, axes=None, keep_dims=False):
            return apply(x, list(range(x.dim())) if axes is None else axes, keep_dims)

        return op

    rule(name, narrow=narrow and over(narrow))(over(function))


def _count(x, axes):
    return torch.tensor(x.shape)[[a % x.dim() for a in axes]].prod().item() if axes else 1


def _prod(x, axes, keep_dims):
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep_dims)
    return x


_reduce("reduce_sum", torch.sum, narrow_sum)
_reduce("reduce_mean", torch.mean, lambda x, axes, keep: narrow_sum(x, axes, keep) / _count(x, axes))
_reduce("reduce_max", torch.amax)
_reduce("reduce_min", torch.amin)
_reduce("reduce_prod", _prod)
_reduce("reduce_l1_norm", lambda x, axes, keep: x.abs().sum(axes, keep))
_reduce("reduce_l2_norm", lambda x, axes, keep: x.square().sum(axes, keep).sqrt())
_reduce("reduce_sum_square", lambda x, axes, keep: x.square().sum(axes, keep))
_reduce("reduce_log_sum", lambda x, axes, keep: x.sum(axes, keep).log())
_reduce("reduce_log_sum_exp", torch.logsumexp)


@rule()
def reduce_argmax(x, *, axis=-1, keep_dims=False, output_dtype=None):
    return torch.argmax(x, axis, keep_dims)


@rule()
def reduce_argmin(x, *, axis=-1, keep_dims=False, output_dtype=None):
    return torch.argmin(x, axis, keep_dims)


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
def topk(x, *, k, axis=-1, ascending=False, sort=True, return_indices=True, output_indices_dtype=None):
    values, indices = torch.topk(x, k, axis, largest=not ascending)
    return (values, indices) if return_indices else values
