"""Products with stored weights, which torch lacks, compiled by numba. fp16 values are
arrays of their bits (uint16); sums are float32, results are rounded once.

Every kernel computes out = x @ weight.T + bias: x [N, K] float32, the weight [R, K] as it
is stored (its arrays), bias [R] float32, out [N, R] the bits of fp16. Kernels are
compiled once per machine, then read from numba's cache. They run on the threads of
OpenMP, which torch uses, too. Where there is no OpenMP they run on numba's own threads,
which take one caller at a time and sleep between two kernels."""

import threading
from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import config, njit, prange, set_num_threads, types
from numba.extending import intrinsic

from miltorch.errors import InputError

if config.DISABLE_JIT:  # its functions would get arrays where they expect scalars
    raise InputError(
        "NUMBA_DISABLE_JIT",
        "set",
        "compiled products with stored weights",
        "unset NUMBA_DISABLE_JIT",
    )

config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
LOCK = threading.Lock()
# sums may be reordered; NaN and infinity keep their meaning
FASTMATH = {"reassoc", "contract"}
ROWS_PER_TASK = 64  # rows that one thread multiplies with one buffer
PREFETCH_BYTES = 4096  # how far ahead of its multiplication a weight is read
ONE_THREAD_BYTES = 1 << 18  # one thread has read a smaller weight before others start


def run(kernel, *arrays: np.ndarray) -> None:
    """Runs a parallel kernel on a weight, on as many threads as torch uses."""
    before = torch.get_num_threads()
    threads = 1 if arrays[0].nbytes < ONE_THREAD_BYTES else before
    with LOCK:
        set_num_threads(min(threads, config.NUMBA_NUM_THREADS))
        # starting a pool sets the number for OpenMP, and so for torch
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
        kernel(*arrays)


@intrinsic
def fp16_to_float(context, bits):
    """The float32 value of fp16 bits; numba has no fp16 on processors."""

    def emit(context, builder, signature, arguments):
        value = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(value, ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def float_to_fp16(context, value):
    """The bits of the fp16 value that is nearest to a float32 one."""

    def emit(context, builder, signature, arguments):
        value = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(value, ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def prefetch(context, array, byte):
    """Prefetches a byte of a contiguous array, which may lie behind its end: processors
    do not predict the reads of narrow weights."""

    def emit(context, builder, signature, arguments):
        values, byte = arguments
        data = context.make_array(array)(context, builder, values).data
        data = builder.bitcast(data, ir.IntType(8).as_pointer())
        address, flag = builder.gep(data, [byte]), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        # to read, into every cache, data and no instructions
        builder.call(fetch, [address, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), emit


def compiled(**options) -> Callable:
    """The decorator `njit` with numba's cache. Where numba can write to no folder for its
    cache (NUMBA_CACHE_DIR, beside this file, below the user's home), every process
    compiles the function again."""

    def compile_function(function: Callable) -> Callable:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)

    return compile_function


@njit(inline="always")
def prefetch_row_after(r, weight):
    """Prefetches as many bytes as a row has, `PREFETCH_BYTES` bytes behind those of row r."""
    for byte in range(0, weight.strides[0], 64):
        prefetch(weight, r * weight.strides[0] + byte + PREFETCH_BYTES)


@compiled(fastmath=FASTMATH, parallel=True)
def multiply_fp16(weight, x, bias, out):
    """A weight of fp16."""
    for r in prange(len(weight)):
        prefetch_row_after(r, weight)
        for n in range(len(x)):
            total = np.float32(0)
            for k in range(weight.shape[1]):
                total += fp16_to_float(weight[r, k]) * x[n, k]
            out[n, r] = float_to_fp16(total + bias[r])


@compiled(fastmath=FASTMATH, parallel=True)
def multiply_int8(weight, scale, x, bias, out):
    """A weight of int8 by scale [R, 1] float32."""
    for r in prange(len(weight)):
        prefetch_row_after(r, weight)
        for n in range(len(x)):
            total = np.float32(0)
            for k in range(weight.shape[1]):
                total += np.float32(weight[r, k]) * x[n, k]
            out[n, r] = float_to_fp16(total * scale[r, 0] + bias[r])


@compiled(fastmath=FASTMATH, parallel=True)
def multiply_int4(codes, scale, x, bias, out):
    """Codes [R, K / 2] (the value plus 8 of column k in the low half of byte k, of
    column k + K / 2 in its high half) by scale [R, blocks] float32."""
    half, blocks = codes.shape[1], scale.shape[1]
    xs = x.reshape(len(x), blocks, -1)
    for part in prange((len(codes) + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        row = np.empty(2 * half, np.int8)
        low, high, values = row[:half], row[half:], row.reshape(blocks, -1)
        for r in range(
            part * ROWS_PER_TASK, min(part * ROWS_PER_TASK + ROWS_PER_TASK, len(codes))
        ):
            prefetch_row_after(r, codes)
            for k in range(half):
                low[k] = np.int8(codes[r, k] & np.uint8(15)) - np.int8(8)
            for k in range(half):
                high[k] = np.int8(codes[r, k] >> np.uint8(4)) - np.int8(8)
            for n in range(len(x)):
                total = np.float32(0)
                for b in range(blocks):
                    block = np.float32(0)
                    for k in range(xs.shape[2]):
                        block += np.float32(values[b, k]) * xs[n, b, k]
                    total += block * scale[r, b]
                out[n, r] = float_to_fp16(total + bias[r])


@njit
def _expand(table, pairs):
    """pairs [256]: for every byte of two codes into a table of 16 entries, the values of
    both, the low code's first."""
    for high in range(16):
        upper = np.uint64(table[high]) << np.uint64(32)
        for low in range(16):
            pairs[16 * high + low] = upper | np.uint64(table[low])


@njit
def _look_up(codes, table, pairs, row):
    """row [K]: the table's value of every code. Where a byte has two codes, one lookup in
    `pairs` decodes both."""
    if len(codes) < len(row):
        both = row.view(np.uint64)
        for k in range(len(codes)):
            both[k] = pairs[codes[k]]
    else:
        values = row.view(np.uint32)
        for k in range(len(codes)):
            values[k] = table[codes[k]]


@compiled(fastmath=FASTMATH, parallel=True)
def multiply_table(codes, table_of_row, tables, x, bias, out):
    """Codes [R, bytes] by lookup tables, see `dense`. A group's pairs are made where its
    first row is read: stored for each group, they would take as many bytes as the codes
    of 8 rows."""
    has_pairs = codes.shape[1] < x.shape[1]
    for part in prange((len(codes) + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        row = np.empty(x.shape[1], np.float32)
        pairs = np.empty(256, np.uint64)
        expanded = -1
        for r in range(
            part * ROWS_PER_TASK, min(part * ROWS_PER_TASK + ROWS_PER_TASK, len(codes))
        ):
            prefetch_row_after(r, codes)
            if has_pairs and table_of_row[r] != expanded:
                _expand(tables[table_of_row[r]], pairs)
                expanded = table_of_row[r]
            _look_up(codes[r], tables[table_of_row[r]], pairs, row)
            for n in range(len(x)):
                total = np.float32(0)
                for k in range(x.shape[1]):
                    total += row[k] * x[n, k]
                out[n, r] = float_to_fp16(total + bias[r])


@compiled(parallel=True)
def dense(codes, table_of_row, tables, out):
    """out [R, K] float32: the weights of codes [R, bytes].

    Args:
        codes: a byte has two codes, the first column's in its low half, where there are
            half as many bytes as columns K; otherwise it has one.
        table_of_row: [R] indices into `tables`.
        tables: [P, entries] the bits of float32 values (uint32), 16 entries where a byte
            has two codes.
    """
    has_pairs = codes.shape[1] < out.shape[1]
    for part in prange((len(codes) + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        pairs = np.empty(256, np.uint64)
        expanded = -1
        for r in range(
            part * ROWS_PER_TASK, min(part * ROWS_PER_TASK + ROWS_PER_TASK, len(codes))
        ):
            if has_pairs and table_of_row[r] != expanded:
                _expand(tables[table_of_row[r]], pairs)
                expanded = table_of_row[r]
            _look_up(codes[r], tables[table_of_row[r]], pairs, out[r])
