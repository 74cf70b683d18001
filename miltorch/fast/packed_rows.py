"""The compiled inner loops of `packed`: rows of weights of 4 and 6 bits by activation
vectors, and a row made dense, emitted as LLVM's vectors of `LANES` numbers, since LLVM
vectorises no loop over fields of bits.

A table's values are permuted by their indices in a register where the processor has
AVX-512, else read from memory one by one."""

from functools import reduce
from itertools import product

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

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
VECTORS = 4  # activation vectors that a row meets at once
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


@njit(cache=True)
def _factors(form, scale, row, rows, width):
    """Where in `scale` the scales of a row of `width` weights begin, or its table."""
    if form <= INT4:
        return row * (width // 32)
    return rows + scale[row] * (16 if form == LUT4 else 64)


def _dots(form: int, rows: int, count: int):
    """Compiled code: out [place : place + rows, n : n + count] = x [n : n + count, K]
    by so many rows of codes, one or two, whose scales begin at `start` and `other`."""

    @intrinsic
    def dots(typing, codes, row, scale, start, other, x, n, out, place):
        def emit(context, builder, signature, arguments):
            names = "codes row scale start other x n out place".split()
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
                for pair, totals in zip(product(weights, values), sums, strict=True):
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
