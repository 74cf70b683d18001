"""Compresses one matrix so that its product with its inputs changes little.

A change Δ of the matrix costs ½ Δ H Δᵀ, the error that it adds to the product, with
H = E[x xᵀ] of the inputs x. GPTQ (arXiv 2210.17323) rounds the weights of a row one after
the other, those of the inputs with the largest E[x²] first, and moves the error of each
onto those that follow, by the Cholesky factor of H⁻¹. It is defined for integers; here it
also rounds to the entries of lookup tables. k-means chooses the entries with squared errors
weighted by √E[x²]; after the rounding, entries and indices are improved in turn
(`_refine_tables`). For fixed indices the best entries are a least-squares problem, and for
fixed entries the index of one weight after another is exchanged for a better one, so that
Δ H Δᵀ never rises before the entries are rounded to fp16 at the end.

`compress_matrix` is the entry: GPTQ is `_gptq_columns`, with one kernel for integers and
one for tables; the tables are solved in `tables.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numba import njit

from workbench.bundle.presets import Preset
from workbench.exporter.tables import (
    CELLS,
    entry_midpoints,
    group_tables,
    nearest_entry,
)
from workbench.exporter.threads import call_in_parts
from workbench.exporter.weights import Arrays, quantize

# of GPTQ: columns that are rounded before their errors reach the others in one product
COLUMNS_PER_BLOCK = 64
ROWS_PER_PIECE = 1024  # rows that are in float32 at a time, a multiple of every group
INVERTED_AT_ONCE = 256  # columns of a triangular matrix whose inverse LAPACK computes
REFINEMENTS = 2  # of the indices and then the entries of a table
SWEEPS = 3  # over the indices of a row, in each refinement


class BlockRounding(Protocol):
    """Rounds a block of columns of a matrix, and stores the indices or integers that it
    rounded to."""

    def __call__(
        self,
        block: np.ndarray,
        scaled_errors: np.ndarray,
        factor: np.ndarray,
        columns: np.ndarray,
    ) -> None:
        """Rounds the columns of a block one after the other.

        Args:
            block: the values [R, B] float32. The error of each column is moved onto later
                columns.
            scaled_errors: [R, B] float32, filled with the error of each column divided by
                its entry of the factor's diagonal.
            factor: the block's part [B, B] of `InputStatistics.factor`.
            columns: the numbers [B] of the block's columns in the matrix.
        """


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs x of a matrix, by which its values are rounded.

    Args:
        mean_squares: E[x²] [C], float64.
        hessian: H with damping [C, C], float32.
        order: the inputs [C] by falling E[x²].
        factor: the upper Cholesky factor of the inverse of `hessian` with its inputs in
            `order` [C, C], float32.
    """

    mean_squares: np.ndarray
    hessian: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, hessian: torch.Tensor, damping: float) -> "InputStatistics":
        """The statistics of inputs with `hessian` = E[x xᵀ] [C, C], to whose diagonal
        `damping` is added: estimated correlations hold less on other text."""
        damped = hessian.double().clone()
        mean_squares = damped.diagonal().clone()
        # inputs that are mostly zero have no damping of their own
        damped.diagonal().add_(damping + 1e-5 * float(mean_squares.mean()) + 1e-30)
        order = torch.argsort(mean_squares, descending=True, stable=True)
        # H = R Rᵀ with R upper triangular, the flipped factor of the flipped matrix: then
        # H⁻¹ = R⁻ᵀ R⁻¹, and R⁻¹ is the factor of the inverse
        flipped = damped[order][:, order].flip(0, 1)
        factor = _invert_upper(torch.linalg.cholesky(flipped).flip(0, 1))
        return cls(mean_squares.numpy(), damped.float(), order, factor.float())


def _invert_upper(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of an upper triangular matrix, from those of its quarters: most of it are
    products, which take half the time of LAPACK's inverse of a large matrix."""
    width = len(matrix)
    if width <= INVERTED_AT_ONCE:
        identity = torch.eye(width, dtype=matrix.dtype)
        return torch.linalg.solve_triangular(matrix, identity, upper=True)
    half = width // 2
    inverse = torch.zeros_like(matrix)
    first = inverse[:half, :half] = _invert_upper(matrix[:half, :half])
    last = inverse[half:, half:] = _invert_upper(matrix[half:, half:])
    inverse[:half, half:] = -first @ (matrix[:half, half:] @ last)
    return inverse


def compress_matrix(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> Arrays:
    """The arrays that store a matrix so that its product with `inputs` changes little.
    `weights.encode_weight` rounds every weight to the nearest instead.

    Args:
        values: [R, C] fp16.
        preset: integers, or tables; its group divides R, its block C.

    Returns:
        `data` [R·C] int8 and `scale` fp16; `indices` [R·C] uint8 and `lut`
        [R / group, 2^bits] fp16, by role.
    """
    if preset.is_integer:
        return _compress_to_integers(values, preset, inputs)
    return _compress_to_tables(values, preset, inputs)


def _compress_to_integers(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> Arrays:
    """See `compress_matrix`. The scales are those of rounding to the nearest."""
    rows, width = values.shape
    arrays = quantize(values.clone(), preset)
    integers = arrays["data"].reshape(rows, width)
    block = preset.block or width
    scales = np.float32(arrays["scale"]).reshape(-1, width // block)
    scales = np.broadcast_to(scales, (rows, width // block))
    limit = 2 ** (preset.bits - 1) - 1
    for piece in _row_pieces(rows):
        weight_scales = torch.from_numpy(np.repeat(scales[piece], block, axis=1))
        integers[piece] = _gptq_integers(
            values[piece].float(), weight_scales, limit, inputs
        )
    return arrays


def _compress_to_tables(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> Arrays:
    """See `compress_matrix`.

    Tables are refined, so that k-means has half the cells that it has for tables that stay.
    Measured on five layers of SmolLM2 with one refinement, all cells change the error
    Δ H Δᵀ of a matrix by less than 0.1% on average."""
    rows, width = values.shape
    matrix = (values + 0).numpy()  # 0, never -0
    group = preset.group
    importance = np.sqrt(inputs.mean_squares)
    count = 1 << preset.bits
    luts = group_tables(matrix, group, count, importance, cells=CELLS[count] // 2)
    indices = np.empty((rows, width), np.uint8)
    for piece in _row_pieces(rows):
        groups = slice(piece.start // group, piece.stop // group)
        part = values[piece].float()
        tables = np.float32(luts[groups])
        indices[piece] = _gptq_tables(part, tables, inputs)
        _refine_tables(part, tables, indices[piece], inputs.hessian)
        luts[groups] = tables
    return {"indices": indices.reshape(-1), "lut": luts}


def _row_pieces(rows: int) -> list[slice]:
    """Slices of `ROWS_PER_PIECE` rows each, the last of fewer. They do not depend on the
    number of threads, since the rounding of a product depends on its shape."""
    return [
        slice(r, min(r + ROWS_PER_PIECE, rows)) for r in range(0, rows, ROWS_PER_PIECE)
    ]


def decompress(arrays: Arrays, preset: Preset, shape: tuple[int, int]) -> torch.Tensor:
    """The values of a matrix [R, C] fp16 that `compress_matrix` stored."""
    if "data" in arrays:
        data = np.float32(arrays["data"]).reshape(len(arrays["scale"]), -1)
        dense = data * np.float32(arrays["scale"])[:, None]
    else:
        luts = arrays["lut"]
        indices = arrays["indices"].reshape(len(luts), -1)
        dense = np.take_along_axis(luts, indices.astype(np.intp), 1)
    return torch.from_numpy(np.float16(dense).reshape(shape))


def _gptq_tables(
    values: torch.Tensor, tables: np.ndarray, inputs: InputStatistics
) -> np.ndarray:
    """GPTQ with lookup tables: the index [R, C] uint8 of the entry that each value is
    rounded to.

    Args:
        values: [R, C] float32.
        tables: [G, K] float32, ascending; each serves R / G rows.
    """
    indices = np.empty(values.shape, np.uint8)
    group = len(values) // len(tables)

    def round_to_entries(
        block: np.ndarray,
        scaled_errors: np.ndarray,
        factor: np.ndarray,
        columns: np.ndarray,
    ) -> None:
        indices_of_block = np.empty(block.shape, np.uint8)

        def round_groups(groups: slice) -> None:
            rows = slice(group * groups.start, group * groups.stop)
            _round_to_tables(
                block[rows],
                scaled_errors[rows],
                factor,
                tables[groups],
                group,
                indices_of_block[rows],
            )

        call_in_parts(round_groups, len(tables))
        indices[:, columns] = indices_of_block

    _gptq_columns(values, inputs, round_to_entries)
    return indices


def _gptq_integers(
    values: torch.Tensor, scales: torch.Tensor, limit: int, inputs: InputStatistics
) -> np.ndarray:
    """GPTQ with integers: the integer [R, C] int8, at most ±`limit`, that each value is
    rounded to.

    Args:
        values: [R, C] float32.
        scales: [R, C] float32, the factor of each integer.
    """
    integers = np.empty(values.shape, np.int8)

    def round_to_multiples(
        block: np.ndarray,
        scaled_errors: np.ndarray,
        factor: np.ndarray,
        columns: np.ndarray,
    ) -> None:
        integers_of_block = np.empty(block.shape, np.int8)
        scales_of_block = scales[:, columns].contiguous().numpy()

        def round_rows(rows: slice) -> None:
            _round_to_integers(
                block[rows],
                scaled_errors[rows],
                factor,
                scales_of_block[rows],
                limit,
                integers_of_block[rows],
            )

        call_in_parts(round_rows, len(block))
        integers[:, columns] = integers_of_block

    _gptq_columns(values, inputs, round_to_multiples)
    return integers


def _gptq_columns(
    values: torch.Tensor, inputs: InputStatistics, round_block: BlockRounding
) -> None:
    """Rounds the columns of float32 `values` [R, C] in the order of `inputs`, block
    after block, and moves the errors of each block onto the columns that follow."""
    ordered = values[:, inputs.order]  # a copy, which changes
    width = ordered.shape[1]
    for start in range(0, width, COLUMNS_PER_BLOCK):
        stop = min(start + COLUMNS_PER_BLOCK, width)
        block = ordered[:, start:stop].contiguous()
        scaled_errors = torch.empty_like(block)
        factor = inputs.factor[start:stop, start:stop].contiguous()
        columns = inputs.order[start:stop].numpy()
        round_block(block.numpy(), scaled_errors.numpy(), factor.numpy(), columns)
        if stop < width:
            ordered[:, stop:] -= scaled_errors @ inputs.factor[start:stop, stop:]


def _refine_tables(
    values: torch.Tensor, tables: np.ndarray, indices: np.ndarray, hessian: torch.Tensor
) -> None:
    """Lowers the error Δ H Δᵀ of every group: improves its indices and its entries in turn,
    in place.

    Args:
        values: [R, C] float32.
        tables: [G, K] float32 with values of fp16, ascending.
        indices: [R, C] uint8 into the table of each row's group.
    """
    group = len(values) // len(tables)
    products = (_select(tables, indices, group) - values) @ hessian

    def exchange_groups(groups: slice) -> None:
        rows = slice(group * groups.start, group * groups.stop)
        _exchange_indices(
            products[rows].numpy(),
            indices[rows],
            tables[groups],
            hessian.numpy(),
            group,
            SWEEPS,
        )

    for _ in range(REFINEMENTS):
        call_in_parts(exchange_groups, len(tables))
        _improve_entries(tables, indices, products, hessian)
    # values of fp16 again; 0, never -0
    largest = np.finfo(np.float16).max
    tables[:] = np.float32(np.float16(tables.clip(-largest, largest))) + 0


def _improve_entries(
    tables: np.ndarray,
    indices: np.ndarray,
    products: torch.Tensor,
    hessian: torch.Tensor,
) -> None:
    """Moves the entries of each group towards those that are best for its indices. Tables
    stay sorted, and indices follow.

    With S the linear map from the entries x of a group to the values that its indices
    select, the error Δ H Δᵀ of Δ = S x − values is least where Sᵀ(S x H) = Sᵀ(values H),
    the normal equations A x = b. The entries take one step of steepest descent towards
    their solution, preconditioned with the diagonal of A, of the length at which the error
    is least. A [K, K] is never written out: the step takes one product with H for all
    groups.

    Args:
        tables: [G, K] float32, ascending.
        indices: [R, C] uint8 into the table of each row's group.
        products: Δ H [R, C] float32, which follow the entries.
    """
    group = len(indices) // len(tables)

    def sum_by_entry(matrix: torch.Tensor) -> torch.Tensor:
        """Sᵀ: the sums [G, K] of a matrix [R, C] over the weights of each entry."""
        sums = np.zeros(tables.shape, np.float32)
        _for_groups(_add_by_entry, group, sums, indices, matrix.numpy())
        return torch.from_numpy(sums)

    residual = -sum_by_entry(products)  # b − A x
    diagonal = sum_by_entry(hessian.diagonal().expand(indices.shape)).clamp(min=1e-30)
    direction = residual / diagonal
    change = _select(direction.numpy(), indices, group)
    changed_products = change @ hessian
    curvature = (change * changed_products).reshape(len(tables), -1).double().sum(1)
    slope = (residual * direction).double().sum(1)
    length = (slope / curvature.clamp(min=1e-30)).float()[:, None]
    products += changed_products * length.repeat_interleave(group, 0)
    entries = torch.from_numpy(tables) + length * direction
    entries, order = entries.sort(dim=1, stable=True)
    tables[:] = entries.numpy()
    new_indices = torch.argsort(order, 1).to(torch.uint8)  # of the old entries
    _for_groups(_select_entries, group, new_indices.numpy(), indices, indices)


def _select(tables: np.ndarray, indices: np.ndarray, group: int) -> torch.Tensor:
    """The values [R, C] float32 that `indices` select from the tables [G, K] of groups."""
    selected = np.empty(indices.shape, np.float32)
    _for_groups(_select_entries, group, tables, indices, selected)
    return torch.from_numpy(selected)


def _for_groups(
    kernel: Callable, group: int, tables: np.ndarray, *matrices: np.ndarray
) -> None:
    """Calls a kernel with parts of `tables` [G, K], the rows of `matrices` [R, C] that they
    serve, and the number of rows that share a table, `group`."""

    def call(groups: slice) -> None:
        rows = slice(group * groups.start, group * groups.stop)
        kernel(tables[groups], *(matrix[rows] for matrix in matrices), group)

    call_in_parts(call, len(tables))


# Loops are written out in these kernels: an expression over a part of a row would take
# memory for its result in every column. A division by zero gives inf or nan in them: the
# check that Python's errors need would be in every step.


@njit(cache=True, nogil=True)
def _select_entries(tables, indices, selected, group):
    """Fills `selected` [R, C] with the entries of `tables` [R / group, K] at `indices`
    [R, C]."""
    rows, width = indices.shape
    for r in range(rows):
        table = tables[r // group]
        for i in range(width):
            selected[r, i] = table[indices[r, i]]


@njit(cache=True, nogil=True)
def _add_by_entry(sums, indices, products, group):
    """Adds `products` [R, C] to the `sums` [R / group, K] of the entries that `indices`
    [R, C] select."""
    rows, width = indices.shape
    for r in range(rows):
        sums_of_group = sums[r // group]
        for i in range(width):
            sums_of_group[indices[r, i]] += products[r, i]


@njit(cache=True, nogil=True, error_model="numpy")
def _exchange_indices(gradient, indices, tables, hessian, group, sweeps):
    """Exchanges the index of one weight after the other for that of the entry with the
    least error, given all other weights of its row: coordinate descent on Δ H Δᵀ.

    Args:
        gradient: [R, C] float32, (stored − values) H, half the gradient of the error by
            the stored values. It is updated with every exchange.
        indices: [R, C] uint8, changed in place.
        tables: [R / group, K] float32, ascending.
        hessian: [C, C] float32.
        sweeps: over the weights of a row.
    """
    rows, width = gradient.shape
    last = tables.shape[1] - 1
    diagonal = np.diag(hessian).copy()  # side by side in memory
    for r in range(rows):
        table = tables[r // group]
        midpoints = entry_midpoints(table)
        row_gradient = gradient[r]
        for _ in range(sweeps):
            for i in range(width):
                index = indices[r, i]
                entry = table[index]
                best_value = entry - row_gradient[i] / diagonal[i]
                # most weights keep their entry, which two comparisons show
                is_above = index == 0 or midpoints[index - 1] < best_value
                if is_above and (index == last or best_value <= midpoints[index]):
                    continue
                index = nearest_entry(midpoints, best_value)
                change = table[index] - entry
                if change != 0:
                    indices[r, i] = index
                    for j in range(width):
                        row_gradient[j] += change * hessian[i, j]


@njit(cache=True, nogil=True, error_model="numpy")
def _round_to_tables(block, scaled_errors, factor, tables, group, indices):
    """Rounds a block of columns to entries of `tables` [R / group, K], and moves the error
    of each column onto those that follow in the block. Fills `indices` [R, B] with the
    indices of these entries. The other arguments are those of `BlockRounding`."""
    rows, width = block.shape
    for r in range(rows):
        table = tables[r // group]
        midpoints = entry_midpoints(table)
        row = block[r]
        for i in range(width):
            index = nearest_entry(midpoints, row[i])
            indices[r, i] = index
            scaled_error = (row[i] - table[index]) / factor[i, i]
            scaled_errors[r, i] = scaled_error
            for j in range(width):  # see `_round_to_integers`
                row[j] -= scaled_error * factor[i, j]


@njit(cache=True, nogil=True, error_model="numpy")
def _round_to_integers(block, scaled_errors, factor, scales, limit, integers):
    """Rounds a block of columns to multiples of `scales` [R, B], at most ±`limit` of them;
    fills `integers` [R, B] with the numbers of multiples. See `_round_to_tables`."""
    rows, width = block.shape
    for r in range(rows):
        row = block[r]
        for i in range(width):
            scale = scales[r, i]
            number = np.float32(0)
            if scale > 0:
                number = min(max(np.rint(row[i] / scale), -limit), limit)
            integers[r, i] = np.int8(number)
            scaled_error = (row[i] - number * scale) / factor[i, i]
            scaled_errors[r, i] = scaled_error
            # Also the columns before, which nothing reads again: the whole block takes
            # half the time of the columns that follow, whose number is no multiple of
            # those that one instruction computes.
            for j in range(width):
                row[j] -= scaled_error * factor[i, j]
