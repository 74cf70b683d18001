"""Distances between vectors, the last axis of arrays, and the table `errors`, which every
comparison of two traces uses. `with_ratios`, `with_similarity` and `with_ties` add
columns to it."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import pandas as pd
import torch

from workbench.check.trace import Trace

BLOCK = 1 << 18  # numbers that are compared at a time
HALF_ULP = 2.0**-11  # of an fp16 result, relative to it
NEAR_TIE = 0.1  # of two scores, each a probability plus a bias
RESAMPLES = 1000  # of a bootstrap
DEFAULT_TENSORS = ("hidden", "update", "k", "v", "logits")
LAYER_TENSORS = ("expert", "hidden", "router", "k", "v")
# Gives what a distance is divided by for the column `ratio`, [n], from two arrays [n]: the
# RMS distance of the perturbed reference from the reference, and the RMS of the reference.
# Three gates have a unit, and a limit on the ratio: `budget` (`rounding_unit`, 6), `device`
# (`device_unit`, 6) and `program` (`program_unit`, about the size of the value, 1e-5).
Unit = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rms(reference: np.ndarray, actual: np.ndarray | None = None) -> np.ndarray:
    """Root mean square of reference, or of reference − actual, along the last axis,
    float64."""
    return np.sqrt(sum_of_squares(reference, actual) / np.shape(reference)[-1])


def sum_of_squares(
    reference: np.ndarray, actual: np.ndarray | None = None
) -> np.ndarray:
    """The sum of the squares of reference, or of reference − actual, along the last axis,
    float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.float64(reference)
        if actual is not None:
            difference = difference - actual
        return np.einsum("...i,...i->...", difference, difference)


def safe_ratio(error: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """error / scale; 0 where both are zero, inf where only `scale` is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((scale == 0) & (error == 0), 0.0, np.divide(error, scale))


def relative_rms(reference: np.ndarray, actual: np.ndarray) -> float:
    """RMS of the difference over the RMS of the reference, both over all elements; a
    zero reference as in `safe_ratio`."""
    reference = np.ravel(reference)
    return float(safe_ratio(rms(reference, np.ravel(actual)), rms(reference)))


def cosine(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Cosine along the last axis, float64: 1 for two zero vectors, nan for vectors that
    are not finite."""
    a, b = np.float64(reference), np.float64(actual)
    with np.errstate(invalid="ignore", over="ignore"):
        mean_product = np.einsum("...i,...i->...", a, b) / a.shape[-1]
        rms_a, rms_b = rms(a), rms(b)
        ratio = safe_ratio(mean_product, rms_a * rms_b)
        return np.where(rms_a + rms_b == 0, 1.0, ratio)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax along the last axis, float64."""
    shifted = np.float64(logits) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """KL(reference ‖ actual) [n] in nats between the softmax distributions of two arrays
    of logits [n, V], never below 0; nan where a logit is not finite."""
    nats = np.empty(len(reference))
    for rows in row_blocks(reference):
        log_p, log_q = log_softmax(reference[rows]), log_softmax(actual[rows])
        sums = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        # the rounding of a sum may leave a KL near 0 just below it
        nats[rows] = np.maximum(sums, 0.0)
    return nats


def resampled_means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Bootstrap means [`RESAMPLES`, …] of values in groups. Whole groups are drawn, with
    replacement, because the values of a group are alike.

    Args:
        sums: [groups, …], the sum of each group's values.
        counts: [groups], their number.
    """
    groups = len(sums)
    draws = np.random.default_rng(0).integers(0, groups, (RESAMPLES, groups))
    return (sums[draws].sum(1).T / counts[draws].sum(1)).T


def row_blocks(array: np.ndarray | torch.Tensor) -> Iterator[slice]:
    """Slices that cut an array into groups of rows of about `BLOCK` numbers, or into
    single rows."""
    n = len(array)
    rows_per_block = max(1, BLOCK // max(1, math.prod(array.shape[1:])))
    return (slice(i, min(i + rows_per_block, n)) for i in range(0, n, rows_per_block))


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
    """A 64-bit hash [n] of each vector along the last axis: vectors that are equal bit
    for bit have equal hashes, others with a chance of 1 in 2⁶⁴."""
    hashes = (
        hashlib.blake2b(vector.tobytes(), digest_size=8).digest()
        for vector in np.ascontiguousarray(array)
    )
    return np.frombuffer(b"".join(hashes), dtype=np.int64)


def rounding_unit(perturbed: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A `Unit`: the distance of the perturbed reference and the rounding of a result
    to fp16, added as independent errors are."""
    return np.hypot(perturbed, HALF_ULP * size)


def errors(
    reference: Trace,
    actual: Trace,
    tensors: Sequence[str] = DEFAULT_TENSORS,
    *,
    update_sizes: Sequence[np.ndarray] | None = None,
) -> pd.DataFrame:
    """One row for each position of every tensor that both traces have.

    An actual array with fewer rows than its reference has the last ones, as a ring
    does.

    Args:
        tensors: fields of `LayerTrace`, `update`, and `logits`.
        update_sizes: by layer the least magnitudes [n] to which the error of an update
            is relative.

    Returns:
        Columns tensor, layer (null: logits), position, T of `actual`; `distance`, the
        RMS of actual − reference; `size`, the RMS of the reference; `error`, the
        distance over the size; `budget` and `ratio`, null (see `with_ratios`).
    """
    # one table of all rows: a table for each array costs more than its arithmetic
    columns: dict[str, list] = {}
    for tensor, layer in _fields(tensors, len(actual.layers)):
        value = actual.value(tensor, layer)
        expected = None
        if value is not None:
            expected = _reference_value(reference, tensor, layer)
        if expected is None:
            continue
        count = len(value)
        positions = np.arange(len(expected))[-count:]
        least = None
        if tensor == "update" and update_sizes is not None:
            least = update_sizes[layer][positions]
        part = {
            "tensor": [tensor] * count,
            "layer": [layer] * count,
            "position": positions,
            "T": actual.T[-count:],
        }
        part |= vector_errors(expected[positions], value, least)
        for name, values in part.items():
            columns.setdefault(name, []).append(values)
    if not columns:  # programs of another exporter may show nothing but states
        return pd.DataFrame()
    lists = {name: list(chain(*columns.pop(name))) for name in ("tensor", "layer")}
    lists["layer"] = pd.array(lists["layer"], "Int64")
    return pd.DataFrame(
        lists | {name: np.concatenate(parts) for name, parts in columns.items()}
    )


def _fields(tensors: Sequence[str], L: int) -> Iterator[tuple[str, int | None]]:
    """The (tensor, layer) of each array in the order of the rows of `errors`."""
    for layer in range(L):
        yield from ((tensor, layer) for tensor in LAYER_TENSORS if tensor in tensors)
    if "logits" in tensors:
        yield "logits", None
    if "update" in tensors:
        yield from (("update", layer) for layer in range(L))


def _reference_value(
    reference: Trace, tensor: str, layer: int | None
) -> np.ndarray | None:
    """A field of the reference, which may have fewer layers."""
    if layer is not None and layer >= len(reference.layers):
        return None
    return reference.value(tensor, layer)


def vector_errors(
    expected: np.ndarray, actual: np.ndarray, least_size: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """`distance`, `size`, `error`, `budget` and `ratio` of `errors` for the rows of two
    arrays [n, W]; `least_size` [n]: the least magnitude to which an error is
    relative."""
    size = distances(expected)
    if least_size is not None:
        size = np.maximum(size, least_size)
    distance = distances(expected, actual)
    unknown = np.full(len(actual), np.nan)
    return {
        "distance": distance,
        "size": size,
        "error": safe_ratio(distance, size),
        "budget": unknown,
        "ratio": unknown,
    }


def distances(expected: np.ndarray, actual: np.ndarray | None = None) -> np.ndarray:
    """`rms` along the last axis of arrays [n, W], some rows at a time: [n]."""
    parts = []
    for rows in row_blocks(expected):
        parts.append(rms(expected[rows], None if actual is None else actual[rows]))
    return np.concatenate(parts)


def with_ratios(
    rows: pd.DataFrame, reference: Trace, perturbed: Trace, unit: Unit = rounding_unit
) -> pd.DataFrame:
    """Rows of `errors` with their `budget`, the relative distance of the `perturbed`
    reference from the reference, and their `ratio`, the distance over the `unit`; both
    stay null where `perturbed` lacks an array."""
    budget, ratio = (rows[name].to_numpy(copy=True) for name in ("budget", "ratio"))
    for tensor, layer, places in _groups(rows):
        value = _reference_value(perturbed, tensor, layer)
        if value is None:
            continue
        positions = rows["position"].to_numpy()[places]
        expected = reference.value(tensor, layer)[positions]
        budget[places], ratio[places] = budget_and_ratio(
            rows["distance"].to_numpy()[places],
            rows["size"].to_numpy()[places],
            distances(expected, value[positions]),
            unit,
        )
    return rows.assign(budget=budget, ratio=ratio)


def budget_and_ratio(
    distance: np.ndarray, size: np.ndarray, perturbed: np.ndarray, unit: Unit
) -> tuple[np.ndarray, np.ndarray]:
    """`budget` and `ratio` of `with_ratios` from distances [n] of the actual values
    and of the perturbed reference, and from sizes [n]. A ratio that is not a number
    becomes inf."""
    ratio = safe_ratio(distance, unit(perturbed, size))
    return safe_ratio(perturbed, size), np.nan_to_num(ratio, nan=np.inf)


def with_similarity(
    rows: pd.DataFrame, reference: Trace, actual: Trace
) -> pd.DataFrame:
    """Rows of `errors` with the figures of `similarity`, and `digest` (see
    `digests`)."""
    columns: dict[str, list[np.ndarray]] = {}
    all_places = []  # in the table, in the order in which `columns` are filled
    for tensor, layer, places in _groups(rows):
        value = actual.value(tensor, layer)
        expected = reference.value(tensor, layer)[-len(value) :]
        all_places.append(places)
        for block in row_blocks(value):
            part = similarity(expected[block], value[block])
            part["digest"] = digests(value[block])
            for name, values in part.items():
                columns.setdefault(name, []).append(values)
    if not columns:
        return rows
    order = np.argsort(np.concatenate(all_places))
    figures = {name: np.concatenate(parts)[order] for name, parts in columns.items()}
    return rows.assign(**figures)


def with_ties(
    rows: pd.DataFrame, reference: Trace, actual: Trace, perturbed: Trace | None = None
) -> pd.DataFrame:
    """Rows of `errors` with `routing_tie`: whether an update may be another expert's.

    True where `perturbed` chose another expert than the reference or, if `actual` does
    not show its choice, where the reference's choice was close. Gates skip these rows."""
    ties = np.zeros(len(rows), bool)
    for tensor, layer, places in _groups(rows):
        experts = reference.value("expert", layer) if layer is not None else None
        if tensor != "update" or experts is None:
            continue
        if actual.layers[layer].expert is None:
            tied = reference.layers[layer].margin[:, 0] < NEAR_TIE
        else:
            # without a perturbed choice nothing says that another one was close
            tied = np.zeros(len(experts), bool)
            if perturbed is not None and perturbed.layers[layer].expert is not None:
                tied = perturbed.layers[layer].expert[:, 0] != experts[:, 0]
        ties[places] = tied[rows["position"].to_numpy()[places]]
    return rows.assign(routing_tie=ties)


def _groups(rows: pd.DataFrame) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """The tensor, the layer, and the places [m] in the table of each array's rows."""
    if rows.empty:
        return
    keys = [rows["tensor"], rows["layer"]]
    places = pd.Series(np.arange(len(rows)), rows.index)
    for (tensor, layer), part in places.groupby(keys, dropna=False, sort=False):
        yield tensor, None if pd.isna(layer) else int(layer), part.to_numpy()


def judged_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that gates judge: isolated updates and cache rows without a routing tie."""
    isolated = rows["tensor"].isin(["update", "k", "v"]) & (rows["mode"] == "isolated")
    return rows[isolated & ~rows["routing_tie"]].reset_index(drop=True)


def furthest(rows: pd.DataFrame) -> dict:
    """layer, T and tensor of a table of `errors` where the RMS over positions of
    `ratio` is largest, and that `ratio`; a null is infinite."""
    squares = rows["ratio"].fillna(np.inf) ** 2
    keys = [rows[name] for name in ("layer", "T", "tensor")]
    means = squares.groupby(keys, dropna=False).mean()
    ratios = (means**0.5).sort_values(ascending=False).reset_index()
    return ratios.iloc[0].to_dict()
