"""Moving and making data without computing on it: reshape, concat, tile, pad, fill.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import torch
import torch.nn.functional as F

from miltorch.ops.registry import bounded, padded

TABLE = {
    "transpose": lambda x, *, perm: x.permute(perm),
    "stack": lambda values, *, axis: torch.stack(values, axis),
    "split": lambda x, *, axis, num_splits=None, split_sizes=None: x.split(
        split_sizes or x.shape[axis] // num_splits, axis
    ),
    "shape": lambda x: torch.tensor(x.shape, dtype=torch.int32),
    "fill": lambda *, shape, value=0.0: torch.full(bounded(shape), value),
    "fill_like": lambda ref_tensor, *, value=0.0: torch.full(ref_tensor.shape, value),
    "sliding_windows": lambda x, *, axis, size, stride=1: x.unfold(
        axis, size, stride
    ).movedim(-1, axis % x.dim() + 1),
    "pixel_shuffle": lambda x, *, upscale_factor: F.pixel_shuffle(x, upscale_factor),
    "pixel_unshuffle": lambda x, *, downscale_factor: F.pixel_unshuffle(
        x, downscale_factor
    ),
}


def squeeze(x, *, axes=None):
    if axes is None:
        return x.squeeze()
    return x.squeeze(tuple(axes))


def reverse(x, *, axes=None):
    if axes is None:
        axes = list(range(x.dim()))
    return x.flip(axes)


def reshape(x, *, shape):
    """A 0 keeps the size of the axis that stands as far from the right, and is 1 where
    x has none."""
    if 0 not in shape or x.numel() == 0:
        return x.reshape(shape)
    sizes = [1] * (len(shape) - x.dim()) + list(x.shape)[max(x.dim() - len(shape), 0) :]
    return x.reshape([size or old for size, old in zip(shape, sizes, strict=True)])


def reshape_like(x, ref_tensors, *, begins, ends, end_masks):
    """The new shape is made of pieces of other shapes:
    `ref_tensors[i].shape[begins[i]:ends[i]]`, one after another."""
    shape = []
    for tensor, begin, end, to_end in zip(
        ref_tensors, begins, ends, end_masks, strict=True
    ):
        if to_end:
            end = None
        shape += tensor.shape[begin:end]
    return x.reshape(shape)


def flatten2d(x, *, axis=1):
    return x.reshape(x.shape[:axis].numel(), -1)


def concat(values, *, axis, interleave=False):
    if interleave:  # elements of the operands alternate along `axis`
        axis %= values[0].dim()
        return torch.stack(values, axis + 1).flatten(axis, axis + 1)
    return torch.cat(torch.atleast_1d(values), axis)


def expand_dims(x, *, axes):
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def tile(x, *, reps):
    bounded(n * r for n, r in zip(x.shape, reps, strict=True))
    return x.repeat(reps)


def reverse_sequence(x, *, lengths, seq_axis=0, batch_axis=0):
    """Reverses the first `lengths[i]` elements along `seq_axis` of the i-th entry of
    `batch_axis`."""
    rows = x.movedim((batch_axis, seq_axis), (0, 1)).clone()
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = row[:length].flip(0)
    return rows.movedim((0, 1), (batch_axis, seq_axis))


def pad(x, *, pad, mode="constant", constant_val=0.0):
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        return padded(x, pairs, value=constant_val)
    lead = x.dim() - len(pairs)  # torch takes two leading axes whatever the rank
    y = padded(x.reshape(1, -1, *x.shape[lead:]), pairs, mode)
    return y.reshape(*x.shape[:lead], *y.shape[2:])


def range_1d(*, start, end, step):
    bounded([(end - start) / step])
    return torch.arange(start, end, step)


def one_hot(indices, *, one_hot_vector_size, axis=-1, on_value=1, off_value=0):
    bounded([*indices.shape, one_hot_vector_size])
    hot = (indices[..., None] == torch.arange(one_hot_vector_size)).movedim(-1, axis)
    return torch.where(hot, torch.tensor(on_value), torch.tensor(off_value))


def band_part(x, *, lower=-1, upper=-1):
    if lower >= 0:
        x = x.triu(-lower)
    return x.tril(upper) if upper >= 0 else x


def _blocks(x, a: int, b: int):
    """Positions within a×b blocks as the first axes: [N, C, H, W] → [a, b, N, C, H/a,
    W/b]."""
    n, c, h, w = x.shape
    return x.reshape(n, c, h // a, a, w // b, b).permute(3, 5, 0, 1, 2, 4)


def _unblocked(blocks):
    """The inverse of `_blocks`."""
    return blocks.permute(2, 3, 4, 0, 5, 1).flatten(4).flatten(2, 3)


def depth_to_space(x, *, block_size):
    return _unblocked(x.unflatten(1, (block_size, block_size, -1)).movedim(0, 2))


def space_to_depth(x, *, block_size):
    return _blocks(x, block_size, block_size).movedim(2, 0).flatten(1, 3)


def space_to_batch(x, *, block_shape, paddings):
    """Each of the block's positions becomes a batch of its own: [N, C, H, W] → [a·b·N,
    C, H/a, W/b]."""
    return _blocks(padded(x, paddings), *block_shape).flatten(0, 2)


def batch_to_space(x, *, block_shape, crops):
    y = _unblocked(x.unflatten(0, (*block_shape, -1)))
    return padded(y, [(-before, -after) for before, after in crops])


def crop(x, *, crop_height, crop_width):
    return padded(x, [tuple(-n for n in crop_height), tuple(-n for n in crop_width)])
