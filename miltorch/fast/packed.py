"""Products with weights of 4 and 6 bits that stay packed in memory: int4 blocks with a
scale, and indices of lookup tables.

A weight becomes the fp16 value that the program declares, then float32, in a register:
products and sums are float32. Two kernels for each form, emitted as LLVM's vectors of
`LANES` numbers, since LLVM vectorises no loop over fields of bits: a row by some
activation vectors, and a row made dense. A table's values are permuted by their indices
in a register where the processor has AVX-512, else read from memory one by one."""

from dataclasses import dataclass
from functools import reduce
from itertools import product as product_of

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from miltorch.fast.kernels import SMALL_PRODUCT, _same, on_threads
from miltorch.fast.tiles import _prefetch

# beside 1 and 2, the bytes of an int8 and of an fp16 weight; EXTREME is int4 where a
# product of a scale may be subnormal or too large for fp16
EXTREME, INT4, LUT4, LUT6 = 3, 4, 5, 6
LANES = 16
GROUP = {EXTREME: 32, INT4: 32, LUT4: 32, LUT6: 64}  # a row has whole groups of weights
BYTES = {EXTREME: 16, INT4: 16, LUT4: 16, LUT6: 48}  # of a group
WIDE = 128  # weights of 4 bits that are packed together while a row has as many
ENTRIES = {LUT4: 16, LUT6: 64}  # values of a table
AHEAD = 8192  # bytes: two rows are two streams, which no processor foresees
PIECE = 1024  # rows that are packed at a time
VECTORS = 4  # activation vectors that a row meets at once
CHUNK = 64  # rows that one thread takes at a time
# of each code of int4; and of each mantissa of a scale, m / 1024 for m from 1024 on, the
# products by them, rounded to eleven bits, ties to even: fp16 rounds in this way
INTEGERS = np.float32([*range(8), *range(-8, 0)])
PRODUCTS = np.arange(1024, 2048)[:, None] / 1024 * INTEGERS
PRODUCTS = PRODUCTS.astype(np.float16).astype(np.float32)
# by sign and exponent of an fp16 number that is 0 or normal
POWERS = np.array([0, *2.0 ** np.arange(-14, 17), 0, *-(2.0 ** np.arange(-14, 17))])
PERMUTES = bool(binding.get_host_cpu_features().get("avx512f"))

HALF, FLOAT, INT, INDEX = ir.HalfType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
HALVES, FLOATS, INDICES, CODES = (
    ir.VectorType(element, LANES) for element in (HALF, FLOAT, INT, ir.IntType(8))
)


@dataclass
class Packed:
    """A weight [R, K] of one form.

    Attributes:
        codes: uint8 [R, K / GROUP · BYTES]. In 16 bytes, byte i has the low four bits
            of weight i of a group of 32, and those of weight 16 + i above them. Of 4
            bits, groups of WIDE weights come first: integer i of 32 bits has weights i,
            16 + i, ..., 112 + i, the first in its lowest bits. LUT6 has 32 bytes for 64
            weights, then 16 with the upper two bits of weights i, 16 + i, 32 + i and 48
            + i.
        scale: bits of fp16 values, uint16. Of int4: one for each 32 weights of a row, [R ·
            K / 32]. A table form: the number of each row's table, [R], and the tables
            one after another.
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
        bits = np.ascontiguousarray(scale.reshape(-1), np.float16).view(np.uint16)
        exponent = bits >> 10 & 31
        if ((exponent - 1 < 27) | (bits & 0x7FFF == 0)).all():
            return Packed(INT4, codes, bits << 6 | bits >> 10)
        return Packed(EXTREME, codes, bits)
    else:
        _same((R % len(factors),), (0,))
        tables = np.zeros((len(factors), ENTRIES[form]), np.float16)
        tables[:, : factors.shape[1]] = factors
        numbers = np.arange(R) // (R // len(factors))
        scale = np.concatenate(
            [numbers.astype(np.uint16).view(np.float16), tables.reshape(-1)]
        )
    scale = np.ascontiguousarray(scale.reshape(-1), np.float16)
    return Packed(form, codes, scale.view(np.uint16))


def _packed(bits: np.ndarray, form: int) -> np.ndarray:
    """The codes of some rows [R, K] of uint8, see `Packed`."""
    (R, K), nibbles = bits.shape, bits & 15
    wide = 0 if form == LUT6 else K - K % WIDE
    pairs = nibbles[:, :wide].reshape(R, -1, WIDE // LANES // 2, 2, LANES)
    first = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).swapaxes(2, 3)
    pairs = nibbles[:, wide:].reshape(R, -1, 2, LANES)
    codes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    if form == LUT6:
        top = (bits >> 4 & 3).reshape(R, -1, 4, LANES) << np.arange(0, 8, 2, np.uint8)[
            :, None
        ]
        upper = np.bitwise_or.reduce(top, 2)
        codes = np.concatenate([codes.reshape(*upper.shape[:2], -1), upper], axis=2)
    return np.concatenate([first.reshape(R, -1), codes.reshape(R, -1)], axis=1)


def joined(weights: list[Packed]) -> Packed:
    """The rows of weights of one form and K as one weight."""
    form, codes = weights[0].form, np.concatenate([one.codes for one in weights])
    if form <= INT4:
        return Packed(form, codes, np.concatenate([one.scale for one in weights]))
    numbers, tables, count = [], [], 0
    for one in weights:
        numbers.append(one.scale[: len(one.codes)] + np.uint16(count))
        tables.append(one.scale[len(one.codes) :])
        count += len(tables[-1]) // ENTRIES[form]
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
def _factors(form, scale, row, rows, width):
    """Where in `scale` the scales of a row of `width` weights begin, or its table."""
    if form <= INT4:
        return row * (width // 32)
    return rows + scale[row] * (16 if form == LUT4 else 64)


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


def _dots(form: int, rows: int, count: int):
    """Compiled code: out [place : place + rows, n : n + count] = x [n : n + count, K]
    by so many rows of codes, one or two, whose scales begin at `start` and `other`."""

    @intrinsic
    def dots(typing, codes, row, scale, start, other, x, n, out, place):
        def emit(context, builder, signature, arguments):
            names = (
                "codes",
                "row",
                "scale",
                "start",
                "other",
                "x",
                "n",
                "out",
                "place",
            )
            given = _operands(context, builder, signature, dict(zip(names, arguments)))
            parts, zero = 8 // (rows * count) or 2, ir.Constant(FLOATS, [0.0] * LANES)
            lines = [builder.add(given["row"], INDEX(i)) for i in range(rows)]
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(parts)]
                for _ in range(rows * count)
            ]
            vectors = [
                _at(builder, given["x"], builder.add(given["n"], INDEX(i)))
                for i in range(count)
            ]
            fma = _function(builder, "llvm.fma.v16f32", FLOATS, FLOATS, FLOATS)

            def meet(place, number, weights):
                values = [
                    _load(builder, builder.gep(x, [place]), FLOATS) for x in vectors
                ]
                for pair, totals in zip(product_of(weights, values), sums, strict=True):
                    total = totals[number % parts]
                    builder.store(
                        builder.call(fma, [*pair, builder.load(total)]), total
                    )

            _each(form, builder, given, lines, meet)
            totals = [reduce(builder.fadd, map(builder.load, each)) for each in sums]
            for i, total in enumerate(totals):
                place = builder.add(given["place"], INDEX(i // count))
                column = builder.add(given["n"], INDEX(i % count))
                line = _at(builder, given["out"], place)
                builder.store(_sum(builder, total), builder.gep(line, [column]))
            return context.get_dummy_value()

        number = types.intp
        kinds = codes, number, scale, number, number, x, number, out, number
        return types.none(*kinds), emit

    return dots


def _fill(form: int):
    """Compiled code: out [place, K] = row `row` of codes, whose scales begin at
    `start`."""

    @intrinsic
    def fill(typing, codes, row, scale, start, out, place):
        def emit(context, builder, signature, arguments):
            names = ("codes", "row", "scale", "start", "out", "place")
            given = _operands(context, builder, signature, dict(zip(names, arguments)))
            target = _at(builder, given["out"], given["place"])

            def store(place, number, weights):
                place = builder.bitcast(
                    builder.gep(target, [place]), FLOATS.as_pointer()
                )
                builder.store(weights[0], place, align=4)

            _each(form, builder, given, [given["row"]], store)
            return context.get_dummy_value()

        return types.none(codes, types.intp, scale, types.intp, out, types.intp), emit

    return fill


def _operands(context, builder, signature, arguments: dict) -> dict:
    """Arrays as their structures, numbers as they are."""
    return {
        name: context.make_array(kind)(context, builder, value)
        if isinstance(kind, types.Array)
        else value
        for (name, value), kind in zip(arguments.items(), signature.args, strict=True)
    }


def _at(builder, array, row):
    """The address of a row of a matrix."""
    return builder.gep(
        array.data, [builder.mul(row, builder.extract_value(array.shape, 1))]
    )


def _each(form: int, builder, given: dict, rows: list, meet) -> None:
    """Emits loops over one row or two that give `meet` a place, a number below 8 and
    each row's LANES weights that begin at the place."""
    starts = [given[name] for name in ("start", "other")[: len(rows)]]
    scales = [builder.gep(given["scale"].data, [start]) for start in starts]
    codes = [_at(builder, given["codes"], row) for row in rows]
    left, place = builder.extract_value(given["codes"].shape, 1), INDEX(0)
    if form > INT4:
        tables = [_tables(form, builder, each) for each in scales]
    for weights in (GROUP[form],) if form == LUT6 else (WIDE, GROUP[form]):
        size = INDEX(weights * BYTES[form] // GROUP[form])
        groups = builder.udiv(left, size)
        with cgutils.for_range(builder, groups) as loop:
            first = builder.add(place, builder.mul(loop.index, INDEX(weights)))
            offset = builder.mul(loop.index, size)
            indices = []
            for data in codes:
                data = builder.gep(data, [offset])
                indices.append(_indices(form, weights, builder, data))
                ahead = builder.ptrtoint(builder.gep(data, [INDEX(AHEAD)]), INDEX)
                _prefetch(builder, ahead)
            for i, numbers in enumerate(zip(*indices, strict=True)):
                if form <= INT4 and i % 2 == 0:
                    block = builder.udiv(first, INDEX(32))
                    block = builder.add(block, INDEX(i // 2))
                    tables = [
                        _Table(
                            builder,
                            [_scaled(form, builder, builder.gep(each, [block]))],
                        )
                        for each in scales
                    ]
                here = builder.add(first, INDEX(LANES * i))
                pairs = zip(tables, numbers, strict=True)
                meet(here, i, [table.lookup(each) for table, each in pairs])
        done = builder.mul(groups, size)
        codes = [builder.gep(data, [done]) for data in codes]
        left = builder.sub(left, done)
        place = builder.mul(groups, INDEX(weights))


def _indices(form: int, weights: int, builder, data) -> list:
    """The codes of a group at `data` as vectors of int32, whose bits above the code's
    are anything for a nibble."""
    if weights == WIDE:
        codes = _load(builder, data, INDICES)
        return [codes] + [_shifted(builder, codes, bits) for bits in range(4, 32, 4)]
    low = [_widened(builder, data, 16 * i) for i in range(weights // 32)]
    nibbles = [part for codes in low for part in (codes, _shifted(builder, codes, 4))]
    if form != LUT6:
        return nibbles
    top = _widened(builder, data, 32)
    upper = [builder.shl(top, _splat(4))]
    upper += [builder.shl(top, _splat(2)), top, _shifted(builder, top, 2)]
    return [
        builder.or_(builder.and_(a, _splat(15)), builder.and_(b, _splat(48)))
        for a, b in zip(nibbles, upper, strict=True)
    ]


def _scaled(form: int, builder, scale):
    """The sixteen values that int4 codes have in a block, by the address of its scale:
    each times the scale, rounded to fp16."""
    bits = builder.load(scale)
    if form == INT4:
        mantissa = builder.lshr(builder.and_(bits, bits.type(0xFFC0)), bits.type(6))
        products = _element(builder, "int4_products", PRODUCTS, mantissa, FLOATS)
        power = builder.and_(bits, bits.type(63))
        power = _element(builder, "int4_powers", POWERS, power, FLOAT)
        return builder.fmul(products, _spread(builder, power))
    factor = _spread(builder, builder.fpext(builder.bitcast(bits, HALF), FLOAT))
    numbers = builder.fmul(ir.Constant(FLOATS, INTEGERS.tolist()), factor)
    return builder.fpext(builder.fptrunc(numbers, HALVES), FLOATS)


def _element(builder, name: str, values: np.ndarray, index, kind):
    """An element of a constant, or a row of it as a vector."""
    constant = builder.module.globals.get(name)
    if constant is None:
        content = ir.Constant(ir.ArrayType(FLOAT, values.size), values.ravel().tolist())
        constant = cgutils.global_constant(builder, name, content)
        constant.align = 64
    start = builder.mul(builder.zext(index, INDEX), INDEX(values.size // len(values)))
    return _load(builder, builder.gep(constant, [INDEX(0), start]), kind)


def _spread(builder, value):
    single = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(single, single, ir.Constant(INDICES, [0] * LANES))


def _tables(form: int, builder, scale) -> "_Table":
    parts = []
    for i in range(ENTRIES[form] // LANES):
        start = builder.gep(scale, [INDEX(LANES * i)])
        parts.append(builder.fpext(_load(builder, start, HALVES), FLOATS))
    return _Table(builder, parts)


class _Table:
    """Values in registers of LANES each, looked up by indices."""

    def __init__(self, builder, parts: list):
        self.builder, self.parts = builder, parts
        if not PERMUTES:
            self.memory = cgutils.alloca_once(builder, ir.ArrayType(FLOATS, len(parts)))
            for i, part in enumerate(parts):
                builder.store(part, builder.gep(self.memory, [INT(0), INT(i)]))

    def lookup(self, indices):
        builder, parts = self.builder, self.parts
        if not PERMUTES:
            return self._from_memory(indices)
        if len(parts) == 1:
            permute = _function(
                builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, INDICES
            )
            return builder.call(permute, [parts[0], indices])
        permute = _function(
            builder, "llvm.x86.avx512.vpermi2var.ps.512", FLOATS, INDICES, FLOATS
        )
        low, high = (
            builder.call(permute, [a, indices, b]) for a, b in (parts[:2], parts[2:])
        )
        upper = builder.icmp_unsigned(
            "!=", builder.and_(indices, _splat(32)), _splat(0)
        )
        return builder.select(upper, high, low)

    def _from_memory(self, indices):
        builder, values = self.builder, ir.Constant(FLOATS, ir.Undefined)
        indices = builder.and_(indices, _splat(LANES * len(self.parts) - 1))
        start = builder.bitcast(self.memory, FLOAT.as_pointer())
        for lane in range(LANES):
            value = builder.load(
                builder.gep(start, [builder.extract_element(indices, INT(lane))])
            )
            values = builder.insert_element(values, value, INT(lane))
        return values


def _function(builder, name: str, *operands, result=FLOATS):
    """LLVM's function `name`, declared."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, operands), name)


def _load(builder, place, kind):
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def _widened(builder, data, start: int):
    """The LANES bytes from `start` on, as int32."""
    return builder.zext(
        _load(builder, builder.gep(data, [INDEX(start)]), CODES), INDICES
    )


def _shifted(builder, codes, bits: int):
    return builder.lshr(codes, _splat(bits))


def _splat(value: int):
    return ir.Constant(INDICES, [value] * LANES)


def _sum(builder, vector):
    """The sum of the elements of a vector, by halves."""
    reduced = _function(
        builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, FLOATS, result=FLOAT
    )
    return builder.call(
        reduced, [ir.Constant(FLOAT, -0.0), vector], fastmath=("reassoc",)
    )


def _rows(form: int):
    """`rows` of one form: arguments cost more than half of a short row."""
    two, one, several = _dots(form, 2, 1), _dots(form, 1, 1), _dots(form, 1, VECTORS)

    @njit
    def rows(codes, scale, x, first, last, out):
        (N, K), R = x.shape, len(codes)
        pairs = first + (last - first) // 2 * 2 if N == 1 else first
        for r in range(first, pairs, 2):
            start, other = (
                _factors(form, scale, r, R, K),
                _factors(form, scale, r + 1, R, K),
            )
            two(codes, r, scale, start, other, x, 0, out, r - first)
        for r in range(pairs, last):
            start = _factors(form, scale, r, R, K)
            if N == 1:
                one(codes, r, scale, start, start, x, 0, out, r - first)
            for n in range(0, N - N % VECTORS, VECTORS):
                several(codes, r, scale, start, start, x, n, out, r - first)

    return rows


_extreme_rows, _int4_rows, _lut4_rows, _lut6_rows = map(_rows, GROUP)
_dense_extreme, _dense_int4, _dense_lut4, _dense_lut6 = map(_fill, GROUP)
