"""One token of one sequence in a single compiled call: a `FastProgram`'s calls as instructions of a small machine.

At T = 1 and B = 1 every value is a vector, whatever its axes are called, and moving axes of size 1 moves nothing. Between
the large products a layer is then some twenty small steps, which cost less to do than to dispatch one by one. Registers
are float32 arrays that hold values already rounded to fp16, so an instruction means what the call it stands for means.
"""

from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types

from miltorch.fast import kernels, packed, patterns
from miltorch.fast.kernels import (
    _attend_kernel,
    _exp,
    _one,
    _one_hot_rows,
    _rms_norm_kernel,
    _rotate,
    _round16,
    _visible,
    _write,
)
from miltorch.fast.packed import LUT6, _product
from miltorch.fast.products import Linear

ROUND, ADD, SUB, MUL, SILU, NORM, LINEAR, ROTATE, WRITE, ATTEND = range(10)
POINTWISE = {"add": ADD, "sub": SUB, "mul": MUL, "silu": SILU}
VIEW_OPS = {"reshape", "transpose", "expand_dims", "squeeze", "identity"}
FIELDS = 10


class NotCompiled(Exception):
    """A call that no instruction stands for."""


class Bytecode:
    """What `program` does for inputs of the shapes it was recorded with.

    Args:
        program: a `FastProgram`.
        values: its registers after a call of these shapes.

    Raises:
        NotCompiled: something in it is more than one token, or has no instruction.
    """

    def __init__(self, program, values: list):
        self.constants, self.values, self.arrays, self.addresses, self.code = (
            program.values,
            values,
            [],
            {},
            [],
        )
        self.inputs, self.states, self.masks = list(program.inputs), list(program.states), []
        self.outputs = {
            name: tuple(values[register].shape) for name, register in program.outputs.items()
        }
        self.outer = [
            *(register for register, _ in program.inputs.values()),
            *program.states.values(),
        ]
        for register, dtype in program.inputs.values():
            if dtype == torch.float16:
                self._emit(ROUND, register, self._outer(register), self._size(register))
        for node in program.nodes:
            self._record(node)
        for i, register in enumerate(program.outputs.values(), len(self.outer)):
            _need(values[register].dtype == torch.float16)
            self._add(ROUND, -1 - i, self._address(register), self._size(register))
        self.code = np.array(self.code, np.int64)
        self.masks = np.array(self.masks, np.int64).reshape(-1, 2)
        del self.constants, self.values

    def run(self, inputs: dict[str, torch.Tensor], state: dict) -> dict[str, torch.Tensor] | None:
        """As `FastProgram.run`; None, with nothing done, when a write mask is not one-hot or a state is laid out otherwise."""
        cells = [state[name].value for name in self.states]
        if not all(cell.is_contiguous() for cell in cells):
            return None
        operands = [inputs[name].float().contiguous() for name in self.inputs]
        outputs = {name: torch.empty(shape) for name, shape in self.outputs.items()}
        outer = np.array([t.data_ptr() for t in (*operands, *cells, *outputs.values())], np.int64)
        complete = kernels.on_threads(
            _run_bytecode, self.code, outer, self.masks, torch.get_num_threads() > 1
        )
        return outputs if complete else None

    def _record(self, node) -> None:
        function, pattern = node.function, getattr(node.function, "func", None)
        inputs, outputs, kind = node.inputs, node.outputs, node.op.kind
        values = [self.values[register] for register in inputs]
        if isinstance(function, Linear):
            self._linear(function, inputs[0], outputs)
        elif pattern is patterns._rms_norm:
            self._norm(*function.args, inputs[0], outputs[0])
        elif function is kernels.rotate:
            x, cos, sin = map(self._address, inputs)
            (B, H, T, D), half = values[0].shape, values[1].numel()
            _need(B == T == 1 and half == values[2].numel() <= D // 2)
            self._emit(ROTATE, outputs[0], x, H, D, cos, sin, half)
        elif function in (patterns._write_positions, patterns._span):
            _need(values[0].shape[0] == values[0].shape[1] == 1)
            if function is patterns._write_positions:
                _need(values[0].shape[3] == 1)
                self.masks.append((self._outer(inputs[0]), values[0].numel()))
        elif pattern is patterns._write_rows:
            cell, mask, _, rows = inputs
            B, H, S, D = values[0].value.shape
            _need(B == 1 and values[3].numel() == H * D and values[1].numel() == S)
            self._add(WRITE, self._outer(cell), self._address(rows), H, S, D, self._address(mask))
        elif function is patterns._attend_visible:
            q, key, value, mask, _ = inputs
            (B, groups, S, D), H = values[1].value.shape, values[0].numel() // values[0].shape[-1]
            _need(B == 1 and values[3].shape[2] == 1 and values[3].numel() == S and H % groups == 0)
            _need(values[2].value.shape == values[1].value.shape and values[0].shape[-1] == D)
            states = self._outer(key), self._outer(value)
            self._emit(
                ATTEND, outputs[0], self._address(q), H, D, *states, self._address(mask), groups, S
            )
        elif kind in POINTWISE:
            first, last, result = values[0], values[-1], self.values[outputs[0]]
            _need(
                len(inputs) <= 2
                and result.dtype == torch.float16
                and all(x.is_floating_point() for x in values)
            )
            _need(
                first.numel() == result.numel()
                and (last.numel() == 1 or _axes(first) == _axes(last))
            )
            x, y = self._address(inputs[0]), self._address(inputs[-1])
            self._emit(POINTWISE[kind], outputs[0], x, first.numel(), y, last.numel())
        else:
            _need(kind in VIEW_OPS and len(outputs) == 1)
            (x,), result = values, self.values[outputs[0]]
            _need(x.numel() == result.numel() and x.dtype == result.dtype)
            _need(kind != "transpose" or _axes(x) == _axes(result))
            self.addresses[outputs[0]] = self._address(inputs[0])

    def _linear(self, linear: Linear, x: int, outputs: list[int]) -> None:
        (R, K), (weight, scale) = linear.weight.shape, linear.arrays
        widths = linear.widths or [R]
        _need(self._size(x) == K and sum(widths) == R)
        _need(linear.bias is None or linear.bias.numel() == R)
        bias = 0 if linear.bias is None else self._keep(linear.bias.float().numpy())
        out = self._keep(np.empty(R, np.float32))
        self._add(
            LINEAR,
            out,
            self._address(x),
            R,
            K,
            weight.ctypes.data,
            linear.form,
            scale.ctypes.data,
            bias,
        )
        for register, width in zip(outputs, widths, strict=True):
            self.addresses[register] = out
            out += 4 * width

    def _norm(self, axis: int, constants: list, x: int, out: int) -> None:
        shape = self.values[x].shape
        weight, bounds, *lists = constants
        _need(shape[axis] == len(weight) and (axis == -1 or shape[axis + 1 :].numel() == 1))
        packed = np.concatenate([weight, bounds, [len(each) for each in lists], *lists])
        self._emit(
            NORM,
            out,
            self._address(x),
            self._size(x) // len(weight),
            len(weight),
            self._keep(packed),
        )

    def _size(self, register: int) -> int:
        return self.values[register].numel()

    def _keep(self, array: np.ndarray) -> int:
        """The address of a float32 array that lives as long as the bytecode."""
        self.arrays.append(np.ascontiguousarray(array, np.float32))
        return self.arrays[-1].ctypes.data

    def _address(self, register: int) -> int:
        """The address of a register; one that no instruction writes is a constant."""
        if register not in self.addresses:
            _need(isinstance(self.constants[register], torch.Tensor))
            self.addresses[register] = self._keep(self.values[register].float().numpy())
        return self.addresses[register]

    def _outer(self, register: int) -> int:
        """How an instruction names an input or a state of the call."""
        return -1 - self.outer.index(register)

    def _emit(self, kind: int, out: int, *operands: int) -> None:
        self.addresses[out] = self._keep(np.empty(self._size(out), np.float32))
        self._add(kind, self.addresses[out], *operands)

    def _add(self, *fields: int) -> None:
        self.code.append(fields + (0,) * (FIELDS - len(fields)))


def _need(holds: bool) -> None:
    if not holds:
        raise NotCompiled


def _axes(value: torch.Tensor) -> list[int]:
    """Sizes that order the elements: those of more than one."""
    return [n for n in value.shape if n > 1]


def _pointer(target, element):
    return kernels.instruction(types.int64, types.CPointer(target))(
        lambda builder, address: builder.inttoptr(address, element.as_pointer())
    )


_floats = _pointer(types.float32, ir.FloatType())
_bytes = _pointer(types.int8, ir.IntType(8))
_codes = _pointer(types.uint8, ir.IntType(8))
_halves = _pointer(types.uint16, ir.IntType(16))


@njit(cache=True)
def _run_bytecode(code, outer, masks, threads):
    """Executes instructions [n, FIELDS]: kind, address of the result, then operands and sizes; a negative address names
    an element of `outer`. False, with nothing done, unless every one of `masks` (address, size) holds one 1 or nothing."""
    for i in range(len(masks)):
        if not _one_hot_rows(_vector(outer, masks[i, 0], masks[i, 1]).reshape(1, masks[i, 1], 1))[
            0
        ]:
            return False
    for i in range(len(code)):
        kind, out = code[i, 0], code[i, 1]
        if kind == LINEAR:
            x, rows, width, weight, form, scale, bias = code[i, 2:9]
            product = _vector(outer, out, rows)
            _record_product(
                _vector(outer, x, width), rows, width, weight, form, scale, bias, product, threads
            )
        elif kind == NORM:
            x, rows, width, packed = code[i, 2:6]
            shape, size = (rows, width), rows * width
            _norm(
                _vector(outer, x, size).reshape(shape),
                packed,
                _vector(outer, out, size).reshape(shape),
            )
        elif kind == ROTATE:
            x, heads, width, cos, sin, half = code[i, 2:8]
            shape, table, size = (1, heads, 1, width), (1, 1, 1, half), heads * width
            cosines, sines = (
                _vector(outer, cos, half).reshape(table),
                _vector(outer, sin, half).reshape(table),
            )
            _rotate(
                _vector(outer, x, size).reshape(shape),
                cosines,
                sines,
                _vector(outer, out, size).reshape(shape),
            )
        elif kind == WRITE:
            x, heads, length, width, mask = code[i, 2:7]
            _, places = _one_hot_rows(_vector(outer, mask, length).reshape(1, length, 1))
            state = _vector(outer, out, heads * length * width).reshape(1, heads, length, width)
            _write(state, places, _vector(outer, x, heads * width).reshape(1, heads, 1, width))
        elif kind == ATTEND:
            q, heads, width, key, value, mask, groups, length = code[i, 2:10]
            shape, size, columns = (
                (groups, length, width),
                groups * length * width,
                _vector(outer, mask, length),
            )
            keys, values = (
                _vector(outer, key, size).reshape(shape),
                _vector(outer, value, size).reshape(shape),
            )
            queries, result = (
                _vector(outer, q, heads * width).reshape(heads, width),
                _vector(outer, out, heads * width),
            )
            first, last = _visible(columns.reshape(1, length), np.float32(patterns.BLOCKED))
            _attend_kernel(
                queries, keys, values, columns, first, last, result.reshape(heads, width)
            )
            _pointwise(ROUND, result, result, result)
        else:
            x, size, y, others = code[i, 2:6]
            _pointwise(
                kind, _vector(outer, x, size), _vector(outer, y, others), _vector(outer, out, size)
            )
    return True


@njit(cache=True)
def _vector(outer, address, size):
    return carray(_floats(address if address >= 0 else outer[-1 - address]), (size,))


@njit(cache=True)
def _record_product(x, R, K, weight, form, scale, bias, out, threads):
    scales = carray(_floats(scale), (R,))
    if form == 1:
        _one(carray(_bytes(weight), (R, K)), scales, x, out, threads)
    elif form == 2:
        _one(carray(_halves(weight), (R, K)), scales, x, out, threads)
    else:
        codes = carray(_codes(weight), (R, K * 3 // 4 if form == LUT6 else K // 2))
        factors = carray(_halves(scale), (R * max(65, K // 32),))  # no fewer than there are
        _product(form, codes, factors, x.reshape(1, K), out.reshape(R, 1), threads)
    if bias:
        out += carray(_floats(bias), (R,))
    _pointwise(ROUND, out, out, out)


@njit(cache=True)
def _norm(x, packed, out):
    width = x.shape[1]
    head = carray(_floats(packed), (width + 6,))
    first, second, third = (
        np.int64(head[width + 3]),
        np.int64(head[width + 4]),
        np.int64(head[width + 5]),
    )
    lists = carray(_floats(packed), (width + 6 + first + second + third,))[width + 6 :]
    eps0, eps1, gains = lists[:first], lists[first : first + second], lists[first + second :]
    _rms_norm_kernel(x, head[:width], head[width : width + 3], eps0, eps1, gains, out)


@njit(cache=True)
def _pointwise(kind, a, b, out):
    if kind == ROUND:
        for i in range(len(a)):
            out[i] = _round16(a[i])
    elif kind == SILU:
        for i in range(len(a)):
            out[i] = _round16(a[i] / (np.float32(1) + _exp(-a[i])))
    elif len(b) == 1:
        for i in range(len(a)):
            out[i] = _round16(_record_binary(kind, a[i], b[0]))
    else:
        for i in range(len(a)):
            out[i] = _round16(_record_binary(kind, a[i], b[i]))


@njit(cache=True)
def _record_binary(kind, a, b):
    return a + b if kind == ADD else a - b if kind == SUB else a * b


def drop_stale_machine_code(folder: Path, kernels_file: Path) -> None:
    """Removes numba's indexes of this file's compiled functions in `folder` that are older than the
    kernels compiled into them: numba compares an index with the file of its function alone."""
    for index in folder.glob("bytecode.*.nbi"):
        if index.stat().st_mtime < kernels_file.stat().st_mtime:
            index.unlink(missing_ok=True)


for source in (kernels, packed):
    drop_stale_machine_code(Path(_run_bytecode._cache.cache_path), Path(source.__file__))
