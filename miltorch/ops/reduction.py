"""Reductions, running sums and orderings.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import math

import torch

from miltorch.ops.sums import NARROW, summed


def _sum(x: torch.Tensor, axes: list[int], keep_dims: bool) -> torch.Tensor:
    whole = x.sum(axes, keep_dims)
    if not NARROW.get():
        return whole
    flat = x.movedim(axes, [*range(-len(axes), 0)]).flatten(-len(axes))
    return summed(lambda part: part.sum(-1), (flat, -1)).reshape(whole.shape)


def _prod(x, axes, keep_dims):
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep_dims)
    return x


def _mean(x, axes, keep_dims):
    return _sum(x.float(), axes, keep_dims) / math.prod(x.shape[a] for a in axes)


def _reduction(function):
    """The rule of function(x, axes, keep_dims); absent axes mean all of them, and no
    axes each element by itself. What integers give is truncated."""

    def over_axes(x, *, axes=None, keep_dims=False):
        if axes is None:
            axes = [*range(x.dim())]
        if not axes:
            x, axes, keep_dims = x[..., None], [-1], False
        result = function(x, axes, keep_dims)
        return result if x.is_floating_point() else result.trunc()

    return over_axes


TABLE = {
    f"reduce_{name}": _reduction(function)
    for name, function in {
        "sum": _sum,
        "sum_square": lambda x, *over: _sum(x.square(), *over),
        "l1_norm": lambda x, *over: _sum(x.abs(), *over),
        "l2_norm": lambda x, *over: _sum(x.square(), *over).sqrt(),
        "log_sum": lambda x, *over: _sum(x, *over).log(),
        "log_sum_exp": lambda x, *over: torch.logsumexp(x.float(), *over),
        "mean": _mean,
        "max": torch.amax,
        "min": torch.amin,
        "prod": _prod,
    }.items()
}


def reduce_argmax(x, *, axis=-1, keep_dims=False, output_dtype=None):
    return torch.argmax(x, axis, keep_dims)


def reduce_argmin(x, *, axis=-1, keep_dims=False, output_dtype=None):
    return torch.argmin(x, axis, keep_dims)


def argsort(x, *, axis=-1, ascending=False):
    return torch.argsort(x, dim=axis, descending=not ascending, stable=True)


def cumsum(x, *, axis=0, exclusive=False, reverse=False):
    if reverse:
        return cumsum(x.flip(axis), axis=axis, exclusive=exclusive).flip(axis)
    total = x.cumsum(axis)
    if exclusive:  # without a difference: infinity less itself is no number
        total = total.roll(1, axis)
        total.select(axis, 0).zero_()
    return total


def topk(
    x,
    *,
    k=1,
    axis=-1,
    ascending=False,
    sort=True,
    return_indices=True,
    output_indices_dtype=None,
):
    """The first k of a stable order: among equals the lower index wins."""
    ordered = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    count = x.shape[axis] if k == -1 else k
    values, indices = (part.narrow(axis, 0, count) for part in ordered)
    return (values, indices) if return_indices else values
