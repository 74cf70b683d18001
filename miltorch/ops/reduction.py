"""Reductions, running sums and orderings."""

import math

import torch

from miltorch.ops.registry import operation, operations


def narrow_sum(x: torch.Tensor, axes: list[int], keep_dims: bool) -> torch.Tensor:
    """Sum over `axes`, the running sum rounded to fp16 after every 32 terms."""
    axes = [a % x.dim() for a in axes]
    rest = [a for a in range(x.dim()) if a not in axes]
    flat = x.permute(*rest, *axes).reshape(*(x.shape[a] for a in rest), -1)
    total = torch.zeros(flat.shape[:-1])
    for part in flat.split(32, dim=-1):
        total = (total + part.sum(-1)).half().float()
    if keep_dims:
        for axis in sorted(axes):
            total = total.unsqueeze(axis)
    return total


def _reduce(name: str, function, narrow=None):
    """Registers a reduction `function(x, axes, keep_dims)`; absent axes mean all of
    them, as in MIL."""

    def over(apply):
        def op(x, *, axes=None, keep_dims=False):
            if axes is None:
                axes = list(range(x.dim()))
            return apply(x, axes, keep_dims)

        return op

    operation(over(function), name, narrow and over(narrow))


def _prod(x, axes, keep_dims):
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep_dims)
    return x


def _sums(total) -> dict:
    """The reductions that are made of sums, each sum by `total(x, axes, keep_dims)`."""
    return {
        "reduce_sum": total,
        "reduce_sum_square": lambda x, *over: total(x.square(), *over),
        "reduce_l1_norm": lambda x, *over: total(x.abs(), *over),
        "reduce_l2_norm": lambda x, *over: total(x.square(), *over).sqrt(),
        "reduce_log_sum": lambda x, *over: total(x, *over).log(),
        "reduce_mean": lambda x, axes, keep_dims: (
            total(x.float(), axes, keep_dims) / math.prod(x.shape[a] for a in axes)
        ),
    }


for _name, _function in _sums(torch.sum).items():
    _reduce(_name, _function, _sums(narrow_sum)[_name])
_reduce("reduce_max", torch.amax)
_reduce("reduce_min", torch.amin)
_reduce("reduce_prod", _prod)
_reduce(
    "reduce_log_sum_exp",
    lambda x, axes, keep_dims: torch.logsumexp(x.float(), axes, keep_dims),
)


operations(
    {
        "reduce_argmax": lambda x, *, axis=-1, keep_dims=False, output_dtype=None: (
            torch.argmax(x, axis, keep_dims)
        ),
        "reduce_argmin": lambda x, *, axis=-1, keep_dims=False, output_dtype=None: (
            torch.argmin(x, axis, keep_dims)
        ),
        "argsort": lambda x, *, axis=-1, ascending=False: torch.argsort(
            x, dim=axis, descending=not ascending, stable=True
        ),
    }
)


@operation
def cumsum(x, *, axis=0, exclusive=False, reverse=False):
    if reverse:
        return cumsum(x.flip(axis), axis=axis, exclusive=exclusive).flip(axis)
    total = x.cumsum(axis)
    if exclusive:
        total = total - x
    return total


@operation
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
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    if k == -1:
        k = x.shape[axis]
    values = values.narrow(axis, 0, k)
    indices = indices.narrow(axis, 0, k)
    if not return_indices:
        return values
    return values, indices
