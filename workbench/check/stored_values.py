"""How a package stores a weight, and how far its values are from the checkpoint's.

The tolerance of a weight is computed from the checkpoint's value v and the preset, and
for tables from their stored entries. Stored scales have no part in it:

    fp16      half a unit in the last place of fp16 at v (with the offset that storage adds)
    integers  half a step. The step is amax / (2^(bits−1) − 1) of the tensor, channel or block,
              rounded to fp16. Added are the fp16 rounding of v / step, 2^-11 of v, and
              the part of v that is out of reach because fp16 rounded the step down
    tables    the distance to the nearest entry, and half a unit in the last place of fp16 at
              the stored entry and at the nearest one

Compressed weights are compared with v rounded to fp16, which precedes compression. The
squared error of a table for a whole tensor must also be within 0.1% of that of the best
table (exact k-means in one dimension). Rounding the entries to fp16 adds at most the
square of half a unit for each weight, which is subtracted first.

Tables for groups of rows must be finite and ascending. The squared error of every group
must be within 0.5% of the error that it would have if each entry were the mean of the
weights that use it. One group of each stored tensor is also compared with the best table,
since the exact solver takes about 35 ms a group: the group whose error is the largest in
parts of the error with these means.

`worst_deviation` compares a weight by these tolerances. `fitted_rows` gives the values of
one that was fitted to a calibration text, which `row_statistics` judges row by row; their
tables must be finite and ascending, too."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import miltorch
from miltorch.coremltools_import import kmeans1d
from miltorch.program import Ref
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import MIN_NORMAL
from workbench.bundle.presets import Preset
from workbench.check.compare import row_blocks, safe_ratio
from workbench.check.deviation import Deviation, worst_of
from workbench.check.row_statistics import FittedRows

# Largest deviation in tolerances: 1, and what float32 arithmetic adds. A weight that is
# wrong by one step deviates by at least 2.
LIMIT = 1.05
# Largest distance over that of the nearest entry, and largest squared error over that of
# the best table for a tensor
TABLE_LIMIT = 1.001
GROUP_LIMIT = 1.005  # the second one where groups of rows have tables
NEAREST_UNIT = "times the distance to the nearest entry"
BEST_TABLE_UNIT = "times the squared error of the best table"
# The arrays of a stored weight by their roles: val; data, scale, offset; indices, lut.
Parts = dict[str, np.ndarray]
# Raised for arrays that do not fit together; InputError is a ValueError.
DAMAGED = (KeyError, IndexError, ValueError)
EXPONENT = 0x7F800000  # bits of a float32's exponent


def open_parts(
    bundle: Bundle, shard: Shard, function: str | None = None
) -> Callable[[str], Parts]:
    """A reader of the parts in which one shard's program, or one function of it, stores
    a tensor of the checkpoint. They are read from its package; `miltorch` computes none
    of them."""
    package = bundle.package(shard)
    if target := bundle.manifest.options.plugin:
        return lambda tensor: target.parts(package, shard.weights[tensor])
    constants = {}
    for op in miltorch.read(package, function).block.walk():
        if op.is_constant:
            constants |= {name: op for name, _ in op.outputs}

    def parts(tensor: str) -> Parts:
        name = shard.weights[tensor]
        if name not in constants:
            raise ValueError(f"no constant {name!r} in the program")
        roles = {}
        for role, value in constants[name].inputs.items():
            if isinstance(value, Ref):
                value = constants[value.name].inputs["val"]
            roles[role] = np.asarray(value)
        return roles

    return parts


def worst_deviation(
    place: str, parts: Parts, values: torch.Tensor, preset: Preset, first: int = 0
) -> Deviation:
    """The deviation of a stored weight from `values` [rows, columns], the checkpoint's
    with their offset. One of fp16 or integers that is over its limit says where.

    Args:
        first: the number of the first row within the tensor.
    """
    if "val" in parts:
        stored = torch.from_numpy(np.asarray(parts["val"])).reshape(values.shape)
        deviation = fp16_deviation(place, stored, values)
        if deviation.is_sound:
            return deviation
        unit = half_ulp(values)
        return _with_worst_weight(deviation, stored.float(), values, unit, first)
    if preset.is_integer:
        ratio = integer_ratio(parts, values, preset)
        unit = f"times half a step of {preset.name}"
        deviation = Deviation.at(place, ratio, LIMIT, unit)
        if deviation.is_sound:
            return deviation
        return _with_worst_weight(
            deviation, *_integers_and_steps(parts, values), first=first
        )
    return table_deviation(place, parts, values, preset)


def _integers_and_steps(
    parts: Parts, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The stored weights, `values` rounded to fp16 and the stored steps, each float32
    [rows, columns]."""
    data = np.float32(parts["data"])
    steps = np.broadcast_to(_spread(np.float32(parts["scale"]), data.shape), data.shape)
    offset = np.float32(parts.get("offset", 0))
    if offset.ndim:
        offset = _spread(offset, data.shape)
    stored = torch.from_numpy((data - offset) * steps).reshape(values.shape)
    steps = torch.from_numpy(steps.copy()).reshape(values.shape)
    return stored, values.half().float(), steps


def _with_worst_weight(
    deviation: Deviation,
    stored: torch.Tensor,
    expected: torch.Tensor,
    unit: torch.Tensor,
    first: int,
) -> Deviation:
    """A deviation whose reason ends with the place of its worst weight, the one that is
    most units away from what is expected, or that is no number; all are
    [rows, columns]."""
    distances = ((stored - expected).abs() / unit.abs()).numpy()
    row, column = np.unravel_index(np.argmax(distances), distances.shape)
    place = f"row {first + row}, column {column}"
    if len(stored) == 1:  # as of a norm, which has no rows
        place = f"element {column}"
    clause = (
        f"worst at {place}: stored {float(stored[row, column]):.6g}, "
        f"expected {float(expected[row, column]):.6g}"
    )
    return replace(deviation, reason=f"{deviation.reason} ({clause})")


def fp16_deviation(place: str, stored: torch.Tensor, values: torch.Tensor) -> Deviation:
    """The deviation of a weight that is stored in fp16 from `values` in float32."""
    from workbench.check import kernels  # numba takes a moment to import

    ratio = kernels.fp16_ratio(
        stored.float().reshape(-1).numpy(), values.reshape(-1).numpy()
    )
    return Deviation.at(place, ratio, LIMIT, "times half a unit of fp16")


def weight_array(parts: Parts, preset: Preset) -> np.ndarray:
    """The one of `parts` with an element for each weight.

    Raises:
        ValueError: parts that the preset does not make.
    """
    if "val" in parts:
        return parts["val"]
    if "data" in parts and preset.is_integer:
        return parts["data"]
    if "lut" in parts and parts["lut"].shape[-2:] == (1 << preset.bits, 1):
        return parts["indices"]
    raise ValueError(f"stored as {', '.join(parts)}, not as {preset.name} makes it")


def half_ulp(values: torch.Tensor) -> torch.Tensor:
    """Half of the distance between the two fp16 values around each of `values`
    (float32)."""
    bits = values.abs().clamp(min=MIN_NORMAL).view(torch.int32) & EXPONENT
    return bits.view(torch.float32) * 2.0**-11


def integer_ratio(parts: Parts, values: torch.Tensor, preset: Preset) -> float:
    """The largest distance of integers times a scale from `values` [rows, n] rounded to
    fp16, over the tolerance of `preset`."""
    from workbench.check import kernels  # numba takes a moment to import

    data = parts["data"]
    if not np.can_cast(data.dtype, np.int16):
        raise ValueError(f"integers of {data.dtype}")
    offset = parts.get("offset", np.zeros([1] * data.ndim))
    width = preset.block or values.shape[1]
    if preset.granularity == "per_tensor":
        width = values.numel()
    if values.numel() % width:
        raise ValueError(f"{values.numel()} weights in blocks of {width}")
    largest = np.float32(2 ** (preset.bits - 1) - 1)
    return kernels.integer_ratio(
        np.int16(data).ravel(),
        _factors(parts["scale"], data.shape),
        _factors(offset, data.shape),
        values.reshape(-1).numpy(),
        width=width,
        largest=largest,
    )


def _factors(factor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale or an offset in float32 as a flat array; each number applies to the same
    count of consecutive weights of `shape`.

    Raises:
        ValueError: a factor that does not line up with the weights.
    """
    factor = np.float32(factor)
    fits = factor.ndim == len(shape) and factor.size > 0
    if not fits or any(n % m for n, m in zip(shape, factor.shape)):
        raise ValueError(f"a factor {factor.shape} of weights {shape}")
    # the first axes of full length, then one in blocks, then axes of length 1
    axis = 0
    while axis < len(shape) and factor.shape[axis] == shape[axis]:
        axis += 1
    if all(size == 1 for size in factor.shape[axis + 1 :]):
        return factor.ravel()
    return np.broadcast_to(_spread(factor, shape), shape).ravel()


def check_tables(
    parts: Parts, values: torch.Tensor, preset: Preset
) -> tuple[np.ndarray, np.ndarray]:
    """The tables [G, entries] float32 of a weight and its indices [rows, columns].

    Raises:
        ValueError: tables for groups that are not ascending numbers, tables that do not
            divide the rows as the preset does, or an index behind the end of a table.
    """
    tables = np.float32(parts["lut"]).reshape(-1, 1 << preset.bits)
    count = len(tables)
    if count * (preset.group or len(values)) != len(values):
        raise ValueError(f"{count} tables for {len(values)} rows, not as {preset.name}")
    indices = parts["indices"].reshape(values.shape)
    if indices.max(initial=0) >= tables.shape[1]:
        raise ValueError(
            f"an index of {indices.max()} into tables of {preset.bits} bits"
        )
    # one table for a tensor of few distinct values ends with zeros
    is_ascending = np.isfinite(tables).all() and (np.diff(tables, axis=1) >= 0).all()
    if preset.group and not is_ascending:
        raise ValueError("a table whose entries are not ascending numbers")
    return tables, indices


def fitted_rows(
    place: str, first: int, parts: Parts, values: torch.Tensor, preset: Preset
) -> FittedRows:
    """What a shard stores of a fitted matrix, beside the nearest values that the stored
    tables or scales can express, and those on an even grid of the preset's.

    Args:
        first: the number of the first row within the matrix.
        values: the checkpoint's [rows, columns], rounded to fp16.

    Raises:
        ValueError: arrays that do not fit together; see also `check_tables`.
    """
    if preset.is_integer:
        return _fitted_integers(place, first, parts, values, preset)
    return _fitted_tables(place, first, parts, values, preset)


def _fitted_tables(
    place: str, first: int, parts: Parts, values: torch.Tensor, preset: Preset
) -> FittedRows:
    """See `fitted_rows`; the preset has tables for groups of rows."""
    tables, indices = check_tables(parts, values, preset)
    tables = torch.from_numpy(tables)  # [G, entries]
    last_entry = tables.shape[1] - 1
    groups = values.reshape(len(tables), -1)
    chosen = torch.from_numpy(np.int64(indices)).reshape(groups.shape)
    stored = torch.gather(tables, 1, chosen).reshape(values.shape)
    midpoints = (tables[:, 1:] + tables[:, :-1]) / 2
    closest = torch.searchsorted(midpoints, groups)
    nearest = torch.gather(tables, 1, closest).reshape(values.shape)
    # as many values as a table has, from the least to the largest of each group
    low, high = groups.aminmax(dim=1, keepdim=True)
    even_step = (high - low) / last_entry
    step_counts = torch.round((groups - low) / even_step).nan_to_num()
    even = (low + step_counts * even_step).half().float()
    # an entry's step: the mean of its distances to both neighbours
    gaps = nn.functional.pad(tables.diff(dim=1), (1, 1), mode="replicate")
    steps = (gaps[:, 1:] + gaps[:, :-1]) / 2
    clipped = (chosen == 0) | (chosen == last_entry)
    return FittedRows(
        place,
        first,
        bits=preset.bits,
        group=len(values) // len(tables),
        values=values,
        stored=stored,
        nearest=nearest,
        even=even.reshape(values.shape),
        step=torch.gather(steps, 1, closest).reshape(values.shape),
        clipped=clipped.reshape(values.shape),
    )


def _fitted_integers(
    place: str, first: int, parts: Parts, values: torch.Tensor, preset: Preset
) -> FittedRows:
    """See `fitted_rows`; the preset has integers."""
    if np.any(parts.get("offset", 0)):
        raise ValueError(f"a zero point, not as {preset.name} makes it")
    if not np.isfinite(parts["scale"]).all():
        raise ValueError("a scale that is not a finite number")
    data = np.float32(parts["data"])
    scales = torch.from_numpy(_factors(parts["scale"], data.shape))
    steps = scales.repeat_interleave(data.size // len(scales)).reshape(values.shape)
    largest = 2 ** (preset.bits - 1) - 1
    width = values.numel()  # weights that share a scale of the preset
    if preset.granularity != "per_tensor":
        width = preset.block or values.shape[1]
    peaks = values.abs().reshape(-1, width).amax(1)
    preset_scales = (peaks / largest).half().float()
    preset_steps = preset_scales.repeat_interleave(width).reshape(values.shape)

    def round_to_steps(steps: torch.Tensor) -> torch.Tensor:
        """The nearest values with these scales [rows, columns]."""
        integers = torch.round(values / steps).nan_to_num().clamp(-largest, largest)
        return integers * steps

    stored_integers = torch.from_numpy(data).reshape(values.shape)
    return FittedRows(
        place,
        first,
        bits=preset.bits,
        group=1,
        values=values,
        stored=stored_integers * steps,
        nearest=round_to_steps(steps),
        even=round_to_steps(preset_steps),
        step=steps,
        clipped=stored_integers.abs() >= largest,
    )


def table_deviation(
    place: str, parts: Parts, values: torch.Tensor, preset: Preset
) -> Deviation:
    """The deviation of a weight that is stored as indices into tables from `values`
    [rows, columns].

    Raises:
        ValueError: tables that are not ascending numbers or that do not divide the rows
            as the preset does, or an index behind the end of a table.
    """
    tables, indices = check_tables(parts, values, preset)
    if preset.group:
        return _group_table_deviation(place, tables, indices, values)
    (table,) = torch.from_numpy(tables)
    stored = table[torch.from_numpy(np.int64(indices))]
    distance_ratio, error_ratio = table_ratios(stored, values.half(), table)
    pair = [
        Deviation.at(place, distance_ratio, TABLE_LIMIT, NEAREST_UNIT),
        Deviation.at(place, error_ratio, TABLE_LIMIT, BEST_TABLE_UNIT),
    ]
    return worst_of(pair)


def _group_table_deviation(
    place: str, tables: np.ndarray, indices: np.ndarray, values: torch.Tensor
) -> Deviation:
    """`table_deviation` of a weight with a table for each group of rows.

    Args:
        tables: [G, entries] float32, ascending.
        indices: [rows, columns].
        values: [rows, columns] float32.
    """
    from workbench.check import kernels  # numba takes a moment to import

    groups = kernels.table_figures(np.uint8(indices), tables, values.numpy())
    error_ratios = safe_ratio(groups.errors, groups.errors_with_means)
    # the exact solver takes 35 ms, too long for every group of a model
    group = int(np.argmax(error_ratios))
    rows = len(values) // len(tables)
    group_values = values[group * rows : (group + 1) * rows].half()
    least_error = least_squared_error(group_values, tables.shape[1])
    exact_ratio = float(safe_ratio(groups.errors[group], least_error))
    mean_unit = f"{BEST_TABLE_UNIT} of those weights"
    largest_distance_ratio = float(np.max(groups.distance_ratios))
    figures = [
        Deviation.at(place, largest_distance_ratio, TABLE_LIMIT, NEAREST_UNIT),
        Deviation.at(place, float(error_ratios[group]), GROUP_LIMIT, mean_unit),
        Deviation.at(
            f"{place}, group {group}", exact_ratio, GROUP_LIMIT, BEST_TABLE_UNIT
        ),
    ]
    return worst_of(figures)


def table_ratios(
    stored: torch.Tensor, rounded: torch.Tensor, table: torch.Tensor
) -> tuple[float, float]:
    """The figures of one table for a whole tensor.

    Args:
        stored: the entry of each weight [rows, columns], float32.
        rounded: the checkpoint's values [rows, columns], fp16.
        table: [entries] float32, in any order.

    Returns:
        The largest distance to the entry that is used, over that to the nearest one plus
        half a unit in the last place of fp16 of both; and the squared error, less what
        rounding the entries to fp16 adds at most, over the least that a table of this
        length can have.
    """
    entries = table.sort().values
    midpoints = (entries[1:] + entries[:-1]) / 2
    ratios = [0.0]  # the largest of each piece
    squared_error = 0.0
    rounding_error = 0.0
    for used, values in _pieces(stored, rounded):
        values = values.float()
        nearest = entries[torch.bucketize(values, midpoints)]
        distance = (used - values).abs()
        least_distance = (nearest - values).abs()
        tolerance = least_distance + half_ulp(used) + half_ulp(nearest)
        ratios.append(float((distance / tolerance).max()))
        squared_error += float((distance.double() ** 2).sum())
        rounding_error += float((half_ulp(used).double() ** 2).sum())
    least_error = least_squared_error(rounded, len(table))
    error = max(0.0, squared_error - rounding_error)
    return float(np.max(ratios)), float(safe_ratio(error, least_error))


def least_squared_error(values: torch.Tensor, count: int) -> float:
    """Sum of squared distances of fp16 `values` to the best `count` points."""
    distinct, counts = np.unique(values.numpy(), return_counts=True)
    points = distinct.astype(np.float64)
    count = min(count, len(points))
    clusters = kmeans1d().cluster(points, count, weights=counts).clusters
    weights = np.bincount(clusters, counts)
    means = np.bincount(clusters, counts * points) / np.maximum(weights, 1)
    return float((counts * (points - means[clusters]) ** 2).sum())


def _pieces(*matrices: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Matrices with the same rows, some rows at a time."""
    for rows in row_blocks(matrices[0]):
        yield tuple(matrix[rows] for matrix in matrices)


def _spread(factor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`factor`, repeated along each axis to the size of `shape`. Its sizes divide those
    of `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat(size // factor.shape[axis], axis)
    return factor
