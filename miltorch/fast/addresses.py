"""Arrays at the addresses that a `Bytecode` names: for `carray` in compiled code."""

from llvmlite import ir
from numba import types

from miltorch.fast.kernels import instruction


def _pointer(target, element):
    return instruction(types.int64, types.CPointer(target))(
        lambda builder, address: builder.inttoptr(address, element.as_pointer())
    )


floats = _pointer(types.float32, ir.FloatType())
signed_bytes = _pointer(types.int8, ir.IntType(8))
unsigned_bytes = _pointer(types.uint8, ir.IntType(8))
halves = _pointer(types.uint16, ir.IntType(16))
numbers = _pointer(types.int64, ir.IntType(64))
