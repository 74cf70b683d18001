"""Tables of float32 values in registers, looked up by codes of 4 or 6 bits.

Where the processor has AVX-512, sixteen values are permuted at once. Elsewhere the
upper three bytes of each value are planes of a table, whose bytes a shuffle looks up;
the fourth is 0, since an fp16 value has eleven significant bits. Emitted as LLVM's
vectors, see `packed_rows`."""

import platform
from functools import reduce

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

# beside 1 and 2, the bytes of an int8 and of an fp16 weight; EXTREME is int4 where a
# product of a scale may be subnormal or too large for fp16
EXTREME, INT4, LUT4, LUT6 = 3, 4, 5, 6
ENTRIES = {LUT4: 16, LUT6: 64}  # values of a table
STORED = {LUT4: 24, LUT6: 96}  # numbers of 16 bits that it takes, see `stored`
LANES, PLANES = 16, 3
FEATURES = binding.get_host_cpu_features()
PERMUTES = bool(FEATURES.get("avx512f"))
X86 = platform.machine() in ("x86_64", "AMD64")
# bytes of codes that are looked up at once where a group has as many
SIDE = 32 if FEATURES.get("avx2") and not PERMUTES else 16
# of each code of int4; and of each mantissa of a scale, m / 1024 for m from 1024 on, the
# products by them, rounded to eleven bits, ties to even: fp16 rounds in this way
INTEGERS = np.float32([*range(8), *range(-8, 0)])
PRODUCTS = np.arange(1024, 2048)[:, None] / 1024 * INTEGERS
PRODUCTS = PRODUCTS.astype(np.float16).astype(np.float32)
# The same as planes, with a fourth that is not read: those of a mantissa are a line of
# the cache.
PRODUCT_PLANES = PRODUCTS.view(np.uint8).reshape(1024, LANES, 4)
PRODUCT_PLANES = PRODUCT_PLANES[:, :, [1, 2, 3, 0]].swapaxes(1, 2)
# by sign and exponent of an fp16 number that is 0 or normal
POWERS = 2.0 ** np.arange(-14, 17)
POWERS = np.float32([0, *POWERS, 0, *-POWERS])

HALF, FLOAT, INT, INDEX = ir.HalfType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
HALVES, FLOATS, WORDS, CODES = (
    ir.VectorType(element, LANES) for element in (HALF, FLOAT, INT, ir.IntType(8))
)


def stored(tables: np.ndarray) -> np.ndarray:
    """Tables [tables, ENTRIES] of fp16 values as `stored_table` reads them, uint16
    [tables, STORED]: their bits and zeros, or of each LANES values the planes."""
    if PERMUTES:
        return np.pad(tables.view(np.uint16), ((0, 0), (0, tables.shape[1] // 2)))
    bytes_ = tables.astype(np.float32).view(np.uint8)
    planes = bytes_.reshape(len(tables), -1, LANES, 4)[..., 1:].swapaxes(2, 3)
    return planes.reshape(len(tables), -1).view(np.uint16)


def stored_table(form: int, builder, place):
    """The table of `ENTRIES` values at an address, see `stored`."""
    parts = []
    for i in range(ENTRIES[form] // LANES):
        if PERMUTES:
            halves = load(builder, builder.gep(place, [INDEX(LANES * i)]), HALVES)
            parts.append(builder.fpext(halves, FLOATS))
        else:
            part = builder.gep(place, [INDEX(LANES // 2 * PLANES * i)])
            parts.append(_planes(builder, part))
    return Permuted(builder, parts) if PERMUTES else Shuffled(builder, parts)


def _planes(builder, place) -> list:
    """The planes that lie one after another from an address on."""
    place = builder.bitcast(place, CODES.element.as_pointer())
    starts = [builder.gep(place, [INDEX(LANES * i)]) for i in range(PLANES)]
    return [load(builder, start, CODES) for start in starts]


def scaled_table(form: int, builder, scale):
    """The sixteen values that int4 codes have in a block, by the address of its scale:
    each times the scale, rounded to fp16."""
    bits = builder.load(scale)
    if form == EXTREME:
        factor = spread(builder, builder.fpext(builder.bitcast(bits, HALF), FLOAT))
        numbers = builder.fmul(ir.Constant(FLOATS, INTEGERS.tolist()), factor)
        numbers = builder.fpext(builder.fptrunc(numbers, HALVES), FLOATS)
        return _table(builder, numbers)
    mantissa = builder.lshr(builder.and_(bits, bits.type(0xFFC0)), bits.type(6))
    power = builder.and_(bits, bits.type(63))
    power = builder.load(_element(builder, "int4_powers", POWERS, power))
    power = spread(builder, power)
    if PERMUTES:
        products = _element(builder, "int4_products", PRODUCTS, mantissa)
        products = builder.fmul(load(builder, products, FLOATS), power)
        return Permuted(builder, [products])
    planes = _element(builder, "int4_planes", PRODUCT_PLANES, mantissa)
    return Shuffled(builder, [_planes(builder, planes)], power)


def _table(builder, numbers):
    """A table of LANES fp16 values as float32."""
    if PERMUTES:
        return Permuted(builder, [numbers])
    words = builder.bitcast(numbers, WORDS)
    planes = [builder.lshr(words, splat(words, bits)) for bits in (8, 16, 24)]
    return Shuffled(builder, [[builder.trunc(plane, CODES) for plane in planes]])


class Permuted:
    """Float32 values, LANES in each of one part or four, looked up by integers of 32
    bits, whose bits above the code's are anything."""

    def __init__(self, builder, parts: list):
        self.builder, self.parts = builder, parts

    def lookup(self, codes) -> list:
        """The values of LANES codes."""
        builder, parts, name = self.builder, self.parts, "llvm.x86.avx512."
        if len(parts) == 1:
            permute = function(builder, name + "permvar.sf.512", FLOATS, WORDS)
            return [builder.call(permute, [parts[0], codes])]
        permute = function(builder, name + "vpermi2var.ps.512", FLOATS, WORDS, FLOATS)
        low, high = (
            builder.call(permute, [a, codes, b]) for a, b in (parts[:2], parts[2:])
        )
        upper = builder.and_(codes, splat(codes, 32))
        upper = builder.icmp_unsigned("!=", upper, splat(codes, 0))
        return [builder.select(upper, high, low)]


class Shuffled:
    """Planes of bytes, looked up by bytes whose bits above the code's are anything.

    Args:
        parts: one or four of LANES values each; of each the three planes.
        factor: of every value, FLOATS.
    """

    def __init__(self, builder, parts: list, factor=None):
        self.builder, self.parts, self.factor = builder, parts, factor

    def lookup(self, codes) -> list:
        """The values of 16 codes as FLOATS; of 32 codes, whose order is that of
        a group of WIDE weights in `Packed`, twice."""
        builder, count = self.builder, codes.type.count
        codes = builder.and_(codes, splat(codes, LANES * len(self.parts) - 1))
        zero = ir.Constant(codes.type, [0] * count)
        first, second, third = (
            _shuffled(builder, plane, codes) for plane in zip(*self.parts)
        )
        numbers = []
        for upper in (False, True):
            low = _unpacked(builder, zero, first, 1, upper)
            high = _unpacked(builder, second, third, 1, upper)
            numbers.append(_unpacked(builder, low, high, 2, False))
            numbers.append(_unpacked(builder, low, high, 2, True))
        kind = ir.VectorType(FLOAT, count // 4)
        numbers = [builder.bitcast(number, kind) for number in numbers]
        while numbers[0].type != FLOATS:
            pairs = zip(numbers[::2], numbers[1::2])
            numbers = [joined(builder, *pair) for pair in pairs]
        if self.factor:
            numbers = [builder.fmul(number, self.factor) for number in numbers]
        return numbers


def _shuffled(builder, parts: tuple, codes):
    """The bytes of a plane of one or four parts at codes below its length."""
    kind = codes.type
    every = ir.Constant(
        ir.VectorType(INT, kind.count), [*range(LANES)] * (kind.count // 16)
    )
    parts = [builder.shuffle_vector(part, part, every) for part in parts]
    if not X86:
        name = f"llvm.aarch64.neon.tbl{len(parts)}.v16i8"
        find = function(builder, name, *[kind] * (len(parts) + 1), result=kind)
        return builder.call(find, [*parts, codes])
    name = "llvm.x86.ssse3.pshuf.b.128" if kind == CODES else "llvm.x86.avx2.pshuf.b"
    find, found = function(builder, name, kind, kind, result=kind), []
    for i, part in enumerate(parts):
        own = codes
        if len(parts) > 1:  # a code of another part gets the highest bit, which gives 0
            own = builder.xor(codes, splat(codes, LANES * i))
            own = builder.add(own, splat(codes, 112))
        found.append(builder.call(find, [part, own]))
    return reduce(builder.or_, found)


def _unpacked(builder, a, b, size: int, upper: bool):
    """Elements of `size` bytes of a and b in turn, from the lower or the upper half of
    each 16 bytes."""
    places, count = [], a.type.count
    for lane in range(0, count, 16):
        for start in range(lane + 8 * upper, lane + 8 * upper + 8, size):
            places += [*range(start, start + size)]
            places += [*range(count + start, count + start + size)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, count), places))


def _element(builder, name: str, values: np.ndarray, index):
    """The address of an element of a constant, or of its row."""
    constant = builder.module.globals.get(name)
    if constant is None:
        kind = FLOAT if values.dtype == np.float32 else ir.IntType(8)
        content = ir.Constant(ir.ArrayType(kind, values.size), values.ravel().tolist())
        constant = cgutils.global_constant(builder, name, content)
        constant.align = 64
    start = builder.mul(builder.zext(index, INDEX), INDEX(values.size // len(values)))
    return builder.gep(constant, [INDEX(0), start])


def function(builder, name: str, *operands, result=FLOATS):
    """LLVM's function `name`, declared."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, operands), name)


def load(builder, place, kind):
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def joined(builder, a, b):
    """The elements of two vectors as one."""
    places = list(range(2 * a.type.count))
    kind = ir.VectorType(INT, len(places))
    return builder.shuffle_vector(a, b, ir.Constant(kind, places))


def splat(like, value: int):
    """A constant vector of one integer."""
    return ir.Constant(like.type, [value] * like.type.count)


def spread(builder, value):
    """A float32 number as a vector."""
    single = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))
