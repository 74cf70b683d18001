"""What decoding computes, compiled by numba: products with stored weights, norms,
rotations, one query's attention.

Weights stay in memory as they are stored; each dequantized int8 weight is rounded to
fp16 before it meets its activation, as `constexpr_blockwise_shift_scale` says. Products
and sums are float32. Compiled once per machine, then read from a cache."""

import fcntl
import platform
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import binding, ir
from numba import config, njit, prange, set_num_threads, types
from numba.extending import intrinsic, overload

from miltorch.ops.linear import TERMS

# numba's own pool, where OpenMP is missing, takes one caller at a time
LOCK = threading.Lock()
LOCAL = threading.local()  # `threads`: how many of them numba uses for this one
# scores of such size come near the mask's -1e4: blocked columns may count then
EXTREME = np.float32(1e3)
SMALL_PRODUCT = 1 << 16  # weights below which a second thread costs more than it gives
# an additive mask at or below this gives a weight of 0 beside any attended column
BLOCKED = -1e4
SMALLEST_NORMAL = np.float32(2**-14)  # of fp16
# Whether int8 weights times a scale are rounded by Veltkamp's splitting: x86 with FMA and
# without AVX-512 converts eight numbers to fp16 and back in more instructions.
SPLITS = bool(binding.get_host_cpu_features().get("fma")) and not (
    binding.get_host_cpu_features().get("avx512f")
)
# sums may be reordered; NaN and infinity keep their meaning
FLAGS = {"reassoc", "contract"}


@cache
def available() -> bool:
    """Whether this processor converts fp16 in hardware; without it LLVM's conversion
    aborts the process."""
    return platform.machine() in ("arm64", "aarch64") or bool(
        binding.get_host_cpu_features().get("f16c")
    )


def instruction(operand, result):
    """Makes a function for compiled code of one that emits LLVM instructions for a
    value of numba type `operand`."""

    def register(emit):
        @intrinsic
        def compiled(typing, x):
            return result(operand), lambda context, builder, signature, arguments: emit(
                builder, arguments[0]
            )

        return compiled

    return register


@instruction(types.float32, types.float32)
def _round16(builder, x):
    """float32 rounded to fp16, to nearest even."""
    return builder.fpext(builder.fptrunc(x, ir.HalfType()), ir.FloatType())


@instruction(types.uint16, types.float32)
def _wide(builder, bits):
    """The float32 value of the bits of an fp16 one."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@instruction(types.int32, types.float32)
def _power_of_two(builder, exponent):
    """2^exponent as float32, for exponents of normal numbers."""
    biased = builder.add(exponent, ir.Constant(ir.IntType(32), 127))
    return builder.bitcast(
        builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType()
    )


def _value(weight, scale):
    """A stored weight as the program declares it: an int8 one scaled and rounded to
    fp16, another (an fp16 one by its bits) as it is."""


@overload(_value)
def _overload_value(weight, scale):
    if weight is types.uint16:
        return lambda weight, scale: _wide(weight)
    if weight is types.float32:
        return lambda weight, scale: weight
    return lambda weight, scale: _round16(np.float32(weight) * scale)


@intrinsic
def _split(typing, weight, scale):
    """A product rounded to eleven bits, ties to even (Veltkamp's splitting), of an int8
    weight as float32 and a scale of eleven bits: c = w·(2^13 + 1)·s is rounded once, and
    c - (c - w·s) is the result."""

    def emit(context, builder, signature, arguments):
        return emit_split(builder, *arguments)

    return types.float32(types.float32, types.float32), emit


def emit_split(builder, weight, scale):
    """`_split` of two numbers or vectors of float32."""
    kind = weight.type
    name = "llvm.fma.f32" if kind == ir.FloatType() else f"llvm.fma.v{kind.count}f32"
    fma = builder.module.globals.get(name)
    fma = fma or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    factor = 8193.0 if kind == ir.FloatType() else [8193.0] * kind.count
    large = builder.fmul(weight, builder.fmul(scale, ir.Constant(kind, factor)))
    rest = builder.call(fma, [builder.fneg(weight), scale, large])
    return builder.fsub(large, rest)


@njit
def _normal_value(weight, scale):
    return _split(np.float32(weight), scale)


def _splits(weight, scale):
    """Whether `_normal_value` is the value of every such weight."""


@overload(_splits)
def _overload_splits(weight, scale):
    if SPLITS and weight.dtype is types.int8:
        return lambda weight, scale: _is_split(scale)
    return lambda weight, scale: False


@njit(cache=True)
def _is_split(scale):
    return abs(scale) >= SMALLEST_NORMAL or scale == 0


@njit(cache=True)
def all_split(scale):
    """Whether `_split` rounds every product by scales [R] float32 and int8 weights that
    is finite as fp16."""
    for one in scale:
        if not _is_split(one):
            return False
    return True


@njit(fastmath=FLAGS, cache=True)
def _row_kernel(weight, scale, x):
    """weight [K] · x [K]"""
    total = np.float32(0)
    if _splits(weight, scale):
        for k in range(weight.shape[0]):
            total += _normal_value(weight[k], scale) * x[k]
    else:
        for k in range(weight.shape[0]):
            total += _value(weight[k], scale) * x[k]
    return total


@njit(parallel=True, fastmath=FLAGS, cache=True)
def _one(weight, scale, x, out, threads):
    """out [R] = weight [R, K] @ x [K], for one activation vector; on the calling thread
    where others cost more than they give."""
    if threads and weight.size >= SMALL_PRODUCT:
        for r in prange(weight.shape[0]):
            out[r] = _row_kernel(weight[r], scale[r], x)
    else:
        for r in range(weight.shape[0]):
            out[r] = _row_kernel(weight[r], scale[r], x)


@njit(fastmath=FLAGS, cache=True)
def _four(weight, scale, x, terms):
    """weight [K] · x [4, K]: a weight is made dense once for four vectors. K is given
    as `terms`: a constant makes it faster."""
    a = b = c = d = np.float32(0)
    for k in range(terms):
        w = _value(weight[k], scale)
        a += w * x[0, k]
        b += w * x[1, k]
        c += w * x[2, k]
        d += w * x[3, k]
    return a, b, c, d


@njit(parallel=True, fastmath=FLAGS, cache=True)
def _narrow(weight, x, out):
    """Computes out [R, 4 n] for weight [R, K/TERMS, TERMS], x [n, K/TERMS, 4, TERMS],
    each running sum rounded to fp16 after every TERMS."""
    for r in prange(weight.shape[0]):
        for n in range(x.shape[0]):
            a = b = c = d = np.float32(0)
            for g in range(weight.shape[1]):
                p, q, s, t = _four(weight[r, g], np.float32(1), x[n, g], TERMS)
                a, b, c, d = (
                    _round16(a + p),
                    _round16(b + q),
                    _round16(c + s),
                    _round16(d + t),
                )
            out[r, 4 * n], out[r, 4 * n + 1], out[r, 4 * n + 2], out[r, 4 * n + 3] = (
                a,
                b,
                c,
                d,
            )


def narrow_product(weight: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    """x [N, K] by weight [R, K] → float32 [N, R], the running sum rounded to fp16 after
    every TERMS of the K products.

    Args:
        weight: the bits of fp16 values as uint16; K a multiple of TERMS.
    """
    (N, K), R = x.shape, len(weight)
    _same((K, K % TERMS), (weight[0].size, 0))
    rows = (
        F.pad(x.float(), (0, 0, 0, -N % 4))
        .reshape(-1, 4, K // TERMS, TERMS)
        .transpose(1, 2)
        .contiguous()
    )
    out = np.empty((R, 4 * len(rows)), np.float32)
    on_threads(_narrow, weight.reshape(R, -1, TERMS), rows.numpy(), out)
    return torch.from_numpy(out[:, :N].T)


def _same(shape, needed) -> None:
    """Raises ValueError unless two shapes are equal: compiled loops check no index."""
    if tuple(shape) != tuple(needed):
        raise ValueError(f"shape {list(shape)} where {list(needed)} is needed")


def on_threads(kernel, *arguments):
    """Runs a parallel kernel on as many threads as torch uses."""
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    with LOCK:
        if getattr(LOCAL, "threads", None) != threads:
            set_num_threads(threads)
            # starting numba's pool sets the number for OpenMP, and so for torch
            torch.set_num_threads(threads)
            LOCAL.threads = threads
        if kernel.overloads or not kernel._cache.cache_path:
            return kernel(*arguments)
        with _compiling(kernel):
            return kernel(*arguments)


@contextmanager
def _compiling(kernel):
    """Lets one process at a time compile a kernel, which takes up to a minute; those
    that wait read its machine code from numba's cache."""
    folder = Path(kernel._cache.cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kernel.__name__}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@njit(cache=True)
def _exp(x):
    """e^x within 2e-7 of its value, in operations that a processor does on many numbers
    at once (Cephes' expf)."""
    x = min(max(x, np.float32(-87)), np.float32(88))
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    for factor in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        series = series * rest + np.float32(factor)
    return (series * rest * rest + rest + np.float32(1)) * _power_of_two(
        np.int32(whole)
    )


@njit(fastmath=FLAGS, cache=True)
def _rms_norm_kernel(x, weight, bounds, eps0, eps1, gains, out):
    low, high, tiny = bounds
    width, bits, largest = x.shape[1], x.view(np.int32), np.empty(1, np.int32)
    for n in range(x.shape[0]):
        most, total = np.int32(0), np.float32(0)
        # magnitudes are ordered as their bits are, NaN above infinity
        for i in range(width):
            most = max(most, bits[n, i] & np.int32(0x7FFFFFFF))
        largest[0] = most
        peak = min(max(largest.view(np.float32)[0], low), high)
        eps = _round16(
            _scaled_rows(_round16(eps0[0] / peak), eps0[1:])
            * _scaled_rows(_round16(eps1[0] / peak), eps1[1:])
        )
        for i in range(width):
            y = _round16(x[n, i] / peak)
            out[n, i] = y
            total += _round16(y * y)
        mean = _round16(total / np.float32(width))
        root = _scaled_rows(
            _round16(np.float32(1) / np.sqrt(_round16(mean + eps) + tiny)), gains
        )
        for i in range(width):
            out[n, i] = _round16(_round16(out[n, i] * root) * weight[i])


@njit(cache=True)
def _scaled_rows(value, factors):
    for factor in factors:
        value = _round16(value * factor)
    return value


def rms_norm_rows(x: torch.Tensor, weight, bounds, eps0, eps1, gains) -> torch.Tensor:
    """Rows of x [N, W] fp16 over their peak, then over the root of their mean square
    plus eps, by weight [W]; fp16.

    Every step is rounded to fp16, as the program declares it.

    Args:
        bounds: of the peak, and what rsqrt adds: [3] float32.
        eps0, eps1: a constant that is divided by the peak, and factors; eps is the
            product of the two.
        gains: factors of the root.
    """
    _same(x.shape[1:], weight.shape)
    x = x.contiguous().float().numpy()
    out = np.empty_like(x)
    _rms_norm_kernel(x, weight, bounds, eps0, eps1, gains, out)
    return torch.from_numpy(out).half()


@njit(cache=True)
def _rotate(x, cos, sin, out):
    (B, H, T, D), half = x.shape, cos.shape[3]
    for b in range(B):
        for h in range(H):
            for t in range(T):
                row, turned = x[b, h, t], out[b, h, t]
                for i in range(half):
                    c, s, a, z = cos[b, 0, t, i], sin[b, 0, t, i], row[i], row[half + i]
                    turned[i] = _round16(_round16(a * c) - _round16(z * s))
                    turned[half + i] = _round16(_round16(z * c) + _round16(a * s))
                for i in range(2 * half, D):
                    turned[i] = row[i]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] fp16 with columns i and i + half turned by cos, sin [B, 1, T,
    half]; further ones as they are."""
    half = min(cos.shape[-1], x.shape[-1] // 2)
    _same(cos.shape, (len(x), 1, x.shape[2], half))
    _same(sin.shape, cos.shape)
    x = x.contiguous().float().numpy()
    out = np.empty_like(x)
    _rotate(x, cos.float().numpy(), sin.float().numpy(), out)
    return torch.from_numpy(out).half()


@njit(cache=True)
def _one_hot_rows(mask):
    B, S, T = mask.shape
    places = np.full((B, T), -1)
    for b in range(B):
        for s in range(S):
            for t in range(T):
                if mask[b, s, t] != 0:
                    if (
                        mask[b, s, t] != 1
                        or places[b, t] >= 0
                        or (places[b] == s).any()
                    ):
                        return False, places
                    places[b, t] = s
    return True, places


def one_hot_rows(mask: torch.Tensor) -> np.ndarray | None:
    """Places [B, T] in the state that the columns of a write mask [B, S, T] name, -1
    for an empty one.

    None unless each column and each row holds one 1 or nothing.
    """
    sane, places = _one_hot_rows(mask.float().numpy())
    return places if sane else None


def write_rows(state: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """state [B, H, S, D] at `places` [B, T] becomes rows [B, H, T, D], in place; -1
    writes nothing.

    What is not finite spreads as in k·(1 − Σ mask) + mask @ rows: a row's NaN or
    infinity times the mask's zeros is NaN.

    Raises ValueError for rows of another shape and for a place past the state.
    """
    B, H, S, D = state.shape
    _same(rows.shape, (B, H, places.shape[1], D))
    _same(places.shape[:1], (B,))
    _same(places[places >= S], ())
    _write(state, places, rows)


@njit(cache=True)
def _write(state, places, rows):
    for b in range(places.shape[0]):
        plain = _finite(rows[b])
        for t in range(places.shape[1]):
            plain = plain and (
                places[b, t] < 0
                or _finite(state[b, :, places[b, t] : places[b, t] + 1])
            )
        if not plain:
            _formula(state[b], places[b], rows[b])
            continue
        for t in range(places.shape[1]):
            if places[b, t] >= 0:
                state[b, :, places[b, t]] = rows[b, :, t]


@njit(fastmath=FLAGS, cache=True)
def _finite(x):
    """Whether every element of x [H, T, D] is finite."""
    total = np.float32(0)
    for h in range(x.shape[0]):
        for t in range(x.shape[1]):
            for d in range(x.shape[2]):
                total += x[h, t, d] * np.float32(0)
    return total == 0


@njit(cache=True)
def _formula(state, places, rows):
    H, S, D = state.shape
    for h in range(H):
        for s in range(S):
            for d in range(D):
                old, total = state[h, s, d], np.float32(0)
                for t in range(len(places)):
                    if places[t] == s:
                        old *= np.float32(0)
                        total += rows[h, t, d]
                    else:
                        total += np.float32(0) * rows[h, t, d]
                state[h, s, d] = old + total


@njit(cache=True)
def _visible(mask, blocked):
    first, last = mask.shape[1], 0
    for t in range(mask.shape[0]):
        seen = False
        for s in range(mask.shape[1]):
            if mask[t, s] > blocked:
                seen, first, last = True, min(first, s), max(last, s + 1)
        if not seen:
            return 0, mask.shape[1]
    return first, last


def visible(mask: torch.Tensor, blocked: float) -> tuple[int, int]:
    """First and last + 1 of the columns of an additive mask [T, S] that some query
    sees; all, when one sees nothing."""
    return _visible(mask.float().numpy(), blocked)
