"""The instruction LINEAR of a `Bytecode`: a few activation vectors by a stored weight, by
the kernel for its form.

One thread prepares the vectors, then each part of the rows is computed by itself."""

import numpy as np
from numba import carray, njit

from miltorch.fast import integers, packed, team, tiles
from miltorch.fast.addresses import floats, halves, signed_bytes, unsigned_bytes
from miltorch.fast.integer_rows import LENGTH
from miltorch.fast.kernels import _round16, _row_kernel
from miltorch.fast.packed_rows import TABLE6

# fields of an instruction: result [B, R, T], x, strides of its axes B, K and T in bytes,
# B, K, T, R, weight, its form (`products.Linear.form`), scales, table (0 where products
# in integers are not possible), bias


@njit
def parts(code, threads):
    """Into how many parts rows are divided."""
    K, R = code[7], code[9]
    return team.parts(R * K, threads) if R >= tiles.LARGEST else 1


@njit
def scratch_bytes(form, count, K):
    """What `prepare` needs for `count` vectors: float32 rows, then digits."""
    rows = 4 * max(tiles.whole_tiles(count), packed.whole_vectors(count)) * K
    return rows + LENGTH + integers.size(count, K) if form == 1 else rows


@njit
def _rows_of(code, scratch):
    """The vectors as rows [N, K]: a single dense one where it lies."""
    x, sK, B, K, T, form = code[2], code[4], code[6], code[7], code[8], code[11]
    if B * T == 1 and sK == 4:
        return carray(floats(x), (1, K))
    if form <= 2:
        return carray(floats(scratch), (tiles.whole_tiles(B * T), K))
    return carray(floats(scratch), (packed.whole_vectors(B * T), K))


@njit
def _digits_at(code, scratch):
    """The address of digits: a line of the cache behind the rows."""
    B, K, T = code[6:9]
    end = scratch + 4 * tiles.whole_tiles(B * T) * K
    return end + -end % LENGTH


@njit
def prepare(code, scratch):
    """Writes the vectors to an address; whether products are in integers."""
    x, sB, sK, sT, B, K, T = code[2:9]
    rows = _rows_of(code, scratch)
    if B * T > 1 or sK != 4:
        for n in range(B * T):
            start = x + n // T * sB + n % T * sT
            for k in range(K):
                rows[n, k] = carray(floats(start + k * sK), (1,))[0]
    table = code[13]
    return table != 0 and _digits(rows, B * T, _digits_at(code, scratch))


def _in_integers(code, memory, first, last, out):
    """Rows of an int8 weight from `first` to `last` by digits at an address."""
    K, R, (weight, _, scale, table) = code[7], code[9], code[10:14]
    stored, scales = carray(signed_bytes(weight), (R, K)), carray(floats(scale), (R,))
    rounding = carray(unsigned_bytes(table), (1024, 256))
    integers.rows(stored, scales, rounding, memory, first, last, out)


def _not_in_integers(code, memory, first, last, out):
    pass


def _no_digits(x, count, memory):
    return False


# other processors cannot even compile the instructions
_integers = njit(_in_integers if integers.AVAILABLE else _not_in_integers)
_digits = integers.write_digits if integers.AVAILABLE else njit(_no_digits)


@njit
def compute(code, scratch, in_integers, part, parts):
    """One part of the rows of an instruction that is prepared."""
    out, B, T, R = code[1], code[6], code[8], code[9]
    form, bias = code[11], code[14]
    first, last = tiles.bounds(part, parts, R)
    result = carray(floats(out), (B, R, T))
    if in_integers:
        _integers(code, _digits_at(code, scratch), first, last, result)
    elif form <= 2:
        _stored_rows(code, _rows_of(code, scratch), first, last, result)
    else:
        _packed_rows(code, _rows_of(code, scratch), first, last, result)
    offsets = carray(floats(bias), (R,))
    for b in range(B):
        if bias:
            for r in range(first, last):
                for t in range(T):
                    result[b, r, t] += offsets[r]
        flat = carray(floats(out + 4 * (b * R + first) * T), ((last - first) * T,))
        for i in range(len(flat)):
            flat[i] = _round16(flat[i])


@njit(inline="always")
def _stored_rows(code, x, first, last, out):
    """Rows of out [B, R, T] by an int8 or fp16 weight at an address."""
    K, (R, weight, form, scale) = code[7], code[9:13]
    scales = carray(floats(scale), (R,))
    if form == 1:
        _dense_rows(carray(signed_bytes(weight), (R, K)), scales, x, first, last, out)
    else:
        _dense_rows(carray(halves(weight), (R, K)), scales, x, first, last, out)


@njit(inline="always")
def _dense_rows(weight, scale, x, first, last, out):
    if len(x) == 1:
        for r in range(first, last):
            out[0, r, 0] = _row_kernel(weight[r], scale[r], x[0])
    else:
        tiles.few_rows(weight, scale, x, first, last, out)


@njit(inline="always")
def _packed_rows(code, x, first, last, out):
    """Rows of out [B, R, T] by a packed weight at an address."""
    K, (R, weight, form, scale) = code[7], code[9:13]
    codes = carray(
        unsigned_bytes(weight), (R, K * 3 // 4 if form == packed.LUT6 else K // 2)
    )
    # no fewer than there are
    factors = carray(halves(scale), (R * max(1 + TABLE6, K // 32),))
    products = np.empty((last - first, len(x)), np.float32)
    packed.rows(form, codes, factors, x, first, last, products)
    T = out.shape[2]
    for r in range(first, last):
        for n in range(len(out) * T):
            out[n // T, r, n % T] = products[r - first, n]
