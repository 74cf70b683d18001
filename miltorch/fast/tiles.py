"""Products of a few activation vectors with stored weights: a weight is read once and
meets every vector in a register.

A tile is some rows of the weight by 2, 4 or 8 vectors. Its inner loop is written in
vectors of LLVM, since whether LLVM makes vectors of a loop over so many sums by itself
depends on its version and on the loop's length."""

import numpy as np
import torch
import torch.nn.functional as F
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
WIDTH, SUMS = (16, 16) if binding.get_host_cpu_features().get("avx512f") else (8, 8)
CHUNK = 64  # rows that one thread takes at a time
SPAN = 1024  # terms that are summed in one register, a multiple of WIDTH
BLOCK = SUMS // 2  # rows of the weight that stay in a core's cache for all vectors
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
    results): SUMS // tokens rows by `tokens` float32 vectors, over the first `terms` (a
    multiple of WIDTH) elements → float32 [rows, tokens]. A weight is an `element`:
    float, half, or an integer of 8 bits that is scaled and rounded to half."""
    rows = SUMS // tokens

    def emit(context, builder, signature, arguments):
        weight, row_bytes, x, x_bytes, terms, scales, out = arguments
        zero, step = ir.Constant(VECTOR, None), NUMBER(WIDTH)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(SUMS)]
        row_scales = [None] * rows
        if element == ir.IntType(8):
            row_scales = _row_scales(builder, scales, rows)
        loop = cgutils.for_range_slice(builder, NUMBER(0), terms, step, NUMBER)
        with loop as (k, _):
            start = builder.add(x, builder.mul(k, NUMBER(4)))
            vectors = []
            for n in range(tokens):
                address = _offset(builder, start, n, x_bytes)
                vectors.append(_load(builder, address, VECTOR, 4))
            start = builder.mul(k, NUMBER(BYTES[str(element)]))
            start = builder.add(weight, start)
            for r, scale in enumerate(row_scales):
                address = _offset(builder, start, r, row_bytes)
                _prefetch(builder, _offset(builder, address, rows, row_bytes))
                weights = _row_weights(builder, address, element, scale)
                for n, vector in enumerate(vectors):
                    place = sums[r * tokens + n]
                    term = builder.fmul(weights, vector, flags=CONTRACT)
                    total = builder.fadd(builder.load(place), term, flags=CONTRACT)
                    builder.store(total, place)
        for i, place in enumerate(sums):
            address = builder.add(out, NUMBER(4 * i))
            total = _total(builder, builder.load(place))
            builder.store(total, builder.inttoptr(address, total.type.as_pointer()))
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


def _total(builder, vector):
    """The sum of a vector's elements, by halves."""
    width = WIDTH
    while width > 1:
        width //= 2
        halves = []
        for first in (0, width):
            kind = ir.VectorType(ir.IntType(32), width)
            places = ir.Constant(kind, list(range(first, first + width)))
            halves.append(builder.shuffle_vector(vector, vector, places))
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


_half2, _half4, _half8 = (_tile(tokens, ir.HalfType()) for tokens in (2, 4, 8))
_int2, _int4, _int8 = (_tile(tokens, ir.IntType(8)) for tokens in (2, 4, 8))
_float2, _float4, _float8 = (_tile(tokens, ir.FloatType()) for tokens in (2, 4, 8))


def _dots(weight, address, x, stride, terms, scales, out, tokens):
    """The tile of `tokens` vectors, by the type of the weight's elements."""


@overload(_dots)
def _overload_dots(weight, address, x, stride, terms, scales, out, tokens):
    if weight.dtype == types.int8:
        two, four, eight = _int2, _int4, _int8
    elif weight.dtype == types.float32:
        two, four, eight = _float2, _float4, _float8
    else:
        two, four, eight = _half2, _half4, _half8

    def dots(weight, address, x, stride, terms, scales, out, tokens):
        rows = weight.strides[0]
        if tokens == 2:
            two(address, rows, x, stride, terms, scales, out.ctypes.data)
        elif tokens == 4:
            four(address, rows, x, stride, terms, scales, out.ctypes.data)
        else:
            eight(address, rows, x, stride, terms, scales, out.ctypes.data)

    return dots


@njit
def _tokens(count):
    """Vectors of the tile that takes the first of `count`."""
    return 2 if count <= 2 else 4 if count <= 4 else 8


@njit(cache=True)
def whole_tiles(count):
    """The number of vectors of the tiles that hold `count` of them."""
    return count + (_tokens(count % 8) - count % 8 if count % 8 else 0)


@njit(fastmath=FLAGS)
def _block(weight, scale, x, out, places, first, sums):
    """BLOCK rows of `few` from `first` on.

    Args:
        places: [N] of each vector's first result in `out`, flat.
        sums: [2, SUMS], to be written.
    """
    N, K, step = len(places), weight.shape[1], out.shape[2]
    sums, totals = sums
    flat, terms, n = out.reshape(out.size), K - K % WIDTH, 0
    while n < N:
        tokens, vectors = _tokens(N - n), x[n:]
        rows, count = SUMS // tokens, min(tokens, N - n)
        x_n, stride = vectors.ctypes.data, vectors.strides[0]
        for start in range(first, first + BLOCK, rows):
            address = weight.ctypes.data + start * weight.strides[0]
            scales = scale.ctypes.data + start * scale.strides[0]
            _dots(
                weight, address, x_n, stride, min(SPAN, terms), scales, totals, tokens
            )
            for k in range(SPAN, terms, SPAN):
                w, x_k, span = (
                    address + k * weight.itemsize,
                    x_n + 4 * k,
                    min(SPAN, terms - k),
                )
                _dots(weight, w, x_k, stride, span, scales, sums, tokens)
                totals += sums
            for r in range(rows):
                for m in range(count):
                    total = totals[r * tokens + m]
                    for k in range(terms, K):
                        total += (
                            _value(weight[start + r, k], scale[start + r])
                            * vectors[m, k]
                        )
                    flat[places[n + m] + (start + r) * step] = total
        n += tokens


@njit(fastmath=FLAGS)
def _chunk(weight, scale, x, out, places, first):
    """CHUNK rows of `few` from `first` on, or those that are left; the last block ends
    at the last row."""
    sums, R = np.empty((2, SUMS), np.float32), len(weight)
    for start in range(first, min(first + CHUNK, R), BLOCK):
        _block(weight, scale, x, out, places, min(start, R - BLOCK), sums)


@njit
def _places(out):
    B, R, T = out.shape
    places = np.empty(B * T, np.int64)
    for n in range(B * T):
        places[n] = n // T * R * T + n % T
    return places


@njit(fastmath=FLAGS)
def few_here(weight, scale, x, out):
    """`few` on the calling thread."""
    (B, R, T), places = out.shape, _places(out)
    if R < BLOCK:
        for r in range(R):
            for n in range(B * T):
                out[n // T, r, n % T] = _row_kernel(weight[r], scale[r], x[n])
    else:
        for first in range(0, R, CHUNK):
            _chunk(weight, scale, x, out, places, first)


@njit(parallel=True, fastmath=FLAGS, cache=True)
def few(weight, scale, x, out, threads):
    """out [B, R, T] = x [B * T, K] @ weight [R, K]ᵀ for some vectors, of which x holds
    `whole_tiles`.

    Args:
        weight: int8, float32, or the bits of fp16 values as uint16.
        scale: of each row of int8 weights, [R] float32.
        threads: whether rows may be divided among threads.
    """
    R, places = len(weight), _places(out)
    if threads and weight.size >= SMALL_PRODUCT and R >= BLOCK:
        for chunk in prange(-(-R // CHUNK)):
            _chunk(weight, scale, x, out, places, chunk * CHUNK)
    else:
        few_here(weight, scale, x, out)


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
    rows = F.pad(x.float(), (0, 0, 0, whole_tiles(N) - N)).contiguous().numpy()
    out = np.empty((1, R, N), np.float32)
    on_threads(few, weight, scale, rows, out, threads)
    return torch.from_numpy(out[0].T)
