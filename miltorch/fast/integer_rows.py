"""The compiled inner loops of `integers`: a row of int8 weights by activation vectors,
emitted as LLVM's vectors of 64 bytes with the instructions of AVX-512 for them.

Addresses are integers of 64 bits."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from miltorch.fast.lookup import FLOATS, LANES, function, spread
from miltorch.fast.packed_rows import _sum
from miltorch.fast.tiles import _prefetch

LENGTH = 64  # bytes of a vector, which has LANES numbers of 32 bits
DIGITS = 3
ADDED = 128, 64  # what makes the bytes of each plane unsigned
# products of (plane, digit) that are summed over an int8 row, with their place values:
# in units of the scale, and in units of the last of its eleven bits
SUMS = ({(0, 0): 2**16, (0, 1): 2**8, (0, 2): 1}, {(1, 0): 2**16, (1, 1): 2**8})
PAIRS = *SUMS[0], *SUMS[1]
AHEAD = 4096  # bytes: rows are as many short streams, which no processor foresees

BYTE, WORD, NUMBER, FLOAT = *map(ir.IntType, (8, 32, 64)), ir.FloatType()
BYTES, WORDS = ir.VectorType(BYTE, LENGTH), ir.VectorType(WORD, LANES)
X86 = "llvm.x86.avx512."


def _bytes(number: int):
    return ir.Constant(BYTES, [number] * LENGTH)


def _words(numbers):
    return ir.Constant(WORDS, list(numbers))


def _floats(number: float):
    return ir.Constant(FLOATS, [float(number)] * LANES)


class _Row:
    """Emits the parts of a loop over the K weights of a row."""

    def __init__(self, builder, K):
        self.builder, self.K = builder, K

    def at(self, address, offset, size: int = 1):
        """The address of an element of `size` bytes."""
        if isinstance(offset, int):
            return self.builder.add(address, NUMBER(offset * size))
        return self.builder.add(address, self.builder.mul(offset, NUMBER(size)))

    def load(self, address, kind):
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, value, address):
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def call(self, name: str, result, *operands):
        kinds = [operand.type for operand in operands]
        called = function(self.builder, name, *kinds, result=result)
        return self.builder.call(called, operands)

    def fma(self, a, b, c):
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def dot(self, total, codes, digits):
        """total + sums of four products of unsigned codes and signed digits."""
        codes = self.builder.bitcast(codes, WORDS)
        return self.call(X86 + "vpdpbusd.512", WORDS, total, codes, digits)

    def digit(self, digits, number: int, place):
        """LENGTH digits of place value 2^16, 2^8 or 1 from a place on."""
        plane = self.at(digits, self.builder.mul(self.K, NUMBER(number)))
        return self.load(self.at(plane, place), WORDS)

    def each_round(self, copies: int = 1):
        """Emits a loop over `copies` rounds of LENGTH weights at a time, and one over
        those that are left; gives a place and the number of a copy."""
        builder, step = self.builder, LENGTH
        many = NUMBER(step * copies)
        whole = builder.sub(self.K, builder.urem(self.K, many))
        with cgutils.for_range_slice(builder, NUMBER(0), whole, many, NUMBER) as loop:
            for copy in range(copies):
                yield builder.add(loop[0], NUMBER(step * copy)), copy
        if copies > 1:
            rest = cgutils.for_range_slice(builder, whole, self.K, NUMBER(step), NUMBER)
            with rest as loop:
                yield loop[0], 0

    def planes(self, weights, tables: list) -> list:
        """The planes of LENGTH int8 weights, by the four vectors of a table of 256."""
        codes = self.builder.xor(weights, _bytes(ADDED[0]))
        name = X86 + "vpermi2var.qi.512"
        low, high = (
            self.call(name, BYTES, a, codes, b) for a, b in (tables[:2], tables[2:])
        )
        negative = self.builder.icmp_signed("<", weights, _bytes(0))
        return [codes, self.builder.select(negative, low, high)]

    def add(self, place, planes, digits, totals: dict) -> None:
        """Adds the products of LENGTH weights and digits to `totals`, by pair."""
        for (plane, digit), cell in totals.items():
            digit = self.digit(digits, digit, place)
            total = self.dot(self.builder.load(cell), planes[plane], digit)
            self.builder.store(total, cell)


def _cells(builder, count: int) -> list[dict]:
    """Sums of an int8 row by pair of plane and digit, 0 each, for `count` vectors."""
    zero = _words([0] * LANES)
    return [
        {pair: cgutils.alloca_once_value(builder, zero) for pair in PAIRS}
        for _ in range(count)
    ]


@intrinsic
def write_starts(typing, digits, K):
    """Writes what sums start with behind the digits of a vector at an address: minus
    the sums of digits times what `ADDED` names."""

    def emit(context, builder, signature, arguments):
        digits, K = arguments
        row, planes = _Row(builder, K), list(map(_bytes, ADDED))
        target, (totals,) = row.at(digits, K, DIGITS), _cells(builder, 1)
        for place, _ in row.each_round():
            row.add(place, planes, digits, totals)
        for i, cell in enumerate(totals.values()):
            row.store(builder.neg(builder.load(cell)), row.at(target, LENGTH * i))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def dots(tokens: int):
    """Compiled code of (row, table, K, digits of the first vector, bytes from one to
    the next, unit, last, results): addresses of a row of int8 weights and of
    its products with `tokens` vectors, float32, in units of the digits.

    `unit` is that of a table's values or the scale, `last` what the last of the scale's
    eleven bits is worth."""
    copies = 2 if tokens == 1 else 1  # sums that do not wait for each other

    def emit(context, builder, signature, arguments):
        weight, table, K, digits, step, unit, last, out = arguments
        row = _Row(builder, K)
        tables = [row.load(row.at(table, LENGTH * i), BYTES) for i in range(4)]
        totals = [_cells(builder, tokens) for _ in range(copies)]
        vectors = [row.at(digits, builder.mul(step, NUMBER(n))) for n in range(tokens)]
        for vector, cells in zip(vectors, totals[0], strict=True):
            start = row.at(vector, K, DIGITS)
            for i, cell in enumerate(cells.values()):
                builder.store(row.load(row.at(start, LENGTH * i), WORDS), cell)
        for place, copy in row.each_round(copies):
            start = row.at(weight, place)
            _prefetch(builder, row.at(start, AHEAD))
            planes = row.planes(row.load(start, BYTES), tables)
            for vector, cells in zip(vectors, totals[copy], strict=True):
                row.add(place, planes, vector, cells)
        for n in range(tokens):
            parts = []
            for values in SUMS:
                part = _floats(0)
                for pair, value in values.items():
                    total = builder.load(totals[0][n][pair])
                    for others in totals[1:]:
                        total = builder.add(total, builder.load(others[n][pair]))
                    total = builder.sitofp(total, FLOATS)
                    part = row.fma(total, _floats(value), part)
                parts.append(part)
            whole = builder.fmul(spread(builder, unit), parts[0])
            whole = row.fma(spread(builder, last), parts[1], whole)
            row.store(_sum(builder, whole), row.at(out, 4 * n))
        return context.get_dummy_value()

    @intrinsic
    def compiled(typing, weight, table, K, digits, step, unit, last, out):
        numbers = [types.int64] * 5
        return types.void(*numbers, types.float32, types.float32, types.int64), emit

    return compiled
