"""Products of stored weights in integer arithmetic, where the processor sums products of
bytes four times as fast as it multiplies float32 numbers (AVX-512 VNNI and VBMI).

The values of an activation vector become integers of 24 bits by one power of two: an
fp16 value keeps all its bits down to 2^-13 of the largest, and none loses more than
2^-24 of that. Such an integer is three signed bytes, its digits. An int8 weight q by
the mantissa m of its scale, rounded to the fp16 value that the program declares, is two
unsigned bytes, its planes: q plus 128, and what rounding m·q to eleven bits adds, plus
64. So a product is a few sums of bytes by digits, which are exact.

What makes bytes unsigned is subtracted where the sums start. What rounding adds meets
the upper two digits: the third would change a product by less than 2^-24 of its largest
value."""

import math

import numpy as np
from llvmlite import binding
from numba import carray, njit

from miltorch.fast.addresses import floats, signed_bytes
from miltorch.fast.integer_rows import ADDED, DIGITS, LENGTH, PAIRS, dots, write_starts

FEATURES = "avx512vnni", "avx512vbmi", "avx512bw"
AVAILABLE = all(map(binding.get_host_cpu_features().get, FEATURES))
CACHE = 1 << 15  # bytes of digits that stay in a core's first cache
LARGEST = 65504.0  # of fp16
SMALLEST_NORMAL = 2.0**-14  # of fp16: below, scales have fewer than eleven bits


def _rounding() -> np.ndarray:
    """[1024, 256] uint8: what rounding m·q to eleven bits, ties to even, adds, for m =
    1024 + i and q from -128 on, plus what makes it unsigned."""
    products = np.arange(1024, 2048)[:, None] * np.arange(-128, 128)
    _, bits = np.frexp(products.astype(np.float64))
    unit = 1 << np.maximum(bits - 11, 0)
    rounded = np.rint(products / unit) * unit
    return (rounded - products + ADDED[1]).astype(np.uint8)


ROUNDING = _rounding()


def table(shape: tuple[int, int], scale: np.ndarray) -> np.ndarray | None:
    """What products read beside int8 weights [R, K] and the scales of rows, uint8
    [1024, 256]; None where the processor, the shape or the values do not allow
    integers.

    Args:
        scale: [R] float32.
    """
    if not AVAILABLE or shape[1] % LENGTH:
        return None
    sizes = np.abs(scale)
    normal = (sizes >= SMALLEST_NORMAL) & (sizes <= LARGEST / ADDED[0])
    if not (normal | (sizes == 0)).all():
        return None
    return ROUNDING


@njit
def size(count, K):
    """Bytes that `write_digits` writes for so many vectors."""
    return _units(count) + _vectors(count) * (DIGITS * K + LENGTH * len(PAIRS))


@njit
def _vectors(count):
    """The number of vectors of which rows meet one, two or four at once."""
    return count if count < 3 else -(-count // 4) * 4


@njit
def _units(count):
    """Bytes of a float32 number for each vector, in whole lines."""
    return -(-count // 16) * LENGTH


_one, _two, _four = map(dots, (1, 2, 4))


@njit
def _vector_digits(x, digits):
    """Writes the digits of x [K] and what sums start with; gives the value of the last
    digit's place, NaN where one of x is not finite."""
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
    for k in range(K):
        number = np.int32(np.rint(x[k] * factor))
        low = np.int8(number)
        number = (number - low) >> 8
        middle = np.int8(number)
        digits[k] = (number - middle) >> 8
        digits[K + k] = middle
        digits[2 * K + k] = low
    write_starts(digits.ctypes.data, K)
    return np.float32(2.0 ** (exponent - 23))


@njit
def write_digits(x, count, memory):
    """Writes the value of each vector's last place, then the digits, of the first
    `count` of x [N, K] to an address in lines of the processor's cache; False where one
    of x is not finite, or where the digits are more than CACHE."""
    K = x.shape[1]
    if DIGITS * K * count > CACHE:
        return False
    units, digits = _digits(memory, count, K)
    for n in range(len(digits)):
        if n < count:
            units[n] = _vector_digits(x[n], digits[n])
            if not np.isfinite(units[n]):
                return False
        else:
            digits[n] = 0
    return True


@njit
def _digits(memory, count, K):
    """What `write_digits` writes: float32 [count], int8 [vectors, bytes]."""
    shape = _vectors(count), DIGITS * K + LENGTH * len(PAIRS)
    digits = carray(signed_bytes(memory + _units(count)), shape)
    return carray(floats(memory), (count,)), digits


@njit
def _mantissa(scale):
    """The ten bits of a scale's mantissa, and what the last of them is worth."""
    bits = np.float32(scale).view(np.int32)
    power = np.int32(bits & np.int32(-(1 << 23))).view(np.float32)
    return (bits >> 13) & 1023, power * np.float32(2.0**-10)


@njit
def rows(weight, scale, table, memory, first, last, out):
    """Rows from `first` to `last` of out [B, R, T] = vectors by weight [R, K] int8
    times scale [R] float32, by what `write_digits` wrote for B · T vectors."""
    K, (B, _, T) = weight.shape[1], out.shape
    units, digits = _digits(memory, B * T, K)
    N, size = digits.shape
    products = np.empty(N, np.float32)
    x, results = digits.ctypes.data, products.ctypes.data
    for r in range(first, last):
        factor = scale[r]
        place, unit = _mantissa(factor)
        row, rounding = weight.ctypes.data + r * K, table.ctypes.data + 256 * place
        if N == 1:
            _one(row, rounding, K, x, size, factor, unit, results)
        elif N == 2:
            _two(row, rounding, K, x, size, factor, unit, results)
        else:
            for n in range(0, N, 4):
                start, end = x + n * size, results + 4 * n
                _four(row, rounding, K, start, size, factor, unit, end)
        for b in range(B):
            for t in range(T):
                out[b, r, t] = products[b * T + t] * units[b * T + t]
