"""Reading and writing parts of tensors: slices, gather and scatter.

A negative index counts from the end, unless `validate_indices` (iOS 17) refuses it. One
past the end raises: MIL leaves it undefined."""

import torch

from miltorch.ops.registry import operation


@operation
def slice_by_index(
    x, *, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
):
    flipped, index = _window(
        x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask
    )
    return (x.flip(flipped) if flipped else x)[index]


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
    result = x.flip(flipped) if flipped else x.clone()
    if (
        result[index].shape != update.shape
    ):  # a window that the end of `x` cuts short, down to nothing
        raise IndexError(
            f"an update of shape {list(update.shape)} for a window of shape "
            f"{list(result[index].shape)}"
        )
    result[index] = update
    return result.flip(flipped) if flipped else result


def _window(sizes, begin, end, stride, begin_mask, end_mask, squeeze_mask):
    """MIL's slice parameters as (axes to flip first, index tuple): torch knows no
    negative stride.

    A squeezed axis takes one element; a masked begin or end is open.
    """
    rank = len(sizes)
    stride, squeeze_mask = stride or [1] * rank, squeeze_mask or [False] * rank
    begin_mask, end_mask = begin_mask or [False] * rank, end_mask or [False] * rank
    flipped, index = [], []
    for axis, size in enumerate(sizes):
        if squeeze_mask[axis]:
            index.append(begin[axis])
            continue
        first = None if begin_mask[axis] else begin[axis]
        last = None if end_mask[axis] else end[axis]
        if stride[axis] < 0:
            flipped.append(axis)
            first, last, _ = slice(first, last, stride[axis]).indices(size)
            first, last = size - 1 - first, size - 1 - last
        index.append(slice(first, last, abs(stride[axis])))
    return flipped, tuple(index)


@operation
def slice_by_size(x, *, begin, size):
    begin = [b + n if b < 0 else b for b, n in zip(begin, x.shape, strict=True)]
    stops = [
        whole if n == -1 else b + n
        for b, n, whole in zip(begin, size, x.shape, strict=True)
    ]
    if not all(
        0 <= b <= stop <= n for b, stop, n in zip(begin, stops, x.shape, strict=True)
    ):
        raise IndexError(f"elements {begin} to {stops} of shape {list(x.shape)}")
    return x[tuple(map(slice, begin, stops))]


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
    return torch.gather(
        x, axis, _wrap(indices, x.shape[axis], validate)
    )  # take_along_dim checks no bounds


def _take_nd(x, indices, validate: bool):
    """The last axis of `indices` addresses the first axes of x."""
    depth = indices.shape[-1]
    return x[tuple(_wrap(indices, torch.tensor(x.shape[:depth]), validate).unbind(-1))]


@operation
def gather(x, indices, *, axis=0, batch_dims=0, validate_indices=False):
    axis = axis % x.dim()
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        return torch.stack(
            [
                gather(
                    *pair,
                    axis=axis - 1,
                    batch_dims=batch_dims - 1,
                    validate_indices=validate_indices,
                )
                for pair in pairs
            ]
        )
    return _take(x, indices, axis, validate_indices)


@operation
def gather_along_axis(x, indices, *, axis=0, validate_indices=False):
    return _take_along(x, indices, axis, validate_indices)


@operation
def gather_nd(x, indices, *, batch_dims=0, validate_indices=False):
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        return torch.stack(
            [
                gather_nd(
                    *pair, batch_dims=batch_dims - 1, validate_indices=validate_indices
                )
                for pair in pairs
            ]
        )
    return _take_nd(x, indices, validate_indices)


def _combine(data, take, updates, mode: str):
    """`data` with `updates` combined into the elements that `take` would read."""
    positions = take(torch.arange(data.numel()).reshape(data.shape)).reshape(-1)
    flat, updates = data.reshape(-1), updates.reshape(-1).to(data.dtype)
    if mode == "update":
        result = flat.index_put((positions,), updates)
    elif mode in ("add", "sub"):
        result = flat.index_put(
            (positions,), updates if mode == "add" else -updates, accumulate=True
        )
    elif mode == "div":
        result = flat / torch.ones_like(flat).scatter_reduce(
            0, positions, updates, "prod"
        )
    else:
        reduction = {"mul": "prod", "max": "amax", "min": "amin"}[mode]
        result = flat.scatter_reduce(0, positions, updates, reduction)
    return result.reshape(data.shape)


@operation
def scatter(data, indices, updates, *, axis=0, mode="add", validate_indices=False):
    return _combine(
        data,
        lambda grid: _take(grid, indices, axis % data.dim(), validate_indices),
        updates,
        mode,
    )


@operation
def scatter_along_axis(
    data, indices, updates, *, axis=0, mode="add", validate_indices=False
):
    return _combine(
        data,
        lambda grid: _take_along(grid, indices, axis, validate_indices),
        updates,
        mode,
    )


@operation
def scatter_nd(data, indices, updates, *, mode="add", validate_indices=False):
    return _combine(
        data, lambda grid: _take_nd(grid, indices, validate_indices), updates, mode
    )
