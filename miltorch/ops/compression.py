"""Stored weights made dense (`constexpr_*`) at load, and affine quantization of
activations at run time.

Computed in float32; the interpreter rounds each result once, to its declared dtype.

Every function without an underscore, and every entry of TABLE, is a rule, see `registry`.
"""

import torch

from miltorch.blob import unpack_bits

NO_SHIFT = torch.zeros(())
RANGES = {"int8": (-128, 127), "uint8": (0, 255)}  # of quantized activations


def _spread(factor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats a blockwise factor so that it lines up with `shape`: each axis of
    `factor` divides that of `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat_interleave(size // factor.shape[axis], axis)
    return factor


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


def dequantize(input, scale, zero_point=NO_SHIFT, *, axis=0):
    shift = _along(zero_point, axis, input.dim())
    return (input.float() - shift) * _along(scale, axis, input.dim())


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


def _table_of(shape: torch.Size, blocks: list[int]) -> torch.Tensor:
    """For each element of a weight of `shape` the number of its table, in a shape that
    meets `shape`.

    Axis i is cut into `blocks[i]` equal blocks, and tables are numbered along the last
    axis first. For a weight [4, 6] and blocks [2, 3] the numbers are
    [[0, 0, 1, 1, 2, 2]] in the first two rows and [[3, 3, 4, 4, 5, 5]] in the others."""
    number = torch.zeros((), dtype=torch.int)
    for axis, count in enumerate(blocks):
        if count > 1:
            size = shape[axis]
            block = torch.arange(size, dtype=torch.int) // (size // count)
            number = number * count + _along(block, axis, len(shape))
    return number


def constexpr_lut_to_dense(indices, lut, *, shape=None, vector_axis=None):
    """iOS 18: `lut` [blocks…, 2^bits, vector], `indices` one per (group of) element(s);
    iOS 16: one packed table."""
    if shape is not None:
        return lut[_unpacked(indices, lut.numel().bit_length() - 1, shape)]
    *blocks, _, width = lut.shape
    tables = lut.flatten(0, len(blocks) - 1)  # [number of tables, 2^bits, vector]
    values = tables[_table_of(indices.shape, blocks), indices.int()]  # [..., vector]
    if width == 1:
        return values[..., 0]
    axis = vector_axis % indices.dim()
    return values.movedim(-1, axis + 1).flatten(axis, axis + 1)


def constexpr_sparse_to_dense(nonzero_data, mask, *, shape=None):
    if shape is not None:
        mask = _unpacked(mask, 1, shape)
    dense = torch.zeros(mask.shape, dtype=nonzero_data.dtype)
    return dense.masked_scatter(mask.bool(), nonzero_data)


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


def constexpr_sparse_blockwise_shift_scale(data_mask, nonzero_data, scale, offset=None):
    dense = constexpr_blockwise_shift_scale(
        constexpr_sparse_to_dense(nonzero_data, data_mask), scale, offset
    )
    return data_mask, dense[data_mask.bool()]


TABLE = {
    "constexpr_affine_dequantize": lambda quantized_data, zero_point, scale, *, axis=0: (
        dequantize(quantized_data, scale, zero_point, axis=axis)
    ),
    "constexpr_cast": lambda source_val, *, output_dtype: source_val.float(),
}
