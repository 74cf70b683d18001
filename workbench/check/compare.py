"""Distances between arrays, whose last axis is the vector that is compared, and one
table for every comparison of values with a reference and with what rounding alone would
make of it."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from workbench.check.hf import Values

BLOCK = 1 << 18  # numbers that are compared at a time
HALF_ULP = 2.0**-11  # of an fp16 result, relative to it
NEAR_TIE = 0.1  # of two scores, each a probability plus a bias
SHOWN = ("hidden", "update", "k", "v", "logits")
# (distance to the moved reference, size of the reference) → how far rounding may move
Room = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rms(reference: np.ndarray, actual: np.ndarray | None = None) -> np.ndarray:
    """Root mean square of reference, or of reference − actual, along the last axis,
    float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.float64(reference)
        if actual is not None:
            difference = difference - actual
        squares = np.einsum("...i,...i->...", difference, difference)
        return np.sqrt(squares / difference.shape[-1])


def over(error: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """error / scale; 0 where both are zero, inf where `scale` alone is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((scale == 0) & (error == 0), 0.0, np.divide(error, scale))


def relative_rms(reference: np.ndarray, actual: np.ndarray) -> float:
    """RMS of the difference over the RMS of the reference, both over all elements; see
    `over`."""
    reference = np.ravel(reference)
    return float(over(rms(reference, np.ravel(actual)), rms(reference)))


def cosine(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Cosine along the last axis, float64; two zero vectors agree (1), a non-finite one
    does not (nan)."""
    a, b = np.float64(reference), np.float64(actual)
    with np.errstate(invalid="ignore", over="ignore"):
        products = np.einsum("...i,...i->...", a, b) / a.shape[-1]
        sizes = rms(a), rms(b)
        return np.where(sum(sizes) == 0, 1.0, over(products, math.prod(sizes)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax along the last axis, float64."""
    shifted = np.float64(logits) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """KL(reference ‖ actual) [n] in nats between the distributions that two arrays of
    logits [n, V] stand for."""
    nats = np.empty(len(reference))
    for rows in blocks(reference):
        p, q = log_softmax(reference[rows]), log_softmax(actual[rows])
        nats[rows] = (np.exp(p) * (p - q)).sum(-1)
    return nats


def blocks(array: np.ndarray | torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of an array, of about `BLOCK` numbers each, or of one row."""
    n, few = len(array), max(1, BLOCK // max(1, math.prod(array.shape[1:])))
    return (slice(i, min(i + few, n)) for i in range(0, n, few))


def similarity(reference: np.ndarray, actual: np.ndarray) -> dict[str, np.ndarray]:
    """`cosine`; `psnr_db`, 10·log10(max(reference²) / mean((reference − actual)²)), inf
    when they are equal, nan for zeros; `max_abs`, the largest |reference − actual|;
    whether `actual` is `finite`; each along the last axis."""
    reference, actual = np.float64(reference), np.float64(actual)
    with np.errstate(all="ignore"):
        difference = reference - actual
        return {
            "cosine": cosine(reference, actual),
            "psnr_db": 20 * np.log10(np.abs(reference).max(-1) / rms(difference)),
            "max_abs": np.abs(difference).max(-1),
            "finite": np.isfinite(actual).all(-1),
        }


def digests(array: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each vector along the last axis: equal for vectors that
    are equal bit for bit, and for no others but by a chance of 1 in 2⁶⁴."""
    hashes = (
        hashlib.blake2b(vector.tobytes(), digest_size=8).digest()
        for vector in np.ascontiguousarray(array)
    )
    return np.frombuffer(b"".join(hashes), dtype=np.int64)


def compare(
    reference: Values,
    actual: Values,
    moved: Values | None = None,
    *,
    room: Room = lambda apart, size: np.hypot(apart, HALF_ULP * size),
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
        room: by default what moves the reference, and the rounding of a result to fp16.
        sizes: magnitudes [n] that a value's relative figures refer to where they are
            larger than its RMS.
        similar: also the figures of `similarity`, and `digest` (see `digests`).

    `routing_tie` is true where an update may be another expert's: where `moved` picked
    another one than the reference, or the reference's choice was close and `actual` does
    not show its own. No gate compares these.
    """
    moved = moved or {}
    sizes = sizes or {}
    parts = []
    for name, values in actual.items():
        tensor, _, layer = name.partition(".")
        if tensor not in tensors or name not in reference:
            continue
        positions = np.arange(len(reference[name]))[-len(values) :]
        for block in blocks(values):
            rows, own = positions[block], np.float64(values[block])
            expected = np.float64(reference[name][rows])
            error = rms(expected, own)
            size = rms(expected)
            if name in sizes:
                size = np.maximum(size, sizes[name][rows])
            part = {
                "tensor": tensor,
                "layer": int(layer or -1),
                "position": rows,
                "T": actual["T"][-len(values) :][block],
                "error": over(error, size),
                "budget": np.nan,
                "ratio": np.nan,
                "routing_tie": False,
            }
            if name in moved:
                apart = rms(expected, moved[name][rows])
                ratio = over(error, room(apart, size))
                part["budget"] = over(apart, size)
                part["ratio"] = np.nan_to_num(ratio, nan=np.inf)
            if tensor == "update" and f"expert.{layer}" in reference:
                part["routing_tie"] = _ties(reference, actual, moved, layer)[rows]
            if similar:
                part |= similarity(expected, own)
                part["digest"] = digests(values[block])
            part = {key: np.broadcast_to(x, len(rows)) for key, x in part.items()}
            parts.append(part)
    names = parts[0] if parts else ()
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return pd.DataFrame(columns)


def _ties(reference: Values, actual: Values, moved: Values, layer: str) -> np.ndarray:
    """`routing_tie` [n] of a layer with experts."""
    name = f"expert.{layer}"
    if name not in actual:
        return reference[f"margin.{layer}"][:, 0] < NEAR_TIE
    return (moved.get(name, reference[name]) != reference[name])[:, 0]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The isolated updates and cache rows that gates read."""
    own = rows["tensor"].isin(["update", "k", "v"]) & (rows["mode"] == "isolated")
    return rows[own & ~rows["routing_tie"]].reset_index(drop=True)


def furthest(rows: pd.DataFrame) -> dict:
    """layer, T and tensor of a table of `compare` where the RMS over positions of
    `ratio` is largest, and that `ratio`; a null is infinite."""
    squares = rows["ratio"].fillna(np.inf) ** 2
    means = squares.groupby([rows[name] for name in ("layer", "T", "tensor")]).mean()
    ratios = (means**0.5).sort_values(ascending=False).reset_index()
    return ratios.iloc[0].to_dict()
