"""How far stored weights are from a checkpoint's values, in one pass over a tensor.
Compiled by numba: as separate steps of torch it takes about 15 passes. It shares no
arithmetic with the runtime whose bundles it checks.

A ratio is |stored − value| over the tolerance of gate `weights`. `fp16_ratio`,
`integer_ratio` and `table_figures` call the compiled functions below them.

The largest ratio is found as the largest bit pattern: float32 numbers that are not
negative are in the order of their bits, and nan comes last, so that one nan makes the
result nan."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic

from workbench.bundle.names import MIN_NORMAL
from workbench.errors import InputError

if config.DISABLE_JIT:  # Python cannot run the functions on bits
    raise InputError(
        "NUMBA_DISABLE_JIT",
        "set",
        "the compiled comparison of weights",
        "unset NUMBA_DISABLE_JIT",
    )

EXPONENT = np.uint32(0x7F800000)  # bits of a float32's exponent
MAGNITUDE = np.uint32(0x7FFFFFFF)  # all but its sign
SMALLEST = np.float32(MIN_NORMAL).view(np.uint32)
HALF_UNIT = np.float32(2.0**-11)  # half a unit in the last place of 1.0 in fp16
HALF = np.float32(0.5)
ZERO = np.float32(0)


@intrinsic
def bits_of(context, value):
    """The bits of a float32 number."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@intrinsic
def number_of(context, bits):
    """The float32 number of bits."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), emit


@intrinsic
def to_fp16(context, value):
    """The fp16 number nearest to a float32 number, as float32: numba has no fp16 on
    processors."""

    def emit(context, builder, signature, arguments):
        nearest = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.fpext(nearest, ir.FloatType())

    return types.float32(types.float32), emit


def compiled(function: Callable) -> Callable:
    """The decorator `njit` with numba's cache. Where numba can write to no folder for
    its cache, every process compiles the function again."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        return njit(function)


@compiled
def half_unit_of(value):
    """Half of the distance between the two fp16 values around a float32 number."""
    size = np.uint32(bits_of(value) & MAGNITUDE)
    if size < SMALLEST:  # subnormal numbers have the unit of the smallest normal
        size = SMALLEST
    return number_of(np.uint32(size & EXPONENT)) * HALF_UNIT


def _as_number(bits: int) -> float:
    """The float32 number of bits, outside compiled functions."""
    return float(np.uint32(bits).view(np.float32))


def fp16_ratio(stored: np.ndarray, values: np.ndarray) -> float:
    """The largest ratio of weights that are stored in fp16, whose tolerance is half a unit
    in the last place of fp16 at the value.

    Args:
        stored, values: [n] float32.
    """
    return _as_number(_fp16_ratio_bits(stored, values))


@compiled
def _fp16_ratio_bits(stored, values):
    """The bits of `fp16_ratio`."""
    worst = np.uint32(0)
    for i in range(len(values)):
        value = values[i]
        distance = abs(stored[i] - value)
        ratio = ZERO
        if distance != ZERO:
            ratio = np.float32(distance / half_unit_of(value))
        bits = np.uint32(bits_of(ratio) & MAGNITUDE)
        if bits > worst:
            worst = bits
    return worst


def integer_ratio(
    data: np.ndarray,
    scale: np.ndarray,
    offset: np.ndarray,
    values: np.ndarray,
    *,
    width: int,
    largest: np.float32,
) -> float:
    """The largest ratio of integers, compared with values rounded to fp16. The tolerance
    is that of a preset: half a step, 2^-11 of the value, and what a step that fp16
    rounded down cannot reach.

    Args:
        data: [n] int16.
        scale, offset: float32, each number for n / its length weights in a row.
        values: [n] float32.
        width: weights that share one step of the preset; divides n.
        largest: the preset's largest integer.
    """
    bits = _integer_ratio_bits(data, scale, offset, values, width, largest)
    return _as_number(bits)


@compiled
def _integer_ratio_bits(data, scale, offset, values, width, largest):
    """The bits of `integer_ratio`."""
    n = len(values)
    per_scale = n // len(scale)
    per_offset = n // len(offset)
    worst = np.uint32(0)
    for start in range(0, n, width):
        peak = ZERO
        for i in range(start, start + width):
            size = abs(to_fp16(values[i]))
            if size > peak:
                peak = size
        step = to_fp16(np.float32(peak / largest))
        half_step = step * HALF
        reach = largest * step
        i = start
        while i < start + width:
            # as many weights as share a scale, an offset and a step
            end = min(
                start + width,
                (i // per_scale + 1) * per_scale,
                (i // per_offset + 1) * per_offset,
            )
            factor = scale[i // per_scale]
            zero = offset[i // per_offset]
            for k in range(i, end):
                value = to_fp16(values[k])
                distance = abs((np.float32(data[k]) - zero) * factor - value)
                size = abs(value)
                beyond = size - reach
                if beyond < ZERO:
                    beyond = ZERO
                ratio = ZERO
                if distance != ZERO:
                    tolerance = half_step + size * HALF_UNIT + beyond
                    ratio = np.float32(distance / tolerance)
                bits = np.uint32(bits_of(ratio) & MAGNITUDE)
                if bits > worst:
                    worst = bits
            i = end
    return worst


@dataclass(frozen=True)
class TableFigures:
    """Figures of the weights of each of G groups of rows that share a table.

    Attributes:
        distance_ratios: [G] float32, the largest distance to the entry that is used,
            over the distance to the nearest one plus half a unit of fp16 of both.
        errors: [G] float64, the squared error, less what rounding the entries to fp16
            adds at most.
        errors_with_means: [G] float64, the squared error if every entry were the mean of
            the weights that use it.
    """

    distance_ratios: np.ndarray
    errors: np.ndarray
    errors_with_means: np.ndarray


def table_figures(
    indices: np.ndarray, tables: np.ndarray, values: np.ndarray
) -> TableFigures:
    """The figures of weights that are compared with `values` rounded to fp16.

    Args:
        indices: [R, K] uint8, below E.
        tables: [G, E] float32, ascending.
        values: [R, K] float32.
    """
    G = len(tables)
    figures = TableFigures(np.zeros(G, np.float32), np.zeros(G), np.zeros(G))
    _fill_table_figures(
        indices,
        tables,
        values,
        figures.distance_ratios,
        figures.errors,
        figures.errors_with_means,
    )
    return figures


@compiled
def _fill_table_figures(
    indices, tables, values, distance_ratios, errors, errors_with_means
):
    """Fills the arrays of a `TableFigures`; see `table_figures`."""
    R, K = values.shape
    G, E = tables.shape
    rows = R // G
    counts = np.empty(E)
    sums = np.empty(E)
    for g in range(G):
        table = tables[g]
        middles = (table[1:] + table[:-1]) * HALF
        counts[:] = 0.0
        sums[:] = 0.0
        squares = 0.0
        error = 0.0
        rounding = 0.0
        worst = ZERO
        for r in range(g * rows, (g + 1) * rows):
            for k in range(K):
                value = to_fp16(values[r, k])
                index = indices[r, k]
                used = table[index]
                near = table[np.searchsorted(middles, value)]
                distance = abs(used - value)
                if distance != ZERO:
                    half_units = half_unit_of(used) + half_unit_of(near)
                    tolerance = abs(near - value) + half_units
                    ratio = np.float32(distance / tolerance)
                    if not ratio <= worst:  # nan is the worst
                        worst = ratio
                    error += np.float64(distance) * np.float64(distance)
                rounding += np.float64(half_unit_of(used)) ** 2
                counts[index] += 1.0
                sums[index] += value
                squares += np.float64(value) * np.float64(value)
        explained = 0.0
        for e in range(E):
            if counts[e] > 0.0:
                explained += sums[e] * sums[e] / counts[e]
        distance_ratios[g] = worst
        errors[g] = max(0.0, error - rounding)
        # the difference of two sums of float64 is known to this share of them
        errors_with_means[g] = max(0.0, squares - explained) + squares * 1e-13
