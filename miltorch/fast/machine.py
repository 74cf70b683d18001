"""The small machine that executes a `Bytecode`: a list of instructions on float32
arrays, in one compiled call.

An instruction is a row of FIELDS integers. LINEAR, WRITE and ATTEND have fields of
their own; any other stands for a loop over three axes around one operation on the
elements of a fourth, each operand with strides of its own, so that a transpose, a slice
or a broadcast of an operand costs nothing. Results are rounded to fp16 once, as the
program declares."""

import math
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numba import carray, njit, prange, types

from miltorch.fast import attention, linear, team
from miltorch.fast.addresses import floats, numbers
from miltorch.fast.kernels import (
    FLAGS,
    _exp,
    _one_hot_rows,
    _rms_norm_kernel,
    _round16,
    _same,
    _write,
    on_threads,
)

# kind, four sizes, (address, four strides in bytes) of the result and three operands, a
# number
FIELDS = 26
(
    LINEAR,
    WRITE,
    ATTEND,
    SUM,
    MEAN,
    LARGEST,
    SMALLEST,
    WHICH,
    DOT,
    SOFTMAX,
    NORM,
    ROTATE,
) = range(12)
PAIRS = ADD, SUB, MUL, DIV, MAX, MIN, EQUAL, RSQRT = range(12, 20)
COPY, ABS, RELU, SQRT, EXP, TANH, SIGMOID, SILU, GELU, GELU_TANH = range(20, 30)
CLOCK = 30


_read_clock = types.ExternalFunction(
    "clock_gettime", types.int32(types.int32, types.CPointer(types.int64))
)


def _of_pairs(function):
    """A loop of `function` over a and b, which may be one number, into out, each result
    rounded to fp16."""
    compiled = njit(error_model="numpy")(function)

    @njit(error_model="numpy")
    def loop(a, b, out):
        if len(b) == 1:
            y = b[0]
            for i in range(len(out)):
                out[i] = _round16(compiled(a[i], y))
        else:
            for i in range(len(out)):
                out[i] = _round16(compiled(a[i], b[i]))

    return loop


def _of_each(function):
    """A loop of `function` over a into out, each result rounded to fp16."""
    compiled = njit(error_model="numpy")(function)

    @njit(error_model="numpy")
    def loop(a, out):
        for i in range(len(out)):
            out[i] = _round16(compiled(a[i]))

    return loop


ONE, TWO, HALF = np.float32(1), np.float32(2), np.float32(0.5)
_add, _sub, _mul, _div = (
    _of_pairs(function)
    for function in (
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / b,
    )
)
_max, _min = (  # NaN stays NaN
    _of_pairs(function)
    for function in (
        lambda a, b: a if a >= b or a != a else b,
        lambda a, b: a if a <= b or a != a else b,
    )
)
_equal = _of_pairs(lambda a, b: ONE if a == b else ONE - ONE)
_rsqrt = _of_pairs(lambda a, b: ONE / np.sqrt(a + b))
_copy, _abs, _sqrt = (
    _of_each(f) for f in (lambda a: a, lambda a: abs(a), lambda a: np.sqrt(a))
)
_relu = _of_each(lambda a: a if a > 0 or a != a else ONE - ONE)
_exponential = _of_each(lambda a: np.float32(math.exp(a)))
_tanh = _of_each(lambda a: np.float32(math.tanh(a)))
_sigmoid = _of_each(lambda a: ONE / (ONE + _exp(-a)))
_silu = _of_each(lambda a: a / (ONE + _exp(-a)))
_gelu = _of_each(
    lambda a: HALF * a * (ONE + np.float32(math.erf(a * np.float32(math.sqrt(0.5)))))
)
# half of 1 + tanh z is 1 / (1 + e^-2z)
_gelu_tanh = _of_each(
    lambda a: (
        a
        / (
            ONE
            + _exp(
                np.float32(-2 * math.sqrt(2 / math.pi))
                * (a + np.float32(0.044715) * a * a * a)
            )
        )
    )
)


@njit
def _line(kind, a, b, out):
    """One operation on every element of `out`."""
    if kind == COPY:
        _copy(a, out)
    elif kind == ADD:
        _add(a, b, out)
    elif kind == MUL:
        _mul(a, b, out)
    elif kind == SUB:
        _sub(a, b, out)
    elif kind == DIV:
        _div(a, b, out)
    elif kind == MAX:
        _max(a, b, out)
    elif kind == MIN:
        _min(a, b, out)
    elif kind == EQUAL:
        _equal(a, b, out)
    elif kind == RSQRT:
        _rsqrt(a, b, out)
    elif kind == SILU:
        _silu(a, out)
    else:
        _rarer_line(kind, a, out)


@njit(inline="always")
def _rarer_line(kind, a, out):
    if kind == ABS:
        _abs(a, out)
    elif kind == RELU:
        _relu(a, out)
    elif kind == SQRT:
        _sqrt(a, out)
    elif kind == EXP:
        _exponential(a, out)
    elif kind == TANH:
        _tanh(a, out)
    elif kind == SIGMOID:
        _sigmoid(a, out)
    elif kind == GELU:
        _gelu(a, out)
    elif kind == GELU_TANH:
        _gelu_tanh(a, out)


@njit(fastmath=FLAGS)
def _sum_of_products(a, b, start):
    total = np.float32(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total + start


@njit(fastmath=FLAGS)
def _sum(a):
    total = np.float32(0)
    for i in range(len(a)):
        total += a[i]
    return total


@njit
def _which(kind, a):
    """The place of the largest (or smallest) element, the first of equals; of a NaN
    where there is one."""
    best = 0
    for i in range(1, len(a)):
        better = a[i] < a[best] if kind == SMALLEST else a[i] > a[best]
        if better or (a[i] != a[i] and a[best] == a[best]):
            best = i
    return best


@njit(error_model="numpy")
def _softmax(a, out):
    largest, total = a[_which(LARGEST, a)], np.float32(0)
    for i in range(len(a)):
        out[i] = _exp(a[i] - largest)
        total += out[i]
    for i in range(len(a)):
        out[i] = _round16(out[i] / total)


@njit
def _rotated(a, cos, sin, half, out):
    for i in range(half):
        c, s, x, z = cos[i], sin[i], a[i], a[half + i]
        out[i] = _round16(_round16(x * c) - _round16(z * s))
        out[half + i] = _round16(_round16(z * c) + _round16(x * s))
    for i in range(2 * half, len(a)):
        out[i] = a[i]


@njit
def _norm(a, packed, out):
    width = len(a)
    head = carray(floats(packed), (width + 6,))
    first, second, third = (
        np.int64(head[width + 3]),
        np.int64(head[width + 4]),
        np.int64(head[width + 5]),
    )
    lists = carray(floats(packed), (width + 6 + first + second + third,))[width + 6 :]
    eps0, eps1, gains = (
        lists[:first],
        lists[first : first + second],
        lists[first + second :],
    )
    rows, bounds = a.reshape(1, width), head[width : width + 3]
    _rms_norm_kernel(
        rows, head[:width], bounds, eps0, eps1, gains, out.reshape(1, width)
    )


@njit
def _picked(address, stride, size, scratch):
    """The float32 elements at `address`, `stride` bytes apart, side by side: in place,
    or copied to `scratch`."""
    if stride == 4:
        return carray(floats(address), (size,))
    copy = carray(floats(scratch), (size,))
    for i in range(size):
        copy[i] = carray(floats(address + i * stride), (1,))[0]
    return copy


@njit
def _row(
    kind, size, number, out, step, a, a_step, b, b_step, c, c_step, scratch, width
):
    """One instruction on `size` elements of each operand."""
    x = _picked(a, a_step, size, scratch)
    if kind >= SOFTMAX:
        y = carray(floats(out if step == 4 else scratch + width), (size,))
        if kind >= ADD:
            other = 1 if b_step == 0 else size
            _line(
                kind,
                x,
                _picked(b, b_step if b_step else 4, other, scratch + 2 * width),
                y,
            )
        elif kind == SOFTMAX:
            _softmax(x, y)
        elif kind == NORM:
            _norm(x, b, y)
        else:
            cos = _picked(b, b_step, number, scratch + 2 * width)
            _rotated(x, cos, _picked(c, c_step, number, scratch + 3 * width), number, y)
        if step != 4:
            for i in range(size):
                carray(floats(out + i * step), (1,))[0] = y[i]
    else:
        result = carray(floats(out), (1,))
        if kind == DOT:
            start = carray(floats(c), (1,))[0]
            other = _picked(b, b_step, size, scratch + 2 * width)
            result[0] = _round16(_sum_of_products(x, other, start))
        elif kind == SUM:
            result[0] = _round16(_sum(x))
        elif kind == MEAN:
            result[0] = _round16(_sum(x) / np.float32(size))
        elif kind == WHICH:
            result[0] = np.float32(_which(LARGEST, x))
        else:
            result[0] = x[_which(kind, x)]


@njit
def _base(outer, address):
    return address if address >= 0 else outer[-1 - address]


@njit(inline="always")
def _strided(code, outer, scratch, width):
    kind, n0, n1, n2, size, number = (
        code[0],
        code[1],
        code[2],
        code[3],
        code[4],
        code[25],
    )
    out, a, b, c = (
        _base(outer, code[5]),
        _base(outer, code[10]),
        _base(outer, code[15]),
        _base(outer, code[20]),
    )
    for i in range(n0):
        for j in range(n1):
            for k in range(n2):
                _row(
                    kind,
                    size,
                    number,
                    out + i * code[6] + j * code[7] + k * code[8],
                    code[9],
                    a + i * code[11] + j * code[12] + k * code[13],
                    code[14],
                    b + i * code[16] + j * code[17] + k * code[18],
                    code[19],
                    c + i * code[21] + j * code[22] + k * code[23],
                    code[24],
                    scratch,
                    width,
                )


@njit(inline="always")
def _cache_write(code, outer):
    """Fields: state [B, H, S, D], rows [B, H, T, D], places [B, T], B, H, S, T, D."""
    B, H, S, T, D = code[4:9]
    state = carray(floats(_base(outer, code[1])), (B, H, S, D))
    rows, places = (
        carray(floats(code[2]), (B, H, T, D)),
        carray(numbers(code[3]), (B, T)),
    )
    _write(state, places, rows)


@njit(inline="always")
def _attention(code, outer, part):
    """Fields: result and queries [B, H_kv, N, D], states [B, H_kv, S, D], mask [B, T,
    S], B, H_kv, N, D, T, S."""
    out, q, key, value, mask, B, groups, N, D, T, S = code[1:12]
    keys, values = (
        carray(floats(_base(outer, key)), (B, groups, S, D)),
        carray(floats(_base(outer, value)), (B, groups, S, D)),
    )
    result = carray(floats(out), (B, groups, N, D))
    queries, columns = (
        carray(floats(q), (B, groups, N, D)),
        carray(floats(mask), (B, T, S)),
    )
    attention.attend_part(queries, keys, values, columns, result, part)


@njit
def _clock(address):
    """Writes seconds and nanoseconds of the monotonic clock, and those of the calling
    thread's CPU time, to [4] at an address."""
    _read_clock(time.CLOCK_MONOTONIC, numbers(address))
    _read_clock(time.CLOCK_THREAD_CPUTIME_ID, numbers(address + 16))


@njit
def _places(masks, outer):
    """Writes the places that write masks name; False unless every column and row of
    each holds one 1 or nothing."""
    for i in range(len(masks)):
        mask, B, S, T, places = masks[i]
        sane, found = _one_hot_rows(carray(floats(_base(outer, mask)), (B, S, T)))
        if not sane:
            return False
        carray(numbers(places), (B, T))[:] = found
    return True


@njit(inline="always")
def _parts(code, threads):
    """Into how many parts an instruction is divided; 0 for one that is not."""
    if code[0] == LINEAR:
        return linear.parts(code, threads)
    if code[0] == ATTEND:
        return attention.attend_parts(code[6], code[7])
    return 0


@njit(inline="always")
def _part(code, outer, scratch, in_integers, part, parts):
    if code[0] == LINEAR:
        linear.compute(code, scratch, in_integers, part, parts)
    else:
        _attention(code, outer, part)


@njit(inline="always")
def _whole(code, outer, scratch, width):
    """An instruction that is not divided."""
    if code[0] == WRITE:
        _cache_write(code, outer)
    elif code[0] == CLOCK:
        _clock(code[1])
    else:
        _strided(code, outer, scratch, width)


@njit(inline="always")
def _share(code, outer, scratch, in_integers, board, thread, threads):
    """Executes a thread's parts, then those of others."""
    for other in range(threads):
        owner = (thread + other) % threads
        i, part = team.take(board, owner)
        while i >= 0:
            parts = _parts(code[i], threads)
            _part(code[i], outer, scratch, in_integers[0], part, parts)
            team.finish(board, threads)
            i, part = team.take(board, owner)


@njit(inline="always")
def _next_divided(code, outer, scratch, width, i):
    """Executes instructions from `i` on up to one that is divided; the number of that
    one, or how many there are."""
    while i < len(code) and _parts(code[i], 1) == 0:
        _whole(code[i], outer, scratch, width)
        i += 1
    return i


@njit
def _execute(code, outer, scratch, width, in_integers, board, thread, threads):
    """What one thread executes: the first one all instructions, of which it shares the
    parts with the others. Each function is called in one place, since LLVM compiles it
    anew for another."""
    i = parts = 0
    while True:
        if thread == 0:
            i = _next_divided(code, outer, scratch, width, i)
            if i == len(code):
                team.close(board, threads)
                return
            if code[i, 0] == LINEAR:
                in_integers[0] = linear.prepare(code[i], scratch)
            parts = _parts(code[i], threads)
            team.offer(board, i, parts, threads)
        elif not team.await_parts(board, thread):
            return
        _share(code, outer, scratch, in_integers, board, thread, threads)
        if thread == 0:
            team.await_finish(board, parts, threads)
            i += 1


@njit(parallel=True, cache=True)
def execute(code, outer, masks, scratch, width, threads):
    """Executes instructions [n, FIELDS]; a negative address names an element of
    `outer`.

    Args:
        masks: (address, B, S, T, address of places [B, T]) of each write mask [B, S,
            T].
        scratch: address of four times `width` bytes.
        threads: how many may share long instructions.

    Returns:
        False, with nothing done, unless every column and row of every mask holds one 1
        or nothing.
    """
    if not _places(masks, outer):
        return False
    board, in_integers = team.board(threads), np.empty(1, np.int64)
    for i in prange(threads):
        thread, place = np.int64(i), board.ctypes.data
        _execute(code, outer, scratch, width, in_integers, place, thread, threads)
    return True


def attend(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """softmax(q @ keyᵀ + mask) @ value, float32 like q: q [B, H_kv, G·T, D] fp16, T
    rows to a head, states [B, H_kv, S, D] float32, mask [B, T, S] fp16."""
    (B, H_kv, N, D), (_, T, S) = q.shape, mask.shape
    _same(key.shape, (B, H_kv, S, D))
    _same(value.shape, key.shape)
    _same((len(mask), N % T), (B, 0))
    out = torch.empty(q.shape)
    tensors = [out, *(each.float().contiguous() for each in (q, key, value, mask))]
    code = np.zeros((1, FIELDS), np.int64)
    places = [each.data_ptr() for each in tensors]
    code[0, :12] = ATTEND, *places, B, H_kv, N, D, T, S
    outer, masks = np.zeros(0, np.int64), np.zeros((0, 5), np.int64)
    on_threads(execute, code, outer, masks, 0, 0, torch.get_num_threads())
    return out


def drop_stale_machine_code(folder: Path, *sources: Path) -> None:
    """Removes numba's indexes of compiled functions in `folder` that are older than one
    of the `sources` they may be compiled from: numba compares an index with the file of
    its function alone."""
    newest = max(source.stat().st_mtime for source in sources)
    for index in folder.glob("*.nbi"):
        with suppress(FileNotFoundError):  # another process removes them, too
            if index.stat().st_mtime < newest:
                index.unlink()


# `execute` is compiled from functions of the modules beside this one
drop_stale_machine_code(
    Path(execute._cache.cache_path), *Path(__file__).parent.glob("*.py")
)
