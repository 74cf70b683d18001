"""One table for every comparison of values with a reference, and what rounding alone
would make of the reference."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from workbench.check import metrics
from workbench.check.hf import Values

HALF_ULP = 2.0**-11  # of an fp16 result, relative to it
NEAR_TIE = 0.1  # of two scores, each a probability plus a bias
SHOWN = ("hidden", "update", "k", "v", "logits")
# (distance to the moved reference, size of the reference) → how far rounding may move
Room = Callable[[np.ndarray, np.ndarray], np.ndarray]


def half_precision(moved: np.ndarray, size: np.ndarray) -> np.ndarray:
    """What moves the reference, and the rounding of a result to fp16."""
    return np.hypot(moved, HALF_ULP * size)


def compare(
    reference: Values,
    actual: Values,
    moved: Values | None = None,
    *,
    room: Room = half_precision,
    sizes: Values | None = None,
    tensors: Sequence[str] = SHOWN,
    similar: bool = True,
) -> pd.DataFrame:
    """One row for each position of the `tensors` that both have: tensor, layer (−1:
    logits), position and T of `actual`; relative RMS `error`.

    A value with fewer rows than its reference has the last ones, as a ring does.

    Args:
        moved: the reference after the rounding that is allowed. `budget` is its relative
            RMS distance from the reference, and `ratio` the error over the `room`; both
            are null where it lacks a value.
        sizes: magnitudes [n] that a value's relative figures refer to where they are
            larger than its RMS.
        similar: also `cosine`, `psnr_db`, `max_abs` and whether values are `finite`.

    `routing_tie` is true where an update may be another expert's: where `moved` picked
    another one than the reference, or the reference's choice was close and `actual` does
    not show its own. No gate compares these.
    """
    moved, sizes, parts = moved or {}, sizes or {}, []
    for name, values in actual.items():
        tensor, _, layer = name.partition(".")
        if tensor not in tensors or name not in reference:
            continue
        n = len(values)
        expected = reference[name][-n:]
        size = metrics.rms(expected)
        if name in sizes:
            size = np.maximum(size, sizes[name][-n:])
        error = metrics.rms(expected, values)
        part = {
            "tensor": tensor,
            "layer": int(layer or -1),
            "position": np.arange(len(reference[name]))[-n:],
            "T": actual["T"][-n:],
            "error": metrics.over(error, size),
            "budget": np.nan,
            "ratio": np.nan,
            "routing_tie": False,
        }
        if name in moved:
            apart = metrics.rms(expected, moved[name][-n:])
            part["budget"] = metrics.over(apart, size)
            ratio = metrics.over(error, room(apart, size))
            part["ratio"] = np.nan_to_num(ratio, nan=np.inf)
        if tensor == "update":
            part["routing_tie"] = _ties(reference, actual, moved, layer)[-n:]
        if similar:
            part |= {
                "cosine": metrics.cosine(expected, values),
                "psnr_db": metrics.psnr_db(expected, values),
                "max_abs": metrics.max_abs(expected, values),
                "finite": np.isfinite(values).all(-1),
            }
        parts.append(part)
    return table(parts)


def _ties(reference: Values, actual: Values, moved: Values, layer: str) -> np.ndarray:
    """`routing_tie` [n] of a layer's updates."""
    name = f"expert.{layer}"
    ties = np.zeros(len(reference[f"update.{layer}"]), bool)
    if name not in reference:
        return ties
    if name not in actual:
        return reference[f"margin.{layer}"][:, 0] < NEAR_TIE
    return ties if name not in moved else (moved[name] != reference[name])[:, 0]


def table(parts: Sequence[dict[str, object]]) -> pd.DataFrame:
    """One table of many parts, each a dict of the same columns: an array, or one value
    for all rows of the part, which has as many as its `position`."""
    columns = {}
    for name in parts[0] if parts else ():
        pieces = []
        for part in parts:
            dtype = object if isinstance(part[name], str) else None
            value = np.asarray(part[name], dtype)
            pieces.append(np.broadcast_to(value, len(part["position"])))
        columns[name] = np.concatenate(pieces)
    return pd.DataFrame(columns)


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The isolated updates and cache rows that gates read."""
    own = rows["tensor"].isin(["update", "k", "v"]) & (rows["mode"] == "isolated")
    return rows[own & ~rows["routing_tie"]].reset_index(drop=True)
