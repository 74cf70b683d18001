"""Attention of a few queries over a cache, compiled: the queries that share a head's
keys meet each of them at once."""

import numpy as np
import torch
from numba import njit, prange

from miltorch.fast.kernels import (
    BLOCKED,
    EXTREME,
    FLAGS,
    _exp,
    _round16,
    _same,
    _visible,
    on_threads,
)
from miltorch.fast.tiles import few_here, whole_tiles


@njit(fastmath=FLAGS, error_model="numpy")
def _attend_rows(q, key, value, mask, first, last, row, out):
    """out [N, D] = softmax(q @ keyᵀ + mask) @ value for q [N, D], which are the rows
    from `row` on of one group, T to a head; key, value [S, D], mask [T, S], over the
    places from `first` to `last`. Returns the largest magnitude of a score before the
    mask.

    Scores, masked scores and weights are each rounded to fp16, as the program declares
    them."""
    (N, D), n, extreme = q.shape, last - first, np.float32(0)
    rows = np.zeros((whole_tiles(N), D), np.float32)
    rows[:N] = q
    scores, sums = np.empty((N, n, 1), np.float32), np.zeros((N, D), np.float32)
    few_here(key[first:last], np.ones(n, np.float32), rows, scores)
    weights = scores.reshape(N, n)
    for i in range(N):
        own, columns = weights[i], mask[(row + i) % len(mask)][first:last]
        extreme = max(extreme, _softmax(own, columns))
    for s in range(n):
        place = value[first + s]
        for i in range(N):
            weight, target = weights[i, s], sums[i]
            for d in range(D):
                target[d] += weight * place[d]
    out[:] = sums
    return extreme


@njit(fastmath=FLAGS, error_model="numpy")
def _softmax(scores, mask):
    """scores [n] become weights, in place; returns the largest magnitude of a score
    before the mask."""
    low, high, largest = np.float32(0), np.float32(0), np.float32(-np.inf)
    for s in range(len(scores)):
        score = scores[s]
        low, high = score if score < low else low, score if score > high else high
        scores[s] = _round16(_round16(score) + mask[s])
    for s in range(len(scores)):
        largest = scores[s] if scores[s] > largest else largest
    total = np.float32(0)
    for s in range(len(scores)):
        scores[s] = _exp(scores[s] - largest)
        total += scores[s]
    for s in range(len(scores)):
        scores[s] = _round16(scores[s] / total)
    return max(-low, high)


@njit(parallel=True, fastmath=FLAGS, cache=True)
def attend_kernel(q, key, value, mask, out):
    """As `attend`, of float32 arrays; over the places that some query of a sequence
    sees, or over all where a score of these is `EXTREME`."""
    (B, groups, N, _), S = q.shape, mask.shape[2]
    parts = 1 if B * groups > 1 else 2
    for i in prange(B * groups * parts):
        part, b, g = i % parts, i // parts // groups, i // parts % groups
        start, end = part * N // parts, (part + 1) * N // parts
        first, last = _visible(mask[b], BLOCKED)
        if start < end:
            queries, result = q[b, g, start:end], out[b, g, start:end]
            keys, values, columns = key[b, g], value[b, g], mask[b]
            extreme = _attend_rows(
                queries, keys, values, columns, first, last, start, result
            )
            if extreme > EXTREME and last - first < S:
                _attend_rows(queries, keys, values, columns, 0, S, start, result)


def attend(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """softmax(q @ keyᵀ + mask) @ value, float32 like q: q [B, H_kv, G·T, D] fp16, T
    rows to a head, states [B, H_kv, S, D] float32, mask [B, T, S] fp16."""
    (B, H_kv, N, D), (_, T, S) = q.shape, mask.shape
    _same(key.shape, (B, H_kv, S, D))
    _same(value.shape, key.shape)
    _same((len(mask), N % T), (B, 0))
    out = np.empty(q.shape, np.float32)
    arrays = (each.float().contiguous().numpy() for each in (q, key, value, mask))
    on_threads(attend_kernel, *arrays, out)
    return torch.from_numpy(out)
