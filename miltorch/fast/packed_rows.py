"""The compiled inner loops of `packed`: rows of weights of 4 and 6 bits by activation
vectors, and a row made dense, emitted as LLVM's vectors of `LANES` numbers, since LLVM
vectorises no loop over fields of bits."""

from functools import reduce
from itertools import product

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miltorch.fast.lookup import (
    EXTREME,
    FLOAT,
    FLOATS,
    INDEX,
    INT4,
    LANES,
    LUT4,
    LUT6,
    PERMUTES,
    SIDE,
    STORED,
    WORDS,
    function,
    joined,
    load,
    scaled_table,
    splat,
    stored_table,
)
from miltorch.fast.tiles import _prefetch

GROUP = {EXTREME: 32, INT4: 32, LUT4: 32, LUT6: 64}  # a row has whole groups of weights
BYTES = {EXTREME: 16, INT4: 16, LUT4: 16, LUT6: 48}  # of a group
WIDE = 128  # weights of 4 bits that are taken at once while a row has as many
AHEAD = 8192  # bytes: two rows are two streams, which no processor foresees
TABLE4, TABLE6 = STORED.values()  # compiled code reads no dictionary
VECTORS = 4  # activation vectors that a row meets at once


@njit(cache=True)
def _factors(form, scale, row, rows, width):
    """Where in `scale` the scales of a row of `width` weights begin, or its table."""
    if form <= INT4:
        return row * (width // 32)
    return rows + scale[row] * (TABLE4 if form == LUT4 else TABLE6)


def _dots(form: int, rows: int, count: int):
    """Compiled code: out [place : place + rows, n : n + count] = x [n : n + count, K]
    by so many rows of codes, one or two, whose scales begin at `start` and `other`."""

    @intrinsic
    def dots(typing, codes, row, scale, start, other, x, n, out, place):
        def emit(context, builder, signature, arguments):
            names = "codes row scale start other x n out place".split()
            given = _operands(context, builder, signature, dict(zip(names, arguments)))
            # as many sums as stay in registers beside a table
            parts = (8 if PERMUTES else 2) // (rows * count) or 1
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            lines = [builder.add(given["row"], INDEX(i)) for i in range(rows)]
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(parts)]
                for _ in range(rows * count)
            ]
            vectors = [
                _at(builder, given["x"], builder.add(given["n"], INDEX(i)))
                for i in range(count)
            ]
            fma = function(builder, "llvm.fma.v16f32", FLOATS, FLOATS, FLOATS)

            def meet(place, number, weights):
                values = [
                    load(builder, builder.gep(x, [place]), FLOATS) for x in vectors
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
        tables = [stored_table(form, builder, each) for each in scales]
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
            i = 0
            for numbers in zip(*indices, strict=True):
                if form <= INT4 and i % 2 == 0:
                    block = builder.udiv(first, INDEX(32))
                    block = builder.add(block, INDEX(i // 2))
                    tables = [
                        scaled_table(form, builder, builder.gep(each, [block]))
                        for each in scales
                    ]
                pairs = zip(tables, numbers, strict=True)
                for found in zip(*(table.lookup(each) for table, each in pairs)):
                    meet(builder.add(first, INDEX(LANES * i)), i, found)
                    i += 1
        done = builder.mul(groups, size)
        codes = [builder.gep(data, [done]) for data in codes]
        left = builder.sub(left, done)
        place = builder.mul(groups, INDEX(weights))


def _indices(form: int, weights: int, builder, data) -> list:
    """The codes of a group at `data` as vectors of integers, whose bits above the
    code's are anything for a nibble."""
    if weights == WIDE and PERMUTES:
        codes = load(builder, data, WORDS)
        return [codes] + [_shifted(builder, codes, bits) for bits in range(4, 32, 4)]
    side = SIDE if weights > 32 else 16
    low = [_codes(builder, data, i, side) for i in range(0, weights // 2, side)]
    nibbles = [part for codes in low for part in (codes, _shifted(builder, codes, 4))]
    if form != LUT6:
        return nibbles
    top = _codes(builder, data, 32, 16)
    upper = [builder.shl(top, splat(top, 4)), builder.shl(top, splat(top, 2))]
    upper += [top, _shifted(builder, top, 2)]
    if side == 32:
        upper = [joined(builder, *pair) for pair in (upper[:2], upper[2:])]
    return [
        builder.or_(builder.and_(a, splat(a, 15)), builder.and_(b, splat(b, 48)))
        for a, b in zip(nibbles, upper, strict=True)
    ]


def _codes(builder, data, start: int, count: int):
    """The bytes from `start` on, as the integers by which tables are looked up."""
    kind = ir.VectorType(ir.IntType(8), count)
    codes = load(builder, builder.gep(data, [INDEX(start)]), kind)
    return builder.zext(codes, WORDS) if PERMUTES else codes


def _shifted(builder, codes, bits: int):
    return builder.lshr(codes, splat(codes, bits))


def _sum(builder, vector):
    """The sum of the elements of a vector, by halves."""
    reduced = function(
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
        pairs = first + (last - first) // 2 * 2 if N == 1 and PERMUTES else first
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
