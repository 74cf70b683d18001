"""How far two arrays are apart. Arrays in, numbers out; the last axis is the vector that is compared."""

import numpy as np

NEAR_TIE_NATS = 0.5


def cosine(reference: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Cosine along the last axis, float64; two zero vectors agree (1), a non-finite one does not (nan)."""
    a, b = np.asarray(reference, np.float64), np.asarray(found, np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        value = np.where(norms > 0, (a * b).sum(-1) / np.where(norms > 0, norms, 1), 0.0)
    both_zero = ~a.any(-1) & ~b.any(-1)
    return np.where(both_zero, 1.0, np.where(np.isfinite(b).all(-1), value, np.nan))


def psnr_db(reference: np.ndarray, found: np.ndarray) -> np.ndarray:
    """10·log10(max(reference²) / mean((reference − found)²)) in dB along the last axis; inf when they are equal."""
    a, b = np.asarray(reference, np.float64), np.asarray(found, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return 10 * np.log10((a**2).max(-1) / ((a - b) ** 2).mean(-1))


def max_abs(reference: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Largest |reference − found| along the last axis."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(np.asarray(reference, np.float64) - found).max(-1)


def relative_rms(reference: np.ndarray, found: np.ndarray) -> float:
    """RMS of the difference over the RMS of the reference, both over all elements; 0 when both are zero."""
    a, b = np.asarray(reference, np.float64), np.asarray(found, np.float64)
    scale = np.sqrt((a**2).mean())
    return float(np.sqrt(((a - b) ** 2).mean()) / scale) if scale else float(np.abs(b).max() > 0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax along the last axis, float64."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(reference: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(reference ‖ found) in nats between the distributions that two arrays of logits [..., V] stand for."""
    p, q = log_softmax(reference), log_softmax(found)
    return (np.exp(p) * (p - q)).sum(-1)


def near_tie(reference: np.ndarray, found: np.ndarray) -> bool:
    """Whether two logit vectors [V] that pick different tokens may: each one's token is in the other's top five,
    at most 0.5 nat below its best (the rule vLLM's tests use)."""
    first, second = int(np.argmax(reference)), int(np.argmax(found))
    return _close(reference, second) and _close(found, first)


def _close(logits: np.ndarray, token: int) -> bool:
    better = int((logits > logits[token]).sum())
    return better < 5 and bool(logits.max() - logits[token] <= NEAR_TIE_NATS)


def compare_logits(reference: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Summary of logits [n, V]: agreement of the top token (near-ties apart), mean overlap of the top five, worst KL, worst cosine."""
    rows = list(zip(reference, found, strict=True))  # one at a time: a row of a vocabulary fits the cache, all do not
    same = [int(np.argmax(a)) == int(np.argmax(b)) or near_tie(a, b) for a, b in rows]
    k = min(5, reference.shape[-1])
    overlap = [len(set(np.argpartition(-a, k - 1)[:k]) & set(np.argpartition(-b, k - 1)[:k])) / k for a, b in rows]
    return {
        "top1_agreement": float(np.mean(same)), "top5_overlap": float(np.mean(overlap)),
        "kl_max": float(np.max([kl(a, b) for a, b in rows])), "cosine_min": float(np.min([cosine(a, b) for a, b in rows])),
    }  # fmt: skip
