"""Reading and writing parts of tensors: slices, gather and scatter.

A negative index counts from the end, unless `validate_indices` (iOS 17) refuses it. One
past the end raises: MIL leaves it undefined."""

from functools import partial

import numpy as np
import torch

from miltorch.ops.registry import operation


@operation
def slice_by_index(
    x, *, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
):
    flipped, index = _window(
        x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask
    )
    if flipped:
        x = x.flip(flipped)
    return x[index]


@operation
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
    flipped, index = _window(
        x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask
    )
    if not flipped and x[index].shape == x.shape == update.shape:
        return update  # the window is all of `x`
    result = x.flip(flipped)  # a copy
    # a window that the end of `x` cuts short, down to nothing
    if result[index].shape != update.shape:
        raise IndexError(_misfit(update, result[index]))
    result[index] = update
    if flipped:
        result = result.flip(flipped)
    return result


def is_flipped(stride) -> bool:
    """Whether a slice with these strides (None: of 1) goes backwards on an axis."""
    return min(stride or [1]) < 0


def assign(x, update, **window) -> None:
    """`slice_update` in place, of a window that goes forwards."""
    _, index = _window(x.shape, **window)
    if x[index].shape != update.shape:
        raise IndexError(_misfit(update, x[index]))
    x[index] = update


def _misfit(update: torch.Tensor, window: torch.Tensor) -> str:
    shapes = list(update.shape), list(window.shape)
    return "an update of shape {} for a window of shape {}".format(*shapes)


def _window(sizes, begin, end, stride, begin_mask, end_mask, squeeze_mask):
    """MIL's slice parameters as (axes to flip first, index tuple): torch knows no
    negative stride.

    A squeezed axis takes one element; a masked begin or end is open.
    """
    rank = len(sizes)
    stride = stride or [1] * rank
    squeeze_mask = squeeze_mask or [False] * rank
    begin_mask = begin_mask or [False] * rank
    end_mask = end_mask or [False] * rank
    flipped, index = [], []
    for axis, size in enumerate(sizes):
        if squeeze_mask[axis]:
            index.append(begin[axis])
            continue
        first, last = begin[axis], end[axis]
        if begin_mask[axis]:
            first = None
        if end_mask[axis]:
            last = None
        if stride[axis] < 0:
            flipped.append(axis)
            first, last, _ = slice(first, last, stride[axis]).indices(size)
            first = size - 1 - first
            last = size - 1 - last
        index.append(slice(first, last, abs(stride[axis])))
    return flipped, tuple(index)


@operation
def slice_by_size(x, *, begin, size):
    begin, size, whole = np.array([begin, size, x.shape])
    begin = np.where(begin < 0, begin + whole, begin)
    stops = np.where(size == -1, whole, begin + size)
    first, last = begin.tolist(), stops.tolist()
    if not np.all((0 <= begin) & (begin <= stops) & (stops <= whole)):
        raise IndexError(f"elements {first} to {last} of shape {list(x.shape)}")
    return x[tuple(map(slice, first, last))]


@operation
def non_zero(x):
    return torch.nonzero(x)


def _wrap(indices: torch.Tensor, size, validate: bool) -> torch.Tensor:
    if validate and bool((indices < 0).any()):
        raise IndexError("a negative index")
    return torch.where(indices < 0, indices + size, indices).long()


def _take(x, indices, axis: int, validate: bool):
    """x.shape[:axis] + indices.shape + x.shape[axis+1:]"""
    indices = _wrap(indices, x.shape[axis], validate)
    taken = torch.index_select(x, axis, indices.reshape(-1))
    return taken.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


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


@operation
def gather(x, indices, *, axis=0, batch_dims=0, validate_indices=False):
    take = partial(_take, axis=axis % x.dim() - batch_dims, validate=validate_indices)
    return _batched(take, x, indices, batch_dims)


@operation
def gather_along_axis(x, indices, *, axis=0, validate_indices=False):
    return _take_along(x, indices, axis, validate_indices)


@operation
def gather_nd(x, indices, *, batch_dims=0, validate_indices=False):
    take = partial(_take_nd, validate=validate_indices)
    return _batched(take, x, indices, batch_dims)


def _combine(data, take, updates, mode: str):
    """`data` with `updates` combined into the elements that `take` would read."""
    positions = take(torch.arange(data.numel()).reshape(data.shape)).reshape(-1)
    flat = data.reshape(-1)
    updates = updates.reshape(-1).to(data.dtype)
    if mode == "sub":
        mode, updates = "add", -updates
    if mode in ("update", "add"):
        result = flat.index_put((positions,), updates, accumulate=mode == "add")
    elif mode == "div":
        ones = torch.ones_like(flat)
        result = flat / ones.scatter_reduce(0, positions, updates, "prod")
    else:
        reduction = {"mul": "prod", "max": "amax", "min": "amin"}[mode]
        result = flat.scatter_reduce(0, positions, updates, reduction)
    return result.reshape(data.shape)


@operation
def scatter(data, indices, updates, *, axis=0, mode="add", validate_indices=False):
    axis %= data.dim()
    take = partial(_take, indices=indices, axis=axis, validate=validate_indices)
    return _combine(data, take, updates, mode)


@operation
def scatter_along_axis(
    data, indices, updates, *, axis=0, mode="add", validate_indices=False
):
    take = partial(_take_along, indices=indices, axis=axis, validate=validate_indices)
    return _combine(data, take, updates, mode)


@operation
def scatter_nd(data, indices, updates, *, mode="add", validate_indices=False):
    take = partial(_take_nd, indices=indices, validate=validate_indices)
    return _combine(data, take, updates, mode)
