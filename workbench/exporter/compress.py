"""Compresses one matrix with what is known of its inputs.

The error of a weight matters by what it adds to the product, ½ Δ H Δᵀ for a change Δ of
the matrix and H = E[x xᵀ] of its inputs. GPTQ (arXiv 2210.17323) rounds the inputs of a
row one after the other and moves the error of each onto those that follow, by the
Cholesky factor of H⁻¹. It is defined for integers; here it also rounds to the entries of
lookup tables, which k-means chooses with squared errors weighted by E[x²]."""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from workbench.bundle.presets import Preset
from workbench.exporter.tables import group_tables
from workbench.exporter.weights import quantize

DAMPING = 0.01  # of the mean of H's diagonal, which is added to it
BLOCK = 64  # inputs that are rounded before their errors reach the others
ROWS = 1024  # rows that are in float32 at a time, a multiple of every group


@dataclass(frozen=True)
class InputStatistics:
    """What the rounding of a matrix needs to know of its inputs.

    Args:
        importance: E[x²] [C], float64.
        factor: the upper Cholesky factor of (H + damping)⁻¹ [C, C], float32.
    """

    importance: np.ndarray
    factor: np.ndarray

    @classmethod
    def of(cls, hessian: torch.Tensor) -> "InputStatistics":
        """The statistics of inputs with `hessian` = E[x xᵀ] [C, C]."""
        damped = hessian.double().clone()
        importance = damped.diagonal().clone()
        # an input that is always zero has no errors to move
        unused = importance <= 0
        damped[unused, unused] = 1
        damped.diagonal().add_(DAMPING * float(importance.mean()) + 1e-30)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        factor = torch.linalg.cholesky(inverse, upper=True)
        return cls(importance.numpy(), factor.float().numpy())


def compress_matrix(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> dict[str, np.ndarray]:
    """The arrays that store a matrix so that its product with `inputs` changes little.
    `weights.stored` rounds every weight to the nearest instead.

    Args:
        values: [R, C] fp16.
        preset: integers, or tables; its group divides R, its block C.

    Returns:
        `data` [R·C] int8 and `scale` fp16; `indices` [R·C] uint8 and `lut`
        [R / group, 2^bits] fp16, by role.
    """
    if preset.is_integer:
        arrays = quantize(values.clone(), preset)
        _feed_rows(values, arrays["data"], inputs, preset, arrays["scale"])
        return arrays
    matrix = (values + 0).numpy()  # 0, never -0
    group = preset.group or len(matrix)
    luts = group_tables(matrix, group, 1 << preset.bits, inputs.importance)
    indices = np.empty(matrix.size, np.uint8)
    _feed_rows(values, indices, inputs, preset, luts)
    return {"indices": indices, "lut": luts}


def decompress(
    arrays: dict[str, np.ndarray], preset: Preset, shape: tuple[int, int]
) -> torch.Tensor:
    """The values of a matrix [R, C] fp16 that `compress_matrix` stored."""
    if "data" in arrays:
        data = np.float32(arrays["data"]).reshape(len(arrays["scale"]), -1)
        dense = data * np.float32(arrays["scale"])[:, None]
    else:
        luts = arrays["lut"]
        indices = arrays["indices"].reshape(len(luts), -1)
        dense = np.take_along_axis(luts, indices.astype(np.intp), 1)
    return torch.from_numpy(np.float16(dense).reshape(shape))


def _feed_rows(
    values: torch.Tensor,
    codes: np.ndarray,
    inputs: InputStatistics,
    preset: Preset,
    levels: np.ndarray,
) -> None:
    """Fills `codes` [R·C] with the integers or indices of the rows of `values` [R, C].

    Args:
        levels: the scales of the integers, or the tables."""
    rows, width = values.shape
    codes = codes.reshape(rows, width)
    factor = torch.from_numpy(inputs.factor)
    if preset.is_integer:
        limit = 2 ** (preset.bits - 1) - 1
        block = preset.block or width
        scales = np.float32(levels).reshape(-1, width // block)
        scales = np.broadcast_to(scales, (rows, width // block))
    else:
        luts = np.float32(levels)
        group = rows // len(luts)
    # equal pieces whatever the number of threads, since products round by their shape
    for first in range(0, rows, ROWS):
        piece = slice(first, min(first + ROWS, rows))
        matrix = values[piece].float()
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            part = matrix[:, start:stop].contiguous()
            errors = torch.empty_like(part)
            triangle = factor[start:stop, start:stop].contiguous()
            arrays = part.numpy(), errors.numpy(), triangle.numpy()
            target = codes[piece, start:stop]
            if preset.is_integer:
                of_inputs = np.repeat(scales[piece], block, axis=1)[:, start:stop]
                _round_to_integers(
                    *arrays, np.ascontiguousarray(of_inputs), limit, target
                )
            else:
                _round_to_tables(*arrays, luts, group, first, target)
            if stop < width:
                matrix[:, stop:] -= errors @ factor[start:stop, stop:]


@njit(cache=True, nogil=True)
def _round_to_tables(part, errors, factor, tables, group, first, indices):
    """Rounds `part` [R, B], whose rows begin at row `first` of the matrix."""
    rows, width = part.shape
    for r in range(rows):
        table = tables[(first + r) // group]
        middles = (table[1:] + table[:-1]) / 2
        row = part[r]
        for i in range(width):
            index = np.searchsorted(middles, row[i])
            indices[r, i] = index
            error = (row[i] - table[index]) / factor[i, i]
            errors[r, i] = error
            row[i + 1 :] -= error * factor[i, i + 1 :]


@njit(cache=True, nogil=True)
def _round_to_integers(part, errors, factor, scales, limit, integers):
    """Rounds `part` [R, B] to multiples of `scales` [R, B]."""
    rows, width = part.shape
    for r in range(rows):
        row = part[r]
        for i in range(width):
            scale = scales[r, i]
            number = np.float32(0)
            if scale > 0:
                number = min(max(np.rint(row[i] / scale), -limit), limit)
            integers[r, i] = np.int8(number)
            error = (row[i] - number * scale) / factor[i, i]
            errors[r, i] = error
            row[i + 1 :] -= error * factor[i, i + 1 :]
