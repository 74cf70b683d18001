"""Arrays between the host and a package: axes by their letters, which row of a cache
holds which position, masks and write addresses. No model is needed."""

from collections.abc import Sequence

import numpy as np

from workbench.adopt.schema import Axis, Input

DIMS = {
    "ids": "T",
    "hidden": "TC",
    "positions": "T",
    "start": "",
    "end": "",
    "mask": "TS",
    "write": "ST",
    "cos": "TD",
    "sin": "TD",
}
"""The axes of every input's value before `arrange`."""


def arrange(value: np.ndarray, dims: str, axes: Sequence[Axis]) -> np.ndarray:
    """`value` with the axes `dims` in the axes that a package declares; `E` is equal to
    `S`, and a dim of size 1 may have no letter."""
    letters = "".join(axis for axis in axes if isinstance(axis, str)).replace("E", "S")
    value = value.reshape([n for n, dim in zip(value.shape, dims) if dim in letters])
    dims = [dim for dim in dims if dim in letters]
    value = value.transpose([dims.index(letter) for letter in letters])
    shape = list(axes)
    for i, axis in enumerate(axes):
        if isinstance(axis, str):
            shape[i] = value.shape[i]
        else:
            value = np.expand_dims(value, i)
    return np.broadcast_to(value, shape)


def named(value: np.ndarray, axes: Sequence[Axis], dims: str) -> np.ndarray:
    """The inverse: a package's array with the axes `dims`; a missing one has size 1."""
    letters, sizes = [], []
    for size, axis in zip(value.shape, axes, strict=True):
        if isinstance(axis, str):
            letters.append(axis)
            sizes.append(size)
    value = value.reshape(sizes)
    for letter in dims:
        if letter not in letters:
            letters, value = [letter, *letters], value[None]
    return value.transpose([letters.index(letter) for letter in dims])


def row_positions(rule: str, count: int, end: int) -> np.ndarray:
    """The position in each of `count` rows after `end` tokens, −1 in an empty row; see
    `schema.ROWS_HELP`."""
    rows = np.arange(count)
    if rule == "ring":
        return np.maximum(end - 1 - (end - 1 - rows) % count, -1)
    shifted = {"absolute": 0, "shift": max(0, end - count), "right": end - count}[rule]
    positions = rows + shifted
    return np.where((positions >= 0) & (positions < end), positions, -1)


def mask(entry: Input, start: int, T: int, columns: int) -> np.ndarray:
    """The additive mask [T, columns] of a call of T tokens at `start`."""
    positions = row_positions(entry.rows, columns, start + T)
    distance = start + np.arange(T)[:, None] - positions
    visible = (positions >= 0) & (distance >= 0) & (distance < (entry.window or np.inf))
    return np.where(visible, 0.0, entry.blocked)


def write_columns(entry: Input, start: int, T: int, rows: int) -> np.ndarray:
    """One-hot columns [rows, T]: the row that each token is written to."""
    return row_positions(entry.rows, rows, start + T)[:, None] == start + np.arange(T)
