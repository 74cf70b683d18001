"""Stored weights made dense (`constexpr_*`) at load, and affine quantization of
activations at run time.

Computed in float32; the interpreter rounds each result once, to its declared dtype.
"""

import torch

from miltorch.blob import unpack_bits
from miltorch.ops.registry import operation


def _spread(factor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats a blockwise factor so that it lines up with `shape`: each axis of
    `factor` divides that of `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat_interleave(size // factor.shape[axis], axis)
    return factor


@operation
def constexpr_blockwise_shift_scale(data, scale, offset=None):
    values = data.to(
        torch.float32, copy=True
    )  # one copy, changed in place: it may be large
    if offset is not None:
        values -= _spread(offset.float(), data.shape)
    return values.mul_(_spread(scale.float(), data.shape))


def _along(factor: torch.Tensor, axis, rank: int) -> torch.Tensor:
    """A scalar as it is, a vector laid along `axis` of a tensor of `rank`."""
    return (
        factor.float().reshape([-1 if a == axis % rank else 1 for a in range(rank)])
        if factor.dim()
        else factor.float()
    )


@operation
def constexpr_affine_dequantize(quantized_data, zero_point, scale, *, axis=0):
    return dequantize(quantized_data, scale, zero_point, axis=axis)


@operation
def dequantize(input, scale, zero_point=None, *, axis=0):
    shift = 0 if zero_point is None else _along(zero_point, axis, input.dim())
    return (input.float() - shift) * _along(scale, axis, input.dim())


@operation
def quantize(input, scale, zero_point=None, *, output_dtype, axis=0):
    shift = 0 if zero_point is None else _along(zero_point, axis, input.dim())
    low, high = (-128, 127) if output_dtype == "int8" else (0, 255)
    return torch.clamp(
        torch.round(input / _along(scale, axis, input.dim())) + shift, low, high
    )


def _unpacked(packed: torch.Tensor, bits: int, shape) -> torch.Tensor:
    """iOS 16's fields of `bits` bits, least significant first, as integers of
    `shape`."""
    values = unpack_bits(
        packed.reshape(-1).numpy(), bits, torch.Size(shape).numel(), signed=False
    )
    return torch.from_numpy(values).long().reshape(shape)


@operation
def constexpr_lut_to_dense(indices, lut, *, shape=None, vector_axis=None):
    """iOS 18: `lut` [blocks…, 2^bits, vector], `indices` one per (group of) element(s);
    iOS 16: one packed table."""
    if shape is not None:
        return lut[_unpacked(indices, lut.numel().bit_length() - 1, shape)]
    *blocks, _, width = lut.shape
    block_of = torch.zeros(indices.shape, dtype=torch.long)
    for axis, count in enumerate(blocks):
        position = torch.arange(indices.shape[axis]) // (indices.shape[axis] // count)
        block_of = block_of * count + position.reshape(
            [-1 if a == axis else 1 for a in range(indices.dim())]
        )
    values = lut.flatten(0, len(blocks) - 1)[block_of, indices.long()]  # [..., width]
    if width == 1:
        return values[..., 0]
    axis = vector_axis % indices.dim()
    return values.movedim(-1, axis + 1).flatten(axis, axis + 1)


@operation
def constexpr_sparse_to_dense(nonzero_data, mask, *, shape=None):
    mask = mask if shape is None else _unpacked(mask, 1, shape)
    return torch.zeros(mask.shape, dtype=nonzero_data.dtype).masked_scatter(
        mask.bool(), nonzero_data
    )


@operation
def constexpr_lut_to_sparse(
    indices_mask, indices_nonzero_data, lut, *, vector_axis=None
):
    dense = constexpr_lut_to_dense(
        constexpr_sparse_to_dense(indices_nonzero_data, indices_mask),
        lut,
        vector_axis=vector_axis,
    )
    mask = (
        indices_mask
        if lut.shape[-1] == 1
        else indices_mask.repeat_interleave(lut.shape[-1], vector_axis)
    )
    return mask, dense[mask.bool()]


@operation
def constexpr_sparse_blockwise_shift_scale(data_mask, nonzero_data, scale, offset=None):
    dense = constexpr_blockwise_shift_scale(
        constexpr_sparse_to_dense(nonzero_data, data_mask), scale, offset
    )
    return data_mask, dense[data_mask.bool()]


@operation
def constexpr_cast(source_val, *, output_dtype):
    return source_val.float()
