"""Decompression of stored weights (`constexpr_*`): computed in float32 and rounded once, at load, to the declared type."""

import torch

from . import rule


def _spread(factor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats a blockwise factor so that it lines up with `shape`: each axis of `factor` divides that of `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat_interleave(size // factor.shape[axis], axis)
    return factor


@rule()
def constexpr_blockwise_shift_scale(data, scale, offset=None):
    data = data.float() if offset is None else data.float() - _spread(offset.float(), data.shape)
    return data * _spread(scale.float(), data.shape)


@rule()
def constexpr_affine_dequantize(quantized_data, zero_point, scale, *, axis=0):
    along = [-1 if a == axis % quantized_data.dim() else 1 for a in range(quantized_data.dim())]
    zero, scale = (v.float().reshape(along) if v.dim() else v.float() for v in (zero_point, scale))
    return (quantized_data.float() - zero) * scale


@rule()
def constexpr_lut_to_dense(indices, lut, *, vector_axis=None):
    """iOS 18 form: `lut` [blocks…, 2^bits, vector], `indices` a weight index per (group of) element(s)."""
    *blocks, _, width = lut.shape
    block_of = torch.zeros(indices.shape, dtype=torch.long)
    for axis, count in enumerate(blocks):
        position = torch.arange(indices.shape[axis]) // (indices.shape[axis] // count)
        block_of = block_of * count + position.reshape([-1 if a == axis else 1 for a in range(indices.dim())])
    values = lut.flatten(0, len(blocks) - 1)[block_of, indices.long()]  # [..., width]
    if width == 1:
        return values[..., 0]
    axis = vector_axis % indices.dim()
    return values.movedim(-1, axis + 1).flatten(axis, axis + 1)


@rule()
def constexpr_cast(source_val, *, output_dtype):
    return source_val.float()
