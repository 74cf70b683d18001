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
    _one,
    _row_kernel,
    _same,
    _value,
    on_threads,
)

# floats of one vector, and sums of one tile: what the processor's registers hold
WIDTH, SUMS = (16, 24) if binding.get_host_cpu_features().get("avx512f") else (8, 8)
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
        weights = builder.fmul(builder.sitofp(weights, VECTOR), scale)
        weights = builder.fptrunc(weights, ir.VectorType(ir.HalfType(), WIDTH))
    if weights.type == VECTOR:
        return weights
    return builder.fpext(weights, VECTOR)


def _tile(tokens: int, element: ir.Type):
    """A compiled function of (address of the first row, bytes of a row, address of the
    vectors, bytes of a vector, terms, address of the rows' scales, address of the
    results): `_rows(tokens)` rows by `tokens` float32 vectors, over the first `terms`
    (a multiple of WIDTH) elements → float32 [rows, tokens]. A weight is an `element`:
    float, half, or an integer of 8 bits that is scaled and rounded to half."""
    rows = _rows.py_func(tokens)

    def emit(context, builder, signature, arguments):
        weight, row_bytes, x, x_bytes, terms, scales, out = arguments
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
        totals = list(map(builder.load, sums))
        for i in range(0, len(totals), WIDTH):
            address = builder.add(out, NUMBER(4 * i))
            address = builder.inttoptr(address, VECTOR.as_pointer())
            builder.store(_totals(builder, totals[i : i + WIDTH]), address, align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing, weight, row_bytes, x, x_bytes, terms, scales, out):
        return types.void(*[types.int64] * 7), emit

    return tile


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


def _dots(weight, address, x, stride, terms, scales, out, tokens):
    """The tile of `tokens` vectors, by the type of the weight's elements."""


@overload(_dots)
def _overload_dots(weight, address, x, stride, terms, scales, out, tokens):
    if weight.dtype == types.int8:
        two, four, six, eight = _int2, _int4, _int6, _int8
    elif weight.dtype == types.float32:
        two, four, six, eight = _float2, _float4, _float6, _float8
    else:
        two, four, six, eight = _half2, _half4, _half6, _half8

    def dots(weight, address, x, stride, terms, scales, out, tokens):
        rows = weight.strides[0]
        if tokens == 2:
            two(address, rows, x, stride, terms, scales, out.ctypes.data)
        elif tokens == 4:
            four(address, rows, x, stride, terms, scales, out.ctypes.data)
        elif tokens == 6:
            six(address, rows, x, stride, terms, scales, out.ctypes.data)
        else:
            eight(address, rows, x, stride, terms, scales, out.ctypes.data)

    return dots


@njit
def _tokens(count):
    """Vectors of the tile that takes the first of `count`."""
    return min(LARGEST, count + count % 2)


@njit(cache=True)
def whole_tiles(count):
    """The number of vectors of the tiles that hold `count` of them."""
    return count + count % 2


@njit(fastmath=FLAGS)
def _span(weight, scale, x, places, flat, step, bounds, terms, sums):
    """Adds to the results of some rows by the vectors of one tile the products of some
    terms.

    Args:
        places: of each vector's first result in `flat`; `step` lies between two rows.
        bounds: the first row, and the row after the last one.
        terms: the first term, and how many.
        sums: to be written.
    """
    (first, last), (k, span) = bounds, terms
    tokens = _tokens(len(places))
    rows, count = _rows(tokens), min(tokens, len(places))
    x_k, stride = x.ctypes.data + 4 * k, x.strides[0]
    for start in range(first, last, rows):
        # the last tile of a weight ends at its last row
        row = min(start, len(weight) - rows)
        address = weight.ctypes.data + row * weight.strides[0] + k * weight.itemsize
        scales = scale.ctypes.data + row * scale.strides[0]
        _dots(weight, address, x_k, stride, span, scales, sums, tokens)
        for r in range(start - row, min(rows, last - row)):
            for m in range(count):
                place = places[m] + (row + r) * step
                if k == 0:
                    flat[place] = sums[r * tokens + m]
                else:
                    flat[place] += sums[r * tokens + m]


@njit(fastmath=FLAGS)
def _chunk(weight, scale, x, out, places, first, last):
    """The rows of `few` from `first` to `last`, which stay in a core's cache, as a
    span's terms of one tile's vectors do."""
    sums, step = np.empty(SUMS + WIDTH, np.float32), out.shape[2]
    flat, K = out.reshape(out.size), weight.shape[1]
    terms, bounds = K - K % WIDTH, (first, last)
    for n in range(0, len(places), LARGEST):
        tile = places[n : n + LARGEST]
        for k in range(0, max(terms, 1), SPAN):
            span = k, min(SPAN, terms - k)
            _span(weight, scale, x[n:], tile, flat, step, bounds, span, sums)
        if terms < K:
            for r in range(first, last):
                for m in range(len(tile)):
                    total = np.float32(0)
                    for k in range(terms, K):
                        total += _value(weight[r, k], scale[r]) * x[n + m, k]
                    flat[tile[m] + r * step] += total


@njit
def _places(out):
    B, R, T = out.shape
    places = np.empty(B * T, np.int64)
    for n in range(B * T):
        places[n] = n // T * R * T + n % T
    return places


@njit(fastmath=FLAGS)
def few_rows(weight, scale, x, first, last, out):
    """Rows from `first`, a multiple of BLOCK, to `last` of `few`."""
    (B, R, T), places = out.shape, _places(out)
    if R < LARGEST:
        for r in range(first, last):
            for n in range(B * T):
                out[n // T, r, n % T] = _row_kernel(weight[r], scale[r], x[n])
    else:
        for start in range(first, last, CHUNK):
            _chunk(weight, scale, x, out, places, start, min(start + CHUNK, last))


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
        scale: of each row of int8 weights, [R] float32.
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
