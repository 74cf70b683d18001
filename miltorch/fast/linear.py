"""The instruction LINEAR of a `Bytecode`: a few activation vectors by a stored weight, by
the kernel for its form."""

import numpy as np
from numba import carray, njit

from miltorch.fast import integers, packed, tiles
from miltorch.fast.addresses import floats, halves, signed_bytes, unsigned_bytes
from miltorch.fast.kernels import _one, _round16


@njit
def linear(code, scratch, threads):
    """Executes an instruction LINEAR.

    Fields: result [B, R, T], x, strides of its axes B, K and T in bytes, B, K, T, R,
    weight, its form (`products.Linear.form`), scales, tables (0 where products in
    integers are not possible), bias."""
    out, x, sB, sK, sT, B, K, T, R, weight, form, scale, tables, bias = code[1:15]
    N, result = B * T, carray(floats(out), (B, R, T))
    rows = carray(floats(scratch), (_whole(form, N), K))
    if N == 1 and sK == 4:
        rows = carray(floats(x), (1, K))
    else:
        for n in range(N):
            start = x + n // T * sB + n % T * sT
            for k in range(K):
                rows[n, k] = carray(floats(start + k * sK), (1,))[0]
    if not _integers(form, weight, scale, tables, rows, result, threads):
        if N == 1:
            flat = carray(floats(out), (R,))
            _one_product(form, weight, scale, rows[0], flat, threads)
        else:
            _few_products(form, weight, scale, rows, result, threads)
    if bias:
        offsets = carray(floats(bias), (R,))
        for b in range(B):
            for r in range(R):
                for t in range(T):
                    result[b, r, t] += offsets[r]
    flat = carray(floats(out), (N * R,))
    for i in range(N * R):
        flat[i] = _round16(flat[i])


@njit
def _whole(form, count):
    """Vectors of the tiles that hold `count` of them."""
    return tiles.whole_tiles(count) if form <= 2 else packed.whole_vectors(count)


def _in_integers(form, weight, scale, tables, x, out, threads):
    """out [B, R, T] = the first B · T of x [N, K] by the weight [R, K] in integers;
    False, with nothing done, where that is not possible."""
    (B, R, T), K = out.shape, x.shape[1]
    if tables == 0:
        return False
    if form == 1:
        stored, scales = (
            carray(signed_bytes(weight), (R, K)),
            carray(floats(scale), (R,)),
        )
        rounding = carray(unsigned_bytes(tables), (1024, 256))
        return integers.int8_product(stored, scales, rounding, x, out, threads)
    if B * T > 1:
        return False
    codes, factors = _packed_arrays(form, weight, scale, R, K)
    few, flat = carray(unsigned_bytes(tables), (1,)), out.reshape(R)
    return integers.int4_product(codes, factors, few, x, flat, threads)


def _not_in_integers(form, weight, scale, tables, x, out, threads):
    return False


# other processors cannot even compile the instructions
_integers = njit(_in_integers if integers.AVAILABLE else _not_in_integers)


@njit
def _one_product(form, weight, scale, x, out, threads):
    """out [R] = weight [R, K] @ x [K]; addresses of the weight and its scales."""
    R, K, scales = len(out), len(x), carray(floats(scale), (len(out),))
    if form == 1:
        _one(carray(signed_bytes(weight), (R, K)), scales, x, out, threads)
    elif form == 2:
        _one(carray(halves(weight), (R, K)), scales, x, out, threads)
    else:
        _packed_product(
            form, weight, scale, x.reshape(1, K), out.reshape(R, 1), threads
        )


@njit
def _few_products(form, weight, scale, x, out, threads):
    """out [B, R, T] = x [N, K] by the weight [R, K], N being B · T or more."""
    (B, R, T), (N, K) = out.shape, x.shape
    scales = carray(floats(scale), (R,))
    if form == 1:
        tiles.few(carray(signed_bytes(weight), (R, K)), scales, x, out, threads)
    elif form == 2:
        tiles.few(carray(halves(weight), (R, K)), scales, x, out, threads)
    else:
        products = np.empty((R, N), np.float32)
        _packed_product(form, weight, scale, x, products, threads)
        for r in range(R):
            for n in range(B * T):
                out[n // T, r, n % T] = products[r, n]


@njit
def _packed_product(form, weight, scale, x, out, threads):
    """out [R, N] = x [N, K] by the packed weight [R, K] at an address."""
    codes, factors = _packed_arrays(form, weight, scale, len(out), x.shape[1])
    packed._product(form, codes, factors, x, out, threads)


@njit
def _packed_arrays(form, weight, scale, R, K):
    """Codes of a packed weight at addresses, and its scales, no fewer than there are."""
    codes = carray(
        unsigned_bytes(weight), (R, K * 3 // 4 if form == packed.LUT6 else K // 2)
    )
    return codes, carray(halves(scale), (R * max(65, K // 32),))
