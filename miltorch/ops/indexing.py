"""Reading and writing parts of tensors: slices, gather and scatter.

A negative index counts from the end, unless `validate_indices` (iOS 17) refuses it. One
past the end raises: MIL leaves it undefined.

Every function without an underscore is a rule, see `registry`.
"""

from functools import partial

import numpy as np
import torch

from miltorch.ops.registry import assign, window


def slice_by_index(
    x, *, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
):
    index = window(begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if min(stride or [1]) > 0:
        return x[index]
    return torch.from_numpy(np.array(x.numpy()[index]))  # torch has no negative stride


def slice_update(
    x,
    update,
    *,
    begin,
    end,
    stride=None,
    begin_mask=None,
    end_mask=None,
    squeeze_mask=None,
):
    result = x.numpy().copy()
    index = window(begin, end, stride, begin_mask, end_mask, squeeze_mask)
    assign(result, index, update)
    return torch.from_numpy(result)


def slice_by_size(x, *, begin, size):
    """`size` has the elements to take along each axis; -1 takes all from `begin` on."""
    for axis, (first, count) in enumerate(zip(begin, size, strict=True)):
        length = x.shape[axis]
        if first < 0:
            first += length
        x = x.narrow(axis, first, length - first if count == -1 else count)
    return x


def non_zero(x):
    return torch.nonzero(x)


def _wrap(indices: torch.Tensor, size, validate: bool) -> torch.Tensor:
    if validate and bool((indices < 0).any()):
        raise IndexError("a negative index")
    return torch.where(indices < 0, indices + size, indices).long()


def _take(x, indices, axis: int, validate: bool):
    """x.shape[:axis] + indices.shape + x.shape[axis+1:]"""
    indices = _wrap(indices, x.shape[axis], validate)
    values = torch.index_select(x, axis, indices.reshape(-1))
    return values.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _take_along(x, indices, axis: int, validate: bool):
    # take_along_dim checks no bounds
    return torch.gather(x, axis, _wrap(indices, x.shape[axis], validate))


def _take_nd(x, indices, validate: bool):
    """The last axis of `indices` addresses the first axes of x."""
    depth = indices.shape[-1]
    return x[tuple(_wrap(indices, torch.tensor(x.shape[:depth]), validate).unbind(-1))]


def _batched(take, x, indices, batch_dims: int):
    """`take` for each element of the first `batch_dims` axes of both."""
    if not batch_dims:
        return take(x, indices)
    pairs = zip(x, indices, strict=True)
    return torch.stack([_batched(take, *pair, batch_dims - 1) for pair in pairs])


def gather(x, indices, *, axis=0, batch_dims=0, validate_indices=False):
    take = partial(_take, axis=axis % x.dim() - batch_dims, validate=validate_indices)
    return _batched(take, x, indices, batch_dims)


def gather_along_axis(x, indices, *, axis=0, validate_indices=False):
    return _take_along(x, indices, axis, validate_indices)


def gather_nd(x, indices, *, batch_dims=0, validate_indices=False):
    take = partial(_take_nd, validate=validate_indices)
    return _batched(take, x, indices, batch_dims)


def _combine(data, take, updates, mode: str):
    """`data` with `updates` combined into the elements that `take` would read."""
    positions = take(torch.arange(data.numel()).reshape(data.shape))
    if updates.shape != positions.shape:
        raise ValueError(
            f"updates of shape {list(updates.shape)} "
            f"for places of shape {list(positions.shape)}"
        )
    flat, positions = data.reshape(-1), positions.reshape(-1)
    updates = updates.reshape(-1).to(data.dtype)
    if mode == "sub":
        mode, updates = "add", -updates
    if mode == "update":
        result = flat.index_put((positions,), updates)
    elif mode == "div":
        result = data / _combine(torch.ones_like(data), take, updates, "mul")
    else:
        reduction = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[mode]
        result = flat.scatter_reduce(0, positions, updates, reduction)
    return result.reshape(data.shape)


def scatter(data, indices, updates, *, axis=0, mode="add", validate_indices=False):
    axis %= data.dim()
    take = partial(_take, indices=indices, axis=axis, validate=validate_indices)
    return _combine(data, take, updates, mode)


def scatter_along_axis(
    data, indices, updates, *, axis=0, mode="add", validate_indices=False
):
    take = partial(_take_along, indices=indices, axis=axis, validate=validate_indices)
    return _combine(data, take, updates, mode)


def scatter_nd(data, indices, updates, *, mode="add", validate_indices=False):
    take = partial(_take_nd, indices=indices, validate=validate_indices)
    return _combine(data, take, updates, mode)
