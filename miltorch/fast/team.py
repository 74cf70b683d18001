"""Threads that share the loops of one compiled call.

One thread executes instructions and offers the parts of a long loop on a board. Every
thread, this one too, has parts that lie side by side, since a processor reads on ahead,
and when it has none left takes those of others. Beginning a parallel loop of numba's
costs 2 µs, an offer half a microsecond, and a decoding step has a hundred of them. A
thread that comes late, or never, holds nobody up: only parts that it took are waited
for.

A thread's ticket on the board is one number, so that a part is taken in one atomic
step: the number of the instruction, the part behind the last one, and the next part."""

import platform

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

PARTS = 8  # of a loop for each thread
SMALLEST = 1 << 16  # elements of a part
STEP = 128  # bytes from the ticket of one thread to that of the next
CLOSED = -(1 << 62)  # a ticket when there is nothing more to do
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
def board(threads):
    """A ticket for each thread, then the number of parts that are finished."""
    return np.zeros((threads + 1) * STEP // 8, np.int64)


@njit
def parts(elements, threads):
    """The number of parts of a loop over so many elements: for several threads a
    multiple of them."""
    if threads == 1 or elements < SMALLEST:
        return 1
    return threads * min(PARTS, max(1, elements // SMALLEST // threads))


@njit
def offer(board, number, count, threads):
    """Offers the parts of an instruction; a single one to the first thread alone."""
    _write(board + STEP * threads, 0)
    threads = min(count, threads)
    for thread in range(threads):
        first, last = count * thread // threads, count * (thread + 1) // threads
        _write(board + STEP * thread, number << 32 | last << 16 | first)


@njit
def close(board, threads):
    for thread in range(threads):
        _write(board + STEP * thread, CLOSED)


@njit
def finish(board, threads):
    _add(board + STEP * threads, 1)


@njit
def await_finish(board, count, threads):
    while _read(board + STEP * threads, 0) < count:
        pass


@njit
def take(board, thread):
    """The number of an instruction and the next part of those of a thread; -1 twice
    where there is none."""
    ticket = _read(board + STEP * thread, 0)
    if ticket >= 0 and ticket & 0xFFFF < ticket >> 16 & 0xFFFF:
        ticket = _add(board + STEP * thread, 1)
        if ticket >= 0 and ticket & 0xFFFF < ticket >> 16 & 0xFFFF:
            return ticket >> 32, ticket & 0xFFFF
    return -1, -1


@njit
def await_parts(board, thread):
    """Waits until a thread has parts; False once the board is closed."""
    while True:
        ticket = _read(board + STEP * thread, 0)
        if ticket < 0:
            return False
        if ticket & 0xFFFF < ticket >> 16 & 0xFFFF:
            return True
