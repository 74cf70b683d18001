"""Distances between two arrays. The last axis is the vector that is compared."""

from collections.abc import Callable
from functools import wraps

import numpy as np

# elements of matrices that are compared at a time: their float64 values fit a cache
PIECE = 1 << 16


def _in_pieces(figure: Callable) -> Callable:
    """`figure` of two arrays; of large matrices [n, W], it is computed for some rows
    after others."""

    @wraps(figure)
    def in_pieces(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
        rows = max(1, PIECE // max(1, np.shape(reference)[-1]))
        if np.ndim(reference) != 2 or len(reference) <= rows:
            return figure(reference, actual)
        starts = range(0, len(reference), rows)
        return np.concatenate(
            [figure(reference[i : i + rows], actual[i : i + rows]) for i in starts]
        )

    return in_pieces


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum of products along the last axis."""
    return np.einsum("...i,...i->...", a, b)


@_in_pieces
def cosine(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Cosine along the last axis, float64; two zero vectors agree (1), a non-finite one
    does not (nan)."""
    a = np.float64(reference)
    b = np.float64(actual)
    with np.errstate(invalid="ignore", over="ignore"):
        squares = _dot(a, a), _dot(b, b)
        norms = np.sqrt(squares[0]) * np.sqrt(squares[1])
        products = _dot(a, b) / np.where(norms > 0, norms, 1)
        value = np.where(norms > 0, products, ~a.any(-1) & ~b.any(-1))
    return np.where(np.isfinite(b).all(-1), value, np.nan)


@_in_pieces
def psnr_db(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """10·log10(max(reference²) / mean((reference − actual)²)) in dB along the last
    axis; inf when they are equal."""
    a = np.float64(reference)
    b = np.float64(actual)
    with np.errstate(all="ignore"):
        difference = a - b
        largest = np.maximum(a.max(-1), -a.min(-1)) ** 2
        return 10 * np.log10(largest / (_dot(difference, difference) / a.shape[-1]))


@_in_pieces
def max_abs(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Largest |reference − actual| along the last axis."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(np.float64(reference) - actual).max(-1)


def relative_rms(reference: np.ndarray, actual: np.ndarray) -> float:
    """RMS of the difference over the RMS of the reference, both over all elements; 0
    when both are zero."""
    a = np.float64(reference)
    b = np.float64(actual)
    scale = np.sqrt((a**2).mean())
    if not scale:
        return float(np.abs(b).max() > 0)
    return float(np.sqrt(((a - b) ** 2).mean()) / scale)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax along the last axis, float64."""
    shifted = np.float64(logits) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """KL(reference ‖ actual) in nats between the distributions that two arrays of
    logits [..., V] stand for."""
    p = log_softmax(reference)
    q = log_softmax(actual)
    return (np.exp(p) * (p - q)).sum(-1)


def kl_of_rows(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """`kl` [n] of logits [n, V], one row at a time: a row of a vocabulary fits the
    cache, all do not."""
    return np.array([kl(*pair) for pair in zip(reference, actual, strict=True)])


def compare_logits(
    reference: np.ndarray, actual: np.ndarray, nats: np.ndarray | None = None
) -> dict[str, float]:
    """Summary of logits [n, V]: share of equal top tokens, mean and worst KL in nats,
    worst cosine. `nats` [n]: their `kl`, where it is there already."""
    if nats is None:
        nats = kl_of_rows(reference, actual)
    return {
        "top1_agreement": float(np.mean(reference.argmax(-1) == actual.argmax(-1))),
        "kl_mean": float(np.mean(nats)),
        "kl_max": float(np.max(nats)),
        "cosine_min": float(np.min(cosine(reference, actual))),
    }


def rms(reference: np.ndarray, actual: np.ndarray | float = 0.0) -> np.ndarray:
    """Root mean square of reference − actual along the last axis, float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.float64(reference) - actual
        return np.sqrt(_dot(difference, difference) / difference.shape[-1])


def over(error: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """error / scale; 0 where both are zero, inf where `scale` alone is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((scale == 0) & (error == 0), 0.0, np.divide(error, scale))
