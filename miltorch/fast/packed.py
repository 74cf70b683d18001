"""Products with weights of 4 and 6 bits that stay packed in memory: int4 blocks with a
scale, and indices of lookup tables.

A weight becomes the fp16 value that the program declares, then float32, in a register:
products and sums are float32."""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange

from miltorch.fast.kernels import SMALL_PRODUCT, _same, on_threads
from miltorch.fast.lookup import (
    ENTRIES,
    EXTREME,
    INT4,
    LANES,
    LUT4,
    LUT6,
    PERMUTES,
    SIDE,
    STORED,
    stored,
)
from miltorch.fast.packed_rows import (
    BYTES,
    GROUP,
    VECTORS,
    WIDE,
    _factors,
    _fill,
    _rows,
)

PIECE = 1024  # rows that are packed at a time
CHUNK = 64  # rows that one thread takes at a time


@dataclass
class Packed:
    """A weight [R, K] of one form.

    Attributes:
        codes: uint8 [R, K / GROUP · BYTES]. In 16 bytes, byte i has the low four bits
            of weight i of a group of 32, and those of weight 16 + i above them. Of 4
            bits, groups of WIDE weights come first. Where the processor PERMUTES,
            integer i of 32 bits of such a group has weights i, 16 + i, ..., 112 + i,
            the first in its lowest bits. LUT6 has 32 bytes for 64 weights, then 16 with
            the upper two bits of weights i, 16 + i, 32 + i and 48 + i. Where SIDE is
            32, in these 64 weights and in each half of WIDE, places 16 l + 4 t + j of
            either 32 are those of weights 8 t + 4 l + j, and pairs lie 32 apart.
        scale: uint16. Of int4: of each 32 weights of a row the bits of an fp16 value,
            [R · K / 32], with the mantissa above sign and exponent unless it is EXTREME. Of a
            table form: the number of each row's table, [R], and the tables one after
            another as `lookup.stored` lays them out.
    """

    form: int
    codes: np.ndarray
    scale: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] // BYTES[self.form] * GROUP[
            self.form
        ]


def pack(values: np.ndarray, factors: np.ndarray, form: int) -> Packed:
    """Integers [R, K], of which only the low bits count, as `Packed`.

    Args:
        factors: fp16. INT4: scales [1 or R, blocks], of a multiple of 32 weights each.
            Else tables [tables, entries], each of as many rows as the others.

    Raises:
        ValueError: K or a block is no multiple of a group, or rows are no multiple of
            tables.
    """
    R, K = values.shape
    _same((K % GROUP[form],), (0,))
    codes = np.empty((R, K // GROUP[form] * BYTES[form]), np.uint8)
    # some rows at a time: what is between takes little memory
    for start in range(0, R, PIECE):
        codes[start : start + PIECE] = _packed(
            values[start : start + PIECE].view(np.uint8), form
        )
    if form <= INT4:
        scale = np.broadcast_to(factors, (R, factors.shape[1]))
        scale = np.repeat(scale, K // 32 // factors.shape[1], axis=1)
        _same(scale.shape, (R, K // 32))
        return _blocks(codes, np.ascontiguousarray(scale.reshape(-1)).view(np.uint16))
    _same((R % len(factors),), (0,))
    tables = np.zeros((len(factors), ENTRIES[form]), np.float16)
    tables[:, : factors.shape[1]] = factors
    numbers = (np.arange(R) // (R // len(factors))).astype(np.uint16)
    return Packed(form, codes, np.concatenate([numbers, stored(tables).reshape(-1)]))


def _blocks(codes: np.ndarray, bits: np.ndarray) -> Packed:
    """Int4 by the bits of its scales."""
    exponent = bits >> 10 & 31  # at most 27: eight times the scale is an fp16 value
    if ((exponent - 1 < 27) | (bits & 0x7FFF == 0)).all():
        return Packed(INT4, codes, bits << 6 | bits >> 10)
    return Packed(EXTREME, codes, bits)


def _packed(bits: np.ndarray, form: int) -> np.ndarray:
    """The codes of some rows [R, K] of uint8, see `Packed`."""
    R, K = bits.shape
    wide = K if form == LUT6 else K - K % WIDE
    first, rest = bits[:, :wide], bits[:, wide:]
    if SIDE == 32:
        first = first.reshape(R, -1, 2, 4, 2, 4).swapaxes(3, 4)
    if PERMUTES and form != LUT6:
        pairs = (first & 15).reshape(R, -1, 4, 2, LANES)
        codes = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).swapaxes(2, 3)
    else:
        codes = _nibbles(first.reshape(R, -1, 2, SIDE))
    if form == LUT6:
        top = first.reshape(R, -1, 4, LANES) >> 4 & 3
        top = top << np.arange(0, 8, 2, np.uint8)[:, None]
        upper = np.bitwise_or.reduce(top, 2)
        codes = np.concatenate([codes.reshape(*upper.shape[:2], -1), upper], axis=2)
    rest = _nibbles(rest.reshape(R, -1, 2, LANES))
    return np.concatenate([codes.reshape(R, -1), rest.reshape(R, -1)], axis=1)


def _nibbles(pairs: np.ndarray) -> np.ndarray:
    """The low four bits of [..., 0, :], and those of [..., 1, :] above them."""
    return pairs[..., 0, :] & 15 | pairs[..., 1, :] << 4


def joined(weights: list[Packed]) -> Packed:
    """The rows of weights of one form and K as one weight."""
    form, codes = weights[0].form, np.concatenate([one.codes for one in weights])
    if form <= INT4:
        return Packed(form, codes, np.concatenate([one.scale for one in weights]))
    numbers, tables, count = [], [], 0
    for one in weights:
        numbers.append(one.scale[: len(one.codes)] + np.uint16(count))
        tables.append(one.scale[len(one.codes) :])
        count += len(tables[-1]) // STORED[form]
    return Packed(form, codes, np.concatenate([*numbers, *tables]))


def product(weight: Packed, x: torch.Tensor) -> torch.Tensor:
    """x [N, K] by weight [R, K] → float32 [N, R], on torch's threads."""
    (N, K), (R, width) = x.shape, weight.shape
    _same((K,), (width,))
    rows = np.zeros((whole_vectors(N), K), np.float32)
    rows[:N] = x.numpy()
    out, threads = np.empty((R, len(rows)), np.float32), torch.get_num_threads() > 1
    on_threads(_product, weight.form, weight.codes, weight.scale, rows, out, threads)
    return torch.from_numpy(out[:, :N].T)


def dense(weight: Packed, first: int, last: int) -> torch.Tensor:
    """Rows from `first` to `last` as float32 [rows, K], on torch's threads."""
    (R, K), rows = weight.shape, last - first
    _same((first, last), np.clip((first, last), 0, R))
    out = np.empty((rows, K), np.float32)
    on_threads(_dense, weight.form, weight.codes, weight.scale, first, out)
    return torch.from_numpy(out)


@njit(cache=True)
def whole_vectors(count):
    """The number of activation vectors that `_product` takes for `count` of them."""
    return count if count == 1 else -(-count // VECTORS) * VECTORS


@njit(cache=True)
def rows(form, codes, scale, x, first, last, out):
    """out [last - first, N] = the rows from `first` to `last` of codes by x [N, K], N
    = 1 or a multiple of VECTORS."""
    if form == INT4:
        _int4_rows(codes, scale, x, first, last, out)
    elif form == EXTREME:
        _extreme_rows(codes, scale, x, first, last, out)
    elif form == LUT4:
        _lut4_rows(codes, scale, x, first, last, out)
    else:
        _lut6_rows(codes, scale, x, first, last, out)


@njit(parallel=True, cache=True)
def _product(form, codes, scale, x, out, threads):
    """out [R, N] for x as `rows` takes it."""
    R = len(codes)
    if threads and R * x.shape[1] >= SMALL_PRODUCT:
        for i in prange(-(-R // CHUNK)):
            first, last = CHUNK * i, min(CHUNK * i + CHUNK, R)
            rows(form, codes, scale, x, first, last, out[first:last])
    else:
        rows(form, codes, scale, x, 0, R, out)


@njit(parallel=True, cache=True)
def _dense(form, codes, scale, first, out):
    """out [rows, K]: the rows from `first` on."""
    for r in prange(len(out)):
        start = _factors(form, scale, first + r, len(codes), out.shape[1])
        if form == INT4:
            _dense_int4(codes, first + r, scale, start, out, r)
        elif form == EXTREME:
            _dense_extreme(codes, first + r, scale, start, out, r)
        elif form == LUT4:
            _dense_lut4(codes, first + r, scale, start, out, r)
        else:
            _dense_lut6(codes, first + r, scale, start, out, r)


_extreme_rows, _int4_rows, _lut4_rows, _lut6_rows = map(_rows, GROUP)
_dense_extreme, _dense_int4, _dense_lut4, _dense_lut6 = map(_fill, GROUP)
