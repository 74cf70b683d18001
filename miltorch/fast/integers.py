"""Products of stored weights in integer arithmetic, where the processor sums products of
bytes four times as fast as it multiplies float32 numbers (AVX-512 VNNI and VBMI).

The values of an activation vector become integers of 24 bits by one power of two: an
fp16 value keeps all its bits down to 2^-13 of the largest, and none loses more than
2^-24 of that. Such an integer is three signed bytes, its digits. A weight is a few
unsigned bytes, its planes, each with a place value, so that a product is a few sums of
bytes by digits, which are exact:

    int8    the weight q plus 128; and what rounding m·q to eleven bits adds, plus 64,
            for the mantissa m of the scale: m·q and that, times a power of two, are the
            fp16 value that the program declares
    int4    the same for each block of 32, with 8 and 4 in place of 128 and 64

What makes bytes unsigned is subtracted where the sums start. What rounding adds meets
the upper two digits: the third would change a product by less than 2^-24 of its largest
value."""

import math

import numpy as np
from llvmlite import binding
from numba import njit, prange

from miltorch.fast.integer_rows import (
    ADDED,
    DIGITS,
    INT8,
    LENGTH,
    PAIRS,
    STEP,
    int4_dot,
    int8_dots,
    starts,
)
from miltorch.fast.kernels import SMALL_PRODUCT
from miltorch.fast.packed import INT4

FEATURES = "avx512vnni", "avx512vbmi", "avx512bw"
AVAILABLE = all(map(binding.get_host_cpu_features().get, FEATURES))
CACHE = 1 << 15  # bytes of digits that stay in a core's first cache
CHUNK = 64  # rows that one thread takes at a time
LARGEST = 65504.0  # of fp16
SMALLEST_NORMAL = 2.0**-14  # of fp16: below, scales have fewer than eleven bits


def _rounding(integers: np.ndarray, added: int) -> np.ndarray:
    """[1024, integers] uint8: what rounding m·q to eleven bits, ties to even, adds, for
    m = 1024 + i, plus `added`."""
    products = np.arange(1024, 2048)[:, None] * integers
    _, bits = np.frexp(products.astype(np.float64))
    unit = 1 << np.maximum(bits - 11, 0)
    rounded = np.rint(products / unit) * unit
    return (rounded - products + added).astype(np.uint8)


def _rounding_of_int4() -> np.ndarray:
    """Where the table of each mantissa begins, 1024 bytes, then the fifteen tables."""
    rounding = _rounding(np.arange(-8, 8), ADDED[INT4][1])
    tables, numbers = np.unique(rounding, axis=0, return_inverse=True)
    return np.concatenate([(16 * numbers).astype(np.uint8), tables.reshape(-1)])


ROUNDING = {
    INT8: _rounding(np.arange(-128, 128), ADDED[INT8][1]),
    INT4: _rounding_of_int4()[None],
}


def tables(form: int, shape: tuple[int, int], scale: np.ndarray) -> np.ndarray | None:
    """What products read beside weights [R, K] and their scales, uint8 [tables, bytes];
    None where the processor, the shape or the values do not allow integers.

    Args:
        scale: int8: of each row, float32. Else as `packed.Packed.scale`.
    """
    if not AVAILABLE or form not in STEP or shape[1] % STEP[form]:
        return None
    sizes = np.abs(scale if form == INT8 else scale.view(np.float16))
    normal = (sizes >= SMALLEST_NORMAL) & (sizes <= LARGEST / ADDED[form][0])
    if not (normal | (sizes == 0)).all():
        return None
    return ROUNDING[form]


_one_int8, _two_int8, _four_int8 = map(int8_dots, (1, 2, 4))
_int8_starts, _int4_starts = map(starts, (INT8, INT4))


@njit
def _vector_digits(form, x, digits):
    """Writes the digits of x [K], in the order in which a form stores weights, and what
    sums start with; gives the value of the last digit's place, NaN where one of x is not
    finite."""
    K, bits, largest = len(x), x.view(np.int32), np.empty(1, np.int32)
    most = np.int32(0)
    # magnitudes are ordered as their bits are, NaN above infinity
    for k in range(K):
        most = max(most, bits[k] & np.int32(0x7FFFFFFF))
    largest[0] = most
    peak = largest.view(np.float32)[0]
    if not np.isfinite(peak):
        return np.float32(np.nan)
    mantissa, exponent = math.frexp(peak)
    if mantissa > 0.996:  # three signed digits reach 127 (2^16 + 2^8 + 1)
        exponent += 1
    factor = np.float32(2.0 ** (23 - exponent))
    if form == INT4:
        groups = x.reshape(-1, 4, 2, 16).transpose(0, 2, 1, 3)
        x = np.ascontiguousarray(groups).reshape(K)
    for k in range(K):
        number = np.int32(np.rint(x[k] * factor))
        low = np.int8(number)
        number = (number - low) >> 8
        middle = np.int8(number)
        digits[k] = (number - middle) >> 8
        digits[K + k] = middle
        digits[2 * K + k] = low
    if form == INT8:
        _int8_starts(digits.ctypes.data, K)
    else:
        _int4_starts(digits.ctypes.data, K)
    return np.float32(2.0 ** (exponent - 23))


@njit
def _digits(form, x, count):
    """Digits of the first `count` vectors of x [N, K], and zeros for those that make
    four of them, int8 [vectors, bytes] in lines of the processor's cache; values of
    their last places."""
    vectors, K = count if count < 3 else -(-count // 4) * 4, x.shape[1]
    size, units = DIGITS * K + max(LENGTH * len(PAIRS), K), np.ones(vectors, np.float32)
    memory = np.zeros(vectors * size + LENGTH, np.int8)
    start = -memory.ctypes.data % LENGTH
    digits = memory[start : start + vectors * size].reshape(vectors, size)
    for n in range(count):
        units[n] = _vector_digits(form, x[n], digits[n])
    return digits, units


@njit
def _mantissa(scale):
    """The ten bits of a scale's mantissa, and what the last of them is worth."""
    bits = np.float32(scale).view(np.int32)
    power = np.int32(bits & np.int32(-(1 << 23))).view(np.float32)
    return (bits >> 13) & 1023, power * np.float32(2.0**-10)


@njit
def _int8_chunk(weight, scale, tables, digits, units, first, out):
    """CHUNK rows of `int8_product` from `first` on, or those that are left."""
    (N, size), (R, K), (B, _, T) = digits.shape, weight.shape, out.shape
    products = np.empty(N, np.float32)
    x, results = digits.ctypes.data, products.ctypes.data
    rows, rounding = weight.ctypes.data, tables.ctypes.data
    for r in range(first, min(first + CHUNK, R)):
        factor = scale[r]
        place, last = _mantissa(factor)
        row, table = rows + r * K, rounding + 256 * place
        if N == 1:
            _one_int8(row, table, K, x, size, factor, last, results)
            out[0, r, 0] = products[0] * units[0]
            continue
        if N == 2:
            _two_int8(row, table, K, x, size, factor, last, results)
        else:
            for n in range(0, N, 4):
                start, end = x + n * size, results + 4 * n
                _four_int8(row, table, K, start, size, factor, last, end)
        for b in range(B):
            for t in range(T):
                out[b, r, t] = products[b * T + t] * units[b * T + t]


@njit(parallel=True, cache=True)
def int8_product(weight, scale, tables, x, out, threads):
    """out [B, R, T] = the first B · T of x [N, K] by weight [R, K] int8 times scale [R]
    float32; False, with nothing done, for an x that is not finite or whose digits are
    more than CACHE."""
    (R, K), count = weight.shape, len(out) * out.shape[2]
    if DIGITS * K * count > CACHE:
        return False
    digits, units = _digits(INT8, x, count)
    if not np.isfinite(units).all():
        return False
    if threads and weight.size >= SMALL_PRODUCT:
        for i in prange(-(-R // CHUNK)):
            _int8_chunk(weight, scale, tables, digits, units, CHUNK * i, out)
    else:
        for first in range(0, R, CHUNK):
            _int8_chunk(weight, scale, tables, digits, units, first, out)
    return True


@njit
def _int4_chunk(codes, scale, tables, digits, K, unit, first, out):
    """CHUNK rows of `int4_product` from `first` on, or those that are left."""
    rows, scales = codes.ctypes.data, scale.ctypes.data
    rounding, x = tables.ctypes.data, digits.ctypes.data
    for r in range(first, min(first + CHUNK, len(codes))):
        blocks = scales + r * (K // 16)
        out[r] = unit * int4_dot(rows + r * (K // 2), blocks, rounding, K, x)


@njit(parallel=True, cache=True)
def int4_product(codes, scale, tables, x, out, threads):
    """out [R] = x [1, K] by a weight [R, K] packed as INT4; False, with nothing done,
    for an x that is not finite."""
    R, K = len(codes), x.shape[1]
    digits, units = _digits(INT4, x, 1)
    vector, unit = digits[0], units[0]
    if not np.isfinite(unit):
        return False
    if threads and R * K >= SMALL_PRODUCT:
        for i in prange(-(-R // CHUNK)):
            _int4_chunk(codes, scale, tables, vector, K, unit, CHUNK * i, out)
    else:
        for first in range(0, R, CHUNK):
            _int4_chunk(codes, scale, tables, vector, K, unit, first, out)
    return True
