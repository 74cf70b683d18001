"""Products with weights of 4 and 6 bits that stay packed in memory: int4 blocks with a
scale, and indices of lookup tables.

A weight becomes the fp16 value that the program declares, then float32, in a register:
products and sums are float32. Two kernels for each form, emitted as LLVM's vectors of
`LANES` numbers, since LLVM vectorises no loop over fields of bits: a row by some
activation vectors, and a row made dense. A table's values are permuted by their indices
in a register where the processor has AVX-512, else read from memory one by one."""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from miltorch.fast.kernels import SMALL_PRODUCT, _same, on_threads

INT4, LUT4, LUT6 = 4, 5, 6  # beside 1 and 2, the bytes of an int8 and of an fp16 weight
LANES = 16
GROUP = {INT4: 32, LUT4: 32, LUT6: 64}  # weights that are packed together
BYTES = {INT4: 16, LUT4: 16, LUT6: 48}  # of a group
ENTRIES = {LUT4: 16, LUT6: 64}  # values of a table
PIECE = 1024  # rows that are packed at a time
VECTORS = 4  # activation vectors that a row meets at once
CHUNK = 64  # rows that one thread takes at a time
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
            of weight i of a group of 32, and those of weight 16 + i above them; LUT6
            has 32 such bytes, then 16 with the upper two bits of weights i, 16 + i, 32
            + i and 48 + i of a group of 64.
        scale: bits of fp16 values, uint16. INT4: one for each 32 weights of a row, [R ·
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
    if form == INT4:
        scale = np.broadcast_to(factors, (R, factors.shape[1]))
        scale = np.repeat(scale, K // 32 // factors.shape[1], axis=1)
        _same(scale.shape, (R, K // 32))
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
    nibbles = (bits & 15).reshape(len(bits), -1, 2, LANES)
    codes = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    if form == LUT6:
        top = (bits >> 4 & 3).reshape(len(bits), -1, 4, LANES) << np.arange(
            0, 8, 2, np.uint8
        )[:, None]
        upper = np.bitwise_or.reduce(top, 2)
        codes = np.concatenate([codes.reshape(*upper.shape[:2], -1), upper], axis=2)
    return codes.reshape(len(bits), -1)


def joined(weights: list[Packed]) -> Packed:
    """The rows of weights of one form and K as one weight."""
    form, codes = weights[0].form, np.concatenate([one.codes for one in weights])
    if form == INT4:
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
    if form == INT4:
        return row * (width // 32)
    return rows + scale[row] * (16 if form == LUT4 else 64)


@njit(cache=True)
def whole_vectors(count):
    """The number of activation vectors that `_product` takes for `count` of them."""
    return count if count == 1 else -(-count // VECTORS) * VECTORS


@njit(cache=True)
def _chunk(form, codes, scale, x, first, out):
    """CHUNK rows of `_product` from `first` on, or those that are left."""
    last = min(first + CHUNK, len(codes))
    if form == INT4:
        _int4_rows(codes, scale, x, first, last, out)
    elif form == LUT4:
        _lut4_rows(codes, scale, x, first, last, out)
    else:
        _lut6_rows(codes, scale, x, first, last, out)


@njit(parallel=True, cache=True)
def _product(form, codes, scale, x, out, threads):
    """out [R, N] for x [N, K], N = 1 or a multiple of VECTORS."""
    if threads and len(codes) * x.shape[1] >= SMALL_PRODUCT:
        for i in prange(-(-len(codes) // CHUNK)):
            _chunk(form, codes, scale, x, CHUNK * i, out)
    else:
        for first in range(0, len(codes), CHUNK):
            _chunk(form, codes, scale, x, first, out)


@njit(parallel=True, cache=True)
def _dense(form, codes, scale, first, out):
    """out [rows, K]: the rows from `first` on."""
    for r in prange(len(out)):
        start = _factors(form, scale, first + r, len(codes), out.shape[1])
        if form == INT4:
            _dense_int4(codes, first + r, scale, start, out, r)
        elif form == LUT4:
            _dense_lut4(codes, first + r, scale, start, out, r)
        else:
            _dense_lut6(codes, first + r, scale, start, out, r)


def _dots(form: int, count: int):
    """Compiled code: out [row, n : n + count] = x [n : n + count, K] @ row `row` of
    codes, whose scales begin at `start`."""

    @intrinsic
    def dots(typing, codes, row, scale, start, x, n, out):
        def emit(context, builder, signature, arguments):
            names = ("codes", "row", "scale", "start", "x", "n", "out")
            given = _operands(context, builder, signature, dict(zip(names, arguments)))
            parts, zero = 4 if count == 1 else 2, ir.Constant(FLOATS, [0.0] * LANES)
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(parts)]
                for _ in range(count)
            ]
            vectors = [
                _at(builder, given["x"], builder.add(given["n"], INDEX(i)))
                for i in range(count)
            ]
            fma = _function(builder, "llvm.fma.v16f32", FLOATS, FLOATS, FLOATS)

            def meet(place, number, weights):
                for x, totals in zip(vectors, sums, strict=True):
                    total = totals[number % parts]
                    values = _load(builder, builder.gep(x, [place]), FLOATS)
                    builder.store(
                        builder.call(fma, [weights, values, builder.load(total)]), total
                    )

            _each(form, builder, given, meet)
            results = builder.gep(
                _at(builder, given["out"], given["row"]), [given["n"]]
            )
            for i, totals in enumerate(sums):
                total = reduce(builder.fadd, map(builder.load, totals))
                builder.store(_sum(builder, total), builder.gep(results, [INDEX(i)]))
            return context.get_dummy_value()

        return types.none(
            codes, types.intp, scale, types.intp, x, types.intp, out
        ), emit

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
                builder.store(weights, place, align=4)

            _each(form, builder, given, store)
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


def _each(form: int, builder, given: dict, meet) -> None:
    """Emits a loop over a row that gives `meet` a place, a number and the LANES weights
    that begin at the place.

    Two groups a round, so that sums that take turns by number do not wait for each
    other; a last one by itself."""
    codes, row = given["codes"], _at(builder, given["codes"], given["row"])
    scales = builder.gep(given["scale"].data, [given["start"]])
    groups = builder.udiv(builder.extract_value(codes.shape, 1), INDEX(BYTES[form]))
    tables = None if form == INT4 else _tables(form, builder, scales)

    def group(index, number):
        data = builder.gep(row, [builder.mul(index, INDEX(BYTES[form]))])
        place = builder.mul(index, INDEX(GROUP[form]))
        table = tables or _Table(
            builder, [_scaled(builder, builder.gep(scales, [index]))]
        )
        for i, indices in enumerate(_indices(form, builder, data)):
            meet(
                builder.add(place, INDEX(LANES * i)), number + i, table.lookup(indices)
            )

    with cgutils.for_range(builder, builder.udiv(groups, INDEX(2))) as loop:
        first = builder.mul(loop.index, INDEX(2))
        group(first, 0)
        group(builder.add(first, INDEX(1)), 2)
    with builder.if_then(builder.trunc(groups, ir.IntType(1))):
        group(builder.sub(groups, INDEX(1)), 0)


def _indices(form: int, builder, data) -> list:
    """The codes of a group at `data` as vectors of int32, whose bits above the code's
    are anything for a nibble."""
    low = [_widened(builder, data, 16 * i) for i in range(GROUP[form] // 32)]
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


def _scaled(builder, scale):
    """The sixteen values that int4 codes have in a block: each times the scale at an
    address, rounded to fp16."""
    # all lanes are converted: a conversion of one would wait for the last one's
    # register
    bits = builder.bitcast(builder.load(scale), HALF)
    single = builder.insert_element(ir.Constant(HALVES, ir.Undefined), bits, INT(0))
    factors = builder.shuffle_vector(single, single, ir.Constant(INDICES, [0] * LANES))
    factors = builder.fpext(factors, FLOATS)
    numbers = ir.Constant(FLOATS, [float(i if i < 8 else i - 16) for i in range(LANES)])
    return builder.fpext(
        builder.fptrunc(builder.fmul(numbers, factors), HALVES), FLOATS
    )


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
    """Compiled code: out [R, N] from row `first` to row `last` = x [N, K] @ the rows'
    weights, for N = 1 or a multiple of VECTORS.

    A function for each form: arguments cost more than half of a short row."""
    one, several = _dots(form, 1), _dots(form, VECTORS)

    @njit
    def rows(codes, scale, x, first, last, out):
        for r in range(first, last):
            start = _factors(form, scale, r, len(codes), x.shape[1])
            if len(x) == 1:
                one(codes, r, scale, start, x, 0, out)
            else:
                for n in range(0, len(x), VECTORS):
                    several(codes, r, scale, start, x, n, out)

    return rows


_int4_rows, _lut4_rows, _lut6_rows = map(_rows, (INT4, LUT4, LUT6))
_dense_int4, _dense_lut4, _dense_lut6 = map(_fill, (INT4, LUT4, LUT6))
