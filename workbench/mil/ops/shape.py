"""Moving data without changing it: reshape, slice, concat, gather, pad."""

import torch
import torch.nn.functional as F

from . import rule


@rule()
def reshape(x, *, shape):
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


@rule()
def transpose(x, *, perm):
    return x.permute(perm)


@rule()
def concat(values, *, axis, interleave=False):
    if interleave:  # elements of the operands alternate along `axis`
        stacked = torch.stack(values, axis % values[0].dim() + 1)
        return stacked.flatten(axis % values[0].dim(), axis % values[0].dim() + 1)
    return torch.cat([torch.atleast_1d(v) for v in values], axis)


@rule()
def stack(values, *, axis):
    return torch.stack(values, axis)


@rule()
def split(x, *, axis, num_splits=None, split_sizes=None):
    return x.split(split_sizes or x.shape[axis] // num_splits, axis)


@rule()
def expand_dims(x, *, axes):
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@rule()
def squeeze(x, *, axes=None):
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@rule()
def tile(x, *, reps):
    return x.repeat(reps)


@rule()
def shape(x):
    return torch.tensor(x.shape, dtype=torch.int32)


@rule()
def fill(*, shape, value=0.0):
    return torch.full(shape, value)


@rule("range_1d")
def range_1d(*, start, end, step):
    return torch.arange(start, end, step)


@rule("slice_by_index")
def slice_by_index(x, *, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    return x[_indices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


@rule("slice_update")
def slice_update(x, update, *, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    result = x.clone()
    result[_indices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)] = update
    return result


def _indices(sizes, begin, end, stride, begin_mask, end_mask, squeeze_mask):
    """MIL's slice parameters as an index tuple; a squeezed axis takes one element, a negative stride gathers."""
    rank = len(sizes)
    stride, squeeze_mask = stride or [1] * rank, squeeze_mask or [False] * rank
    begin_mask, end_mask = begin_mask or [False] * rank, end_mask or [False] * rank
    index = []
    for axis, size in enumerate(sizes):
        if squeeze_mask[axis]:
            index.append(begin[axis])
            continue
        first = None if begin_mask[axis] else begin[axis]
        last = None if end_mask[axis] else end[axis]
        if stride[axis] > 0:
            index.append(slice(first, last, stride[axis]))
        else:
            index.append(torch.arange(size)[torch.tensor(range(*slice(first, last, stride[axis]).indices(size)))])
    return tuple(index)


@rule("slice_by_size")
def slice_by_size(x, *, begin, size):
    stops = [x.shape[i] if n == -1 else b + n for i, (b, n) in enumerate(zip(begin, size, strict=True))]
    return x[tuple(map(slice, begin, stops))]


@rule()
def reverse(x, *, axes=None):
    return x.flip(list(range(x.dim())) if axes is None else axes)


@rule()
def pad(x, *, pad, mode="constant", constant_val=0.0):
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    edges = [edge for pair in reversed(pairs) for edge in pair]
    if mode == "constant":
        return F.pad(x, edges, value=constant_val)
    return F.pad(x[None], edges, mode="replicate" if mode == "replicate" else "reflect")[0]


@rule()
def gather(x, indices, *, axis=0, batch_dims=0, validate_indices=False):
    axis = axis % x.dim()
    indices = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    if batch_dims == 0:
        taken = torch.index_select(x, axis, indices.reshape(-1))
        return taken.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    rows = [gather(a, i, axis=axis - 1, batch_dims=batch_dims - 1) for a, i in zip(x, indices, strict=True)]
    return torch.stack(rows)


@rule("gather_along_axis")
def gather_along_axis(x, indices, *, axis=0, validate_indices=False):
    return torch.take_along_dim(x, torch.where(indices < 0, indices + x.shape[axis], indices).long(), axis)


@rule("one_hot")
def one_hot(indices, *, one_hot_vector_size, axis=-1, on_value=1, off_value=0):
    hot = F.one_hot(indices.long(), one_hot_vector_size).movedim(-1, axis)
    return torch.where(hot.bool(), torch.tensor(on_value), torch.tensor(off_value))


@rule("band_part")
def band_part(x, *, lower=-1, upper=-1):
    rows, columns = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])
    keep = ((lower < 0) | (rows - columns <= lower)) & ((upper < 0) | (columns - rows <= upper))
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


@rule()
def cumsum(x, *, axis=0, exclusive=False, reverse=False):
    x = x.flip(axis) if reverse else x
    total = x.cumsum(axis) - (x if exclusive else 0)
    return total.flip(axis) if reverse else total
