"""Products of a few activation vectors with stored weights: a weight is read once and
meets every vector in a register.

A tile is some rows of the weight by 2, 4 or 8 vectors. Its inner loop is written in
vectors of LLVM, since whether LLVM makes vectors of a loop over so many sums by itself
depends on its version and on the loop's length."""

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from miltorch.fast.kernels import (
    FLAGS,
    SMALL_PRODUCT,
    SPLITS,
    _one,
    _row_kernel,
    _same,
    _value,
    all_split,
    emit_split,
    on_threads,
)

# floats of one vector, and sums of one tile: what the processor's registers hold
WIDTH, SUMS = (16, 24) if binding.get_host_cpu_features().get("avx512f") else (8, 12)
LARGEST = 8  # vectors of any tile, and more than its rows
BLOCK = 24  # rows, a multiple of those of every tile
CHUNK = 2 * BLOCK  # rows that stay in a core's cache for all vectors
SPAN = 1024  # terms that are summed in one register, a multiple of WIDTH
CONTRACT = ("contract",)
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
NUMBER = ir.IntType(64)
BYTES = {"i8": 1, "half": 2, "float": 4}  # of a weight, by its type's name


def _load(builder, address, kind: ir.Type, align: int):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _offset(builder, base, index: int, stride):
    return builder.add(base, builder.mul(NUMBER(index), stride))


def _row_scales(builder, scales, rows: int) -> list:
    """The scale of each row, as a vector."""
    vectors = []
    for row in range(rows):
        address = _offset(builder, scales, row, NUMBER(4))
        vectors.append(_splat(builder, _load(builder, address, ir.FloatType(), 4)))
    return vectors


def _row_weights(builder, address, element: ir.Type, scale):
    """WIDTH weights of a row as a vector of float32; an integer is scaled, and the
    product rounded to half."""
    stored = ir.VectorType(element, WIDTH)
    weights = _load(builder, address, stored, BYTES[str(element)])
    if scale is not None:
        weights = builder.sitofp(weights, VECTOR)
        if SPLITS:
            return emit_split(builder, weights, scale)
        weights = builder.fmul(weights, scale)
        weights = builder.fptrunc(weights, ir.VectorType(ir.HalfType(), WIDTH))
    if weights.type == VECTOR:
        return weights
    return builder.fpext(weights, VECTOR)


def _tile(tokens: int, element: ir.Type):
    """A compiled function of (address of the first row, bytes of a row, address of the
    vectors, bytes of a vector, terms, address of the rows' scales, address of the
    results, bytes of a row of results, how many of each row are written, whether they
    are added to what is there): `_rows(tokens)` rows by `tokens` float32 vectors, over
    the first `terms` (a multiple of WIDTH) elements → float32 [rows, tokens]; of a row
    either all are written or all but the last. A weight is an `element`: float, half,
    or an integer of 8 bits that is scaled and rounded to half."""
    rows = _rows.py_func(tokens)

    def emit(context, builder, signature, arguments):
        weight, row_bytes, x, x_bytes, terms, scales, *results = arguments
        zero, step = ir.Constant(VECTOR, None), NUMBER(WIDTH)
        sums = []
        for _ in range(rows * tokens):
            sums.append(cgutils.alloca_once_value(builder, zero))
        row_scales = [None] * rows
        if element == ir.IntType(8):
            row_scales = _row_scales(builder, scales, rows)
        loop = cgutils.for_range_slice(builder, NUMBER(0), terms, step, NUMBER)
        with loop as (k, _):
            start = builder.mul(k, NUMBER(BYTES[str(element)]))
            start = builder.add(weight, start)
            weights = []
            for r, scale in enumerate(row_scales):
                address = _offset(builder, start, r, row_bytes)
                _prefetch(builder, _offset(builder, address, rows, row_bytes))
                weights.append(_row_weights(builder, address, element, scale))
            start = builder.add(x, builder.mul(k, NUMBER(4)))
            for n in range(tokens):
                address = _offset(builder, start, n, x_bytes)
                vector = _load(builder, address, VECTOR, 4)
                for place, row in zip(sums[n::tokens], weights, strict=True):
                    term = builder.fmul(row, vector, flags=CONTRACT)
                    total = builder.fadd(builder.load(place), term, flags=CONTRACT)
                    builder.store(total, place)
        _write_rows(builder, list(map(builder.load, sums)), tokens, *results)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing, weight, row_bytes, x, x_bytes, terms, scales, out, step, n, more):
        return types.void(*[types.int64] * 10), emit

    return tile


def _write_rows(builder, sums: list, tokens: int, out, step, count, more):
    """Writes the total of each of `sums`, of which every row has `tokens`."""
    whole = builder.icmp_signed("==", count, NUMBER(tokens))
    more = builder.icmp_signed("!=", more, NUMBER(0))
    together = WIDTH // tokens * tokens
    for i in range(0, len(sums), tokens):
        first = i % together
        if first == 0:
            totals = _totals(builder, sums[i : i + together])
        address = _offset(builder, out, i // tokens, step)
        with builder.if_else(whole) as branches:
            for branch, size in zip(branches, (tokens, tokens - 1), strict=True):
                with branch:
                    lanes = ir.VectorType(ir.IntType(32), size)
                    lanes = ir.Constant(lanes, list(range(first, first + size)))
                    row = builder.shuffle_vector(totals, totals, lanes)
                    sum_ = builder.fadd(row, _load(builder, address, row.type, 4))
                    row = builder.select(more, sum_, row)
                    place = builder.inttoptr(address, row.type.as_pointer())
                    builder.store(row, place, align=4)


def _prefetch(builder, address):
    """Asks for the cache line at `address`: rows of one tile are as many short streams,
    which no processor foresees."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte] + 3 * [ir.IntType(32)])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    builder.call(
        prefetch, [builder.inttoptr(address, byte), *map(ir.IntType(32), (0, 3, 1))]
    )


def _splat(builder, value):
    one = builder.insert_element(
        ir.Constant(VECTOR, ir.Undefined), value, ir.IntType(32)(0)
    )
    return builder.shuffle_vector(
        one, one, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    )


def _totals(builder, vectors: list):
    """The sums of the elements of up to WIDTH vectors, as one vector: each by halves,
    all at once."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    vectors = vectors + [undefined] * (WIDTH - len(vectors))
    kind, distance = ir.VectorType(ir.IntType(32), WIDTH), WIDTH // 2
    while distance:
        # lanes without this bit sum the first of a pair, lanes with it the second
        near, far = list(range(WIDTH)), [lane ^ distance for lane in range(WIDTH)]
        for lane in range(WIDTH):
            if lane & distance:
                near[lane], far[lane] = WIDTH + lane, WIDTH + lane - distance
        places = ir.Constant(kind, near), ir.Constant(kind, far)
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :])
        vectors = [
            builder.fadd(*(builder.shuffle_vector(a, b, lanes) for lanes in places))
            for a, b in pairs
        ]
        distance //= 2
    return vectors[0]


@njit
def _rows(tokens):
    """Rows of the tile of so many vectors; two vectors wait for memory, which more rows
    at once do not speed up."""
    return max(1, min(2 * tokens, SUMS // tokens))


_half2, _half4, _half6, _half8 = (_tile(n, ir.HalfType()) for n in (2, 4, 6, 8))
_int2, _int4, _int6, _int8 = (_tile(n, ir.IntType(8)) for n in (2, 4, 6, 8))
_float2, _float4, _float6, _float8 = (_tile(n, ir.FloatType()) for n in (2, 4, 6, 8))


def _dots(weight, address, x, stride, terms, scales, results, tokens):
    """The tile of `tokens` vectors, by the type of the weight's elements."""


@overload(_dots)
def _overload_dots(weight, address, x, stride, terms, scales, results, tokens):
    if weight.dtype == types.int8:
        two, four, six, eight = _int2, _int4, _int6, _int8
    elif weight.dtype == types.float32:
        two, four, six, eight = _float2, _float4, _float6, _float8
    else:
        two, four, six, eight = _half2, _half4, _half6, _half8

    def dots(weight, address, x, stride, terms, scales, results, tokens):
        rows = weight.strides[0]
        if tokens == 2:
            two(address, rows, x, stride, terms, scales, *results)
        elif tokens == 4:
            four(address, rows, x, stride, terms, scales, *results)
        elif tokens == 6:
            six(address, rows, x, stride, terms, scales, *results)
        else:
            eight(address, rows, x, stride, terms, scales, *results)

    return dots


@njit
def _first_tile(count, itemsize):
    """How many of `count` vectors the first tile takes, by the bytes of a weight: where
    registers hold few sums, eight vectors leave room for one row, which is faster only
    where it saves making a weight dense twice."""
    if count <= 6:
        return count
    return min(count, LARGEST) if itemsize == 1 or WIDTH > 8 else 4


@njit(cache=True)
def whole_tiles(count):
    """The number of vectors of the tiles that hold `count` of them."""
    return count + count % 2


@njit(fastmath=FLAGS, inline="always")
def _span(weight, scale, x, out, vectors, bounds, terms, sums):
    """Adds to out [B, R, T] of some rows by the vectors of one tile the products of
    some terms.

    Args:
        vectors: the first vector, and how many.
        bounds: the first row, and the row after the last one.
        terms: the first term, and how many.
        sums: memory for the results of a tile.
    """
    (n, count), (first, last), (k, span) = vectors, bounds, terms
    _, R, T = out.shape
    tokens, t = whole_tiles(count), n % T
    rows, place = _rows(tokens), out.ctypes.data + 4 * (n // T * R * T + t)
    vector = x.ctypes.data + n * x.strides[0] + 4 * k
    for start in range(first, last, rows):
        # the last tile of a weight ends at its last row
        row = min(start, len(weight) - rows)
        address = weight.ctypes.data + row * weight.strides[0] + k * weight.itemsize
        scales = scale.ctypes.data + row * scale.strides[0]
        in_place = t + count <= T and row == start
        if in_place:
            results = place + 4 * row * T, 4 * T, count, k
        else:
            results = sums.ctypes.data, 4 * tokens, count, 0
        _dots(weight, address, vector, x.strides[0], span, scales, results, tokens)
        if in_place:
            continue
        for m in range(count):
            column = out[(n + m) // T, :, (n + m) % T]
            for r in range(start - row, rows):
                total = sums[r * tokens + m]
                column[row + r] = total + column[row + r] if k else total


@njit(fastmath=FLAGS, inline="always")
def _chunk(weight, scale, x, out, first, last, sums):
    """The rows of `few` from `first` to `last`, which stay in a core's cache, as a
    span's terms of one tile's vectors do."""
    (B, _, T), K, n = out.shape, weight.shape[1], 0
    terms, bounds = K - K % WIDTH, (first, last)
    while n < B * T:
        count = _first_tile(B * T - n, weight.itemsize)
        for k in range(0, max(terms, 1), SPAN):
            span = k, min(SPAN, terms - k)
            _span(weight, scale, x, out, (n, count), bounds, span, sums)
        n += count
    for n in range(B * T if terms < K else 0):
        for r in range(first, last):
            total = np.float32(0)
            for k in range(terms, K):
                total += _value(weight[r, k], scale[r]) * x[n, k]
            out[n // T, r, n % T] += total


def _in_tiles(weight, scale):
    """Whether tiles make rows of such scales dense."""


@overload(_in_tiles)
def _overload_in_tiles(weight, scale):
    if SPLITS and weight.dtype == types.int8:
        return lambda weight, scale: all_split(scale)
    return lambda weight, scale: True


@njit(fastmath=FLAGS)
def few_rows(weight, scale, x, first, last, out):
    """Rows from `first`, a multiple of BLOCK, to `last` of `few`."""
    B, R, T = out.shape
    sums = np.empty(SUMS + WIDTH, np.float32)
    for start in range(first, last, CHUNK):
        end = min(start + CHUNK, last)
        if R >= LARGEST and _in_tiles(weight, scale[start:end]):
            _chunk(weight, scale, x, out, start, end, sums)
            continue
        for r in range(start, end):
            for n in range(B * T):
                out[n // T, r, n % T] = _row_kernel(weight[r], scale[r], x[n])


@njit
def bounds(part, parts, R):
    """The rows of one of several parts, about as many in each."""
    blocks = -(-R // BLOCK)
    return blocks * part // parts * BLOCK, min(blocks * (part + 1) // parts * BLOCK, R)


@njit(parallel=True, fastmath=FLAGS, cache=True)
def few(weight, scale, x, out, threads):
    """out [B, R, T] = x [B * T, K] @ weight [R, K]ᵀ, of which x holds `whole_tiles`.

    Args:
        weight: int8, float32, or the bits of fp16 values as uint16.
        scale: of each row of int8 weights, [R] float32: fp16 values whose products by
            the weights are finite as fp16.
        threads: whether rows may be divided among threads.
    """
    R = len(weight)
    if threads and weight.size >= SMALL_PRODUCT and R >= LARGEST:
        # an even number of parts
        parts = 2 * -(-R // (2 * CHUNK))
        for i in prange(parts):
            first, last = bounds(i, parts, R)
            few_rows(weight, scale, x, first, last, out)
    else:
        few_rows(weight, scale, x, 0, R, out)


def product(weight: np.ndarray, scale: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    """x [N, K] by weight [R, K] → float32 [N, R], on torch's threads.

    Args:
        weight: int8, or the bits of fp16 values as uint16.
        scale: of each row of int8 weights, [R] float32; not looked at for fp16.
    """
    N, R = len(x), len(weight)
    _same(x.shape[1:], weight.shape[1:])
    _same(scale.shape, (R,))
    threads = torch.get_num_threads() > 1
    if N == 1:
        row = np.ascontiguousarray(x[0].float().numpy())
        out = np.empty((1, R), np.float32)
        on_threads(_one, weight, scale, row, out[0], threads)
        return torch.from_numpy(out)
    out = np.empty((1, R, N), np.float32)
    on_threads(few, weight, scale, tile_rows(x), out, threads)
    return torch.from_numpy(out[0].T)


def tile_rows(x: torch.Tensor) -> np.ndarray:
    """Vectors [N, K] as float32, and a vector of zeros where `whole_tiles` needs it."""
    N, K = x.shape
    rows = np.zeros((whole_tiles(N), K), np.float32)
    torch.from_numpy(rows)[:N] = x.float()
    return rows
