"""Stored weights made dense (`constexpr_*`) at load, and affine quantization of
activations at run time.

Computed in float32; the interpreter rounds each result once, to its declared dtype.
"""

from collections.abc import Callable

import torch

from miltorch.blob import unpack_bits
from miltorch.ops.registry import operation
from miltorch.program import Op

NO_SHIFT = torch.zeros(())
RANGES = {"int8": (-128, 127), "uint8": (0, 255)}  # of quantized activations
DENSE = 1 << 19  # weights in float32 at a time: 2 MiB stay in a core's cache
# kind → the operand that holds something for every weight
STORED = {
    "constexpr_blockwise_shift_scale": "data",
    "constexpr_lut_to_dense": "indices",
}


def half_by_rows(op: Op, function: Callable, operands: dict) -> torch.Tensor | None:
    """The fp16 result of a decompression, made `DENSE` weights at a time: fresh memory
    for all of them in float32 takes longer than the arithmetic. None where the result
    is not fp16, is small, or where a factor or table belongs to several rows."""
    declared = op.outputs[0][1]
    stored = operands.get(STORED.get(op.kind))
    if stored is None or declared.dtype != "FLOAT16" or stored.shape != declared.shape:
        return None
    count = len(stored) if stored.dim() else 0
    rows = max(1, DENSE * count // max(1, stored.numel()))
    arrays = {n: v for n, v in operands.items() if isinstance(v, torch.Tensor)}
    if rows >= count or any(
        v.dim() and len(v) not in (1, count) for v in arrays.values()
    ):
        return None
    half = torch.empty(stored.shape, dtype=torch.float16)
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        own = {n: v[part] for n, v in arrays.items() if v.dim() and len(v) == count}
        half[part] = function(**operands | own)
    return half


def _spread(factor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats a blockwise factor so that it lines up with `shape`: each axis of
    `factor` divides that of `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat_interleave(size // factor.shape[axis], axis)
    return factor


@operation
def constexpr_blockwise_shift_scale(data, scale, offset=None):
    # one copy, changed in place: it may be large
    values = data.to(torch.float32, copy=True)
    if offset is not None:
        values -= _spread(offset.float(), data.shape)
    return values.mul_(_spread(scale.float(), data.shape))


def _along(factor: torch.Tensor, axis, rank: int) -> torch.Tensor:
    """A scalar as it is, a vector laid along `axis` of a tensor of `rank`."""
    if factor.dim() == 0:
        return factor
    shape = [1] * rank
    shape[axis] = -1
    return factor.reshape(shape)


@operation
def constexpr_affine_dequantize(quantized_data, zero_point, scale, *, axis=0):
    return dequantize(quantized_data, scale, zero_point, axis=axis)


@operation
def dequantize(input, scale, zero_point=NO_SHIFT, *, axis=0):
    shift = _along(zero_point, axis, input.dim())
    return (input.float() - shift) * _along(scale, axis, input.dim())


@operation
def quantize(input, scale, zero_point=NO_SHIFT, *, output_dtype, axis=0):
    steps = torch.round(input / _along(scale, axis, input.dim()))
    shifted = steps + _along(zero_point, axis, input.dim())
    return torch.clamp(shifted, *RANGES[output_dtype])


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
        block_of = block_of * count + _along(position, axis, indices.dim())
    values = lut.flatten(0, len(blocks) - 1)[block_of, indices.long()]  # [..., width]
    if width == 1:
        return values[..., 0]
    axis = vector_axis % indices.dim()
    return values.movedim(-1, axis + 1).flatten(axis, axis + 1)


@operation
def constexpr_sparse_to_dense(nonzero_data, mask, *, shape=None):
    if shape is not None:
        mask = _unpacked(mask, 1, shape)
    dense = torch.zeros(mask.shape, dtype=nonzero_data.dtype)
    return dense.masked_scatter(mask.bool(), nonzero_data)


@operation
def constexpr_lut_to_sparse(
    indices_mask, indices_nonzero_data, lut, *, vector_axis=None
):
    dense = constexpr_lut_to_dense(
        constexpr_sparse_to_dense(indices_nonzero_data, indices_mask),
        lut,
        vector_axis=vector_axis,
    )
    width = lut.shape[-1]
    if width > 1:
        indices_mask = indices_mask.repeat_interleave(width, vector_axis)
    return indices_mask, dense[indices_mask.bool()]


@operation
def constexpr_sparse_blockwise_shift_scale(data_mask, nonzero_data, scale, offset=None):
    dense = constexpr_blockwise_shift_scale(
        constexpr_sparse_to_dense(nonzero_data, data_mask), scale, offset
    )
    return data_mask, dense[data_mask.bool()]


@operation
def constexpr_cast(source_val, *, output_dtype):
    return source_val.float()
