"""Threads that share the loops of one compiled call.

One thread executes instructions and offers the parts of a long loop on a board; every
thread, this one too, takes the next part when it is free. Beginning a parallel loop of
numba's costs 2 µs, an offer half a microsecond, and a decoding step has a hundred of
them. A thread that comes late, or never, holds nobody up: only parts that it took are
waited for.

The ticket on a board is one number, so that a part is taken in one atomic step: the
number of the instruction, of parts, and of those that are taken."""

import platform

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

PARTS = 8  # of a loop for each thread
SMALLEST = 1 << 16  # elements of a part
FINISHED = 128  # bytes from the ticket to the number of parts that are finished
CLOSED = -(1 << 62)  # the ticket when there is nothing more to do
NUMBER = ir.IntType(64)


def _atomic(emit):
    """Compiled code of (address of an integer of 64 bits, number)."""

    @intrinsic
    def compiled(typing, address, number):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], NUMBER.as_pointer())
            return emit(builder, pointer, arguments[1])

        return types.int64(types.int64, types.int64), generate

    return compiled


def _emit_write(builder, pointer, number):
    builder.store_atomic(number, pointer, "release", 8)
    return number


def _emit_read(builder, pointer, _):
    """A thread that waits in a loop of reads leaves the core to its neighbour."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), ())
        name = "llvm.x86.sse2.pause"
        known = builder.module.globals.get(name)
        builder.call(known or ir.Function(builder.module, kind, name), ())
    return builder.load_atomic(pointer, "acquire", 8)


_add = _atomic(lambda builder, *where: builder.atomic_rmw("add", *where, "acq_rel"))
_write, _read = _atomic(_emit_write), _atomic(_emit_read)


@njit
def board():
    return np.zeros(FINISHED // 4, np.int64)


@njit
def parts(elements, threads):
    """The number of parts of a loop over so many elements: for several threads a
    multiple of them."""
    if threads == 1 or elements < SMALLEST:
        return 1
    return threads * min(PARTS, max(1, elements // SMALLEST // threads))


@njit
def offer(board, number, count):
    """Offers the parts of an instruction."""
    _write(board + FINISHED, 0)
    _write(board, number << 32 | count << 16)


@njit
def close(board):
    _write(board, CLOSED)


@njit
def wait(board, count):
    """Waits until so many parts are finished."""
    while _read(board + FINISHED, 0) < count:
        pass


@njit
def finish(board):
    _add(board + FINISHED, 1)


@njit
def take(board):
    """The number of an instruction, the next of its parts and how many it has; there
    may be no next one."""
    ticket = _add(board, 1)
    return ticket >> 32, ticket & 0xFFFF, ticket >> 16 & 0xFFFF


@njit
def await_parts(board):
    """Waits for a part that nobody has taken; False once the board is closed."""
    while True:
        ticket = _read(board, 0)
        if ticket < 0:
            return False
        if ticket & 0xFFFF < ticket >> 16 & 0xFFFF:
            return True
