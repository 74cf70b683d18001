"""Attention over a cache, compiled: the few queries of a token that share a head's keys
meet each of them at once, and those of a prompt are the lanes of vectors."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

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
from miltorch.fast.tiles import (
    CONTRACT,
    NUMBER,
    VECTOR,
    WIDTH,
    _load,
    _offset,
    _splat,
    few_rows,
    whole_tiles,
)

LANES = 2 * WIDTH  # queries of a prompt that meet each key at once
STRIDE = 8  # queries of a head are filled up to a multiple
ROWS = WIDTH // 2  # rows of a tile: its sums fill the processor's registers


def _tile(rows: int):
    """A compiled function of (address of a, bytes of a row, bytes of a term, address of
    b, bytes of a term, terms, address of the results, bytes of a row): a [rows, terms]
    @ b [terms, LANES] → float32 [rows, LANES]."""

    def emit(context, builder, signature, arguments):
        a, a_row, a_term, b, b_term, terms, out, out_row = arguments
        zero, parts = ir.Constant(VECTOR, None), range(LANES // WIDTH)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in parts]
            for _ in range(rows)
        ]
        with cgutils.for_range(builder, terms) as loop:
            start = builder.add(b, builder.mul(loop.index, b_term))
            vectors = []
            for part in parts:
                address = builder.add(start, NUMBER(4 * WIDTH * part))
                vectors.append(_load(builder, address, VECTOR, 4))
            start = builder.add(a, builder.mul(loop.index, a_term))
            for row, places in enumerate(sums):
                address = _offset(builder, start, row, a_row)
                one = _splat(builder, _load(builder, address, ir.FloatType(), 4))
                for vector, place in zip(vectors, places, strict=True):
                    term = builder.fmul(one, vector, flags=CONTRACT)
                    total = builder.fadd(builder.load(place), term, flags=CONTRACT)
                    builder.store(total, place)
        for row, places in enumerate(sums):
            for part, place in enumerate(places):
                address = _offset(builder, out, row, out_row)
                address = builder.add(address, NUMBER(4 * WIDTH * part))
                address = builder.inttoptr(address, VECTOR.as_pointer())
                builder.store(builder.load(place), address, align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing, a, a_row, a_term, b, b_term, terms, out, out_row):
        return types.void(*[types.int64] * 8), emit

    return tile


_rows_tile, _row_tile = _tile(ROWS), _tile(1)


@njit
def _product(a, row, term, b, out):
    """out [N, W] = a @ b [K, W], W being whole LANES; element [i, k] of the first
    operand lies i · row + k · term bytes behind the beginning of `a`."""
    (K, width), N = b.shape, len(out)
    line = 4 * width
    start, vectors, target = a.ctypes.data, b.ctypes.data, out.ctypes.data
    for i in range(0, N, ROWS):
        for d in range(0, 4 * width, 4 * LANES):
            x, y = vectors + d, target + i * line + d
            if i + ROWS <= N:
                _rows_tile(start + i * row, row, term, x, line, K, y, line)
            else:
                for r in range(N - i):
                    place = start + (i + r) * row
                    _row_tile(place, row, term, x, line, K, y + r * line, line)


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
    scores, weights = np.empty((1, n, N), np.float32), np.empty((N, n), np.float32)
    few_rows(key[first:last], np.ones(n, np.float32), rows, 0, n, scores)
    for i in range(N):
        own, columns = weights[i], mask[(row + i) % len(mask)][first:last]
        for s in range(n):
            own[s] = scores[0, s, i]
        extreme = max(extreme, _softmax(own, columns))
    sums, places = np.zeros((N, D), np.float32), value[first:last]
    if N >= ROWS and D % LANES == 0:
        _product(weights, 4 * n, 4, places, sums)
    else:
        for s in range(n):
            place = places[s]
            for i in range(N):
                weight, target = weights[i, s], sums[i]
                for d in range(D):
                    target[d] += weight * place[d]
    for i in range(N):
        for d in range(D):
            out[i, d] = _round16(sums[i, d])
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


@njit
def attend_parts(B, groups):
    """The number of parts into which attention over a cache is divided."""
    return B * groups if B * groups > 1 else 2


@njit(fastmath=FLAGS, cache=True)
def attend_part(q, key, value, mask, out, i):
    """One part of `machine.attend`, of float32 arrays; over the places that some query of a
    sequence sees, or over all where a score of these is `EXTREME`."""
    (B, groups, N, _), S = q.shape, mask.shape[2]
    parts = attend_parts(B, groups) // (B * groups)
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


@njit(fastmath=FLAGS, error_model="numpy")
def _softmax_columns(scores, mask):
    """scores [n, LANES] become weights over n, in place; returns the largest magnitude
    of a score before the mask."""
    most, largest = np.zeros(LANES, np.float32), np.full(LANES, -np.inf, np.float32)
    total = np.zeros(LANES, np.float32)
    for s in range(len(scores)):
        row, blocked = scores[s], mask[s]
        for i in range(LANES):
            magnitude = abs(row[i])
            most[i] = magnitude if magnitude > most[i] else most[i]
            row[i] = _round16(_round16(row[i]) + blocked[i])
            largest[i] = row[i] if row[i] > largest[i] else largest[i]
    for s in range(len(scores)):
        row = scores[s]
        for i in range(LANES):
            row[i] = _exp(row[i] - largest[i])
            total[i] += row[i]
    for s in range(len(scores)):
        row = scores[s]
        for i in range(LANES):
            row[i] = _round16(row[i] / total[i])
    return most.max()


@njit(fastmath=FLAGS, error_model="numpy")
def _attend_lanes(q, key, value, mask, out):
    """out [N, D] = softmax(q @ keyᵀ + maskᵀ) @ value for q [N, D], N up to LANES,
    key [n, D], value [n, whole LANES], mask [n, LANES]. Returns and rounds as
    `_attend_rows`."""
    (N, D), (n, width) = q.shape, value.shape
    lanes, sums = np.zeros((D, LANES), np.float32), np.empty((LANES, width), np.float32)
    for i in range(N):
        lanes[:, i] = q[i]
    weights = np.empty((n, LANES), np.float32)
    _product(key, 4 * D, 4, lanes, weights)
    extreme = _softmax_columns(weights, mask)
    _product(weights, 4, 4 * LANES, value, sums)
    out[:] = sums[:N, :D]
    return extreme


@njit(parallel=True, fastmath=FLAGS, cache=True)
def attend_prompt_kernel(q, key, value, mask, first, out):
    """As `attend_prompt`; returns the largest magnitude of a score."""
    (B, groups, N, _), (_, period, n, _) = q.shape, mask.shape
    tiles = -(-N // LANES)
    extreme = np.zeros(B * groups * tiles, np.float32)
    for i in prange(len(extreme)):
        tile, g, b = i % tiles, i // tiles % groups, i // tiles // groups
        start, end = tile * LANES, min(tile * LANES + LANES, N)
        keys, values = key[b, g, first : first + n], value[b, g, first : first + n]
        queries, result = q[b, g, start:end], out[b, g, start:end]
        columns = mask[b, tile % period]
        extreme[i] = _attend_lanes(queries, keys, values, columns, result)
    return extreme.max()


def lanes_of(mask: torch.Tensor) -> torch.Tensor:
    """An additive mask [B, T, n] with queries as lanes: float32 [B, period, n, LANES].
    The rows of heads follow each other, each filled up to whole STRIDEs, so that tiles
    of LANES rows repeat after a few."""
    mask = F.pad(mask.float(), (0, 0, 0, -mask.shape[1] % STRIDE))
    rows = torch.arange(math.lcm(mask.shape[1], LANES)) % mask.shape[1]
    return mask[:, rows].unflatten(1, (-1, LANES)).transpose(2, 3).contiguous()


def attend_prompt(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    first: int,
    T: int,
) -> tuple[torch.Tensor, float]:
    """As `attend` for many queries, T of a head, over the columns of a mask as
    `lanes_of` gives it, which begin at the column `first` of the states; and the
    largest magnitude of a score before the mask."""
    (B, H_kv, N, D), n, S = q.shape, mask.shape[2], key.shape[2]
    fill = -T % STRIDE
    period = math.lcm(T + fill, LANES) // LANES
    _same(key.shape, (B, H_kv, S, D))
    _same(value.shape, key.shape)
    _same((*mask.shape, N % T), (B, period, n, LANES, 0))
    _same((min(first, S - first - n, 0),), (0,))
    q = F.pad(q.float().reshape(B, H_kv, -1, T, D), (0, 0, 0, fill)).flatten(2, 3)
    value, out = F.pad(value, (0, -D % LANES)), torch.empty(q.shape)
    arrays = (each.contiguous().numpy() for each in (q, key, value, mask))
    extreme = on_threads(attend_prompt_kernel, *arrays, first, out.numpy())
    out = out.unflatten(2, (-1, T + fill))[:, :, :, :T]
    return out.reshape(B, H_kv, N, D), float(extreme)
