"""Products rounded to fp16 in float32 arithmetic.

Processors convert to fp16 and back at a fraction of the rate at which they add. A
float32 that is added to a power of two 13 places above its own leading bit loses
exactly the bits for which fp16 has no room, by the same rule: to nearest, ties to even.
Subtracting that power again leaves the rounded value."""

from llvmlite import ir

LARGEST = 65504.0  # of fp16
SMALLEST_NORMAL = 2.0**-14  # of fp16: below, all values have the same last place
PLACES = 2.0**13  # float32 has 13 bits more than fp16
SIGN_AND_EXPONENT = 0xFF800000


def rounded_product(builder, number, scale, shifted):
    """Emits the fp16 value of number · scale, as float32.

    Args:
        number: a float32 integer of 8 bits.
        scale: float32 of an fp16 value; no product but 0 is below `SMALLEST_NORMAL` or
            beyond `LARGEST`.
        shifted: scale · `PLACES`.
    """
    single, word = number.type, ir.IntType(32)
    name, signature = "llvm.fma.f32", ir.FunctionType(single, [single] * 3)
    declared = builder.module.globals.get(name)
    fma = declared or ir.Function(builder.module, signature, name)
    bits = builder.bitcast(builder.fmul(number, shifted), word)
    power = builder.and_(bits, ir.Constant(word, SIGN_AND_EXPONENT))
    power = builder.bitcast(power, single)
    return builder.fsub(builder.call(fma, [number, scale, power]), power)
