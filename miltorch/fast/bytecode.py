"""One token of one sequence in a single compiled call: a `FastProgram`'s calls as instructions of a small machine.

At T = 1 and B = 1 every value is a vector, whatever its axes are called, and moving axes of size 1 moves nothing. Between
the large products a layer is then some twenty small steps, which cost less to do than to dispatch one by one. Registers
are float32 arrays that hold values already rounded to fp16, so an instruction means what the call it stands for means.
"""

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

from miltorch.fast import kernels, patterns
from miltorch.fast.kernels import _attend_kernel, _exp, _one, _one_hot_rows, _rms_norm_kernel, _rotate, _round16, _visible, _write

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
        Untaped: something in it is more than one token, or has no instruction.
    """

    def __init__(self, program, values: list):
        self.known, self.values, self.kept, self.places, self.code = program.values, values, [], {}, []
        self.names = [[name for name, *_ in each] for each in (program.inputs, program.states, program.outputs)]
        self.outer = [register for _, register, *_ in (*program.inputs, *program.states, *program.outputs)]
        self.masks, self.shapes = [], [tuple(values[register].shape) for _, register in program.outputs]
        for i, (_, register, dtype) in enumerate(program.inputs):
            if dtype == torch.float16:
                self._emit(ROUND, register, -1 - i, self._size(register))
        for node in program.nodes:
            self._record(node)
        _need(all(values[register].dtype == torch.float16 for _, register in program.outputs))
        first = len(program.inputs) + len(program.states)
        for i, (_, register) in enumerate(program.outputs):
            self._add(ROUND, -1 - first - i, self._place(register), self._size(register))
        self.code = np.array(self.code, np.int64)
        self.masks = np.array(self.masks, np.int64).reshape(-1, 2)
        del self.known, self.values

    def run(self, inputs: dict[str, torch.Tensor], state: dict) -> dict[str, torch.Tensor] | None:
        """As `FastProgram.run`; None, with nothing done, when a write mask is not one-hot or a state is laid out otherwise."""
        made = [torch.empty(shape) for shape in self.shapes]
        wanted, held, promised = self.names
        given, cells = [inputs[name].float().contiguous() for name in wanted], [state[name].value for name in held]
        if not all(cell.is_contiguous() for cell in cells):
            return None
        tensors = [*given, *cells, *made]
        outer = np.array([t.data_ptr() for t in tensors], np.int64)
        done = kernels.on_threads(_run_bytecode, self.code, outer, self.masks, torch.get_num_threads() > 1)
        return dict(zip(promised, made, strict=True)) if done else None

    def _record(self, node) -> None:
        function, part = node.function, getattr(node.function, "func", None)
        inputs, outputs, kind = node.inputs, node.outputs, node.op.kind
        if isinstance(function, patterns.Linear):
            self._linear(function, inputs[0], outputs)
        elif part is patterns._rms_norm:
            self._norm(*function.args, inputs[0], outputs[0])
        elif function is kernels.rotate:
            x, cos, sin = inputs
            _, H, T, D = self.values[x].shape
            _need(T == 1 and self.values[x].shape[0] == 1 and self._size(cos) == self._size(sin) <= D // 2)
            self._emit(ROTATE, outputs[0], self._place(x), H, D, self._place(cos), self._place(sin), self._size(cos))
        elif function in (patterns._write_positions, patterns._span):
            _need(self.values[inputs[0]].shape[0] == self.values[inputs[0]].shape[1] == 1)
            if function is patterns._write_positions:
                _need(self.values[inputs[0]].shape[3] == 1)
                self.masks.append((self._outer(inputs[0]), self._size(inputs[0])))
        elif part is patterns._write_rows:
            cell, mask, _, rows = inputs
            B, H, S, D = self.values[cell].value.shape
            _need(B == 1 and self._size(rows) == H * D and self._size(mask) == S)
            self._add(WRITE, self._outer(cell), self._place(rows), H, S, D, self._place(mask))
        elif function is patterns._attend_visible:
            q, key, value, mask, _ = inputs
            (B, H_kv, S, D), H = self.values[key].value.shape, self._size(q) // self.values[q].shape[-1]
            _need(B == 1 and self.values[mask].shape[2] == 1 and self._size(mask) == S and H % H_kv == 0)
            _need(self.values[value].value.shape == (B, H_kv, S, D) and self.values[q].shape[-1] == D)
            self._emit(ATTEND, outputs[0], self._place(q), H, D, self._outer(key), self._outer(value), self._place(mask), H_kv, S)
        elif kind in POINTWISE:
            sizes = [self._size(register) for register in inputs]
            first, last = inputs[0], inputs[-1]
            _need(sizes[0] == self._size(outputs[0]) and sizes[-1] in (1, sizes[0]) and len(inputs) <= 2)
            _need(self.values[outputs[0]].dtype == torch.float16 and all(self.values[i].is_floating_point() for i in inputs))
            _need(sizes[-1] == 1 or _axes(self.values[first]) == _axes(self.values[last]))
            self._emit(POINTWISE[kind], outputs[0], self._place(first), sizes[0], 0, self._place(last), sizes[-1])
        else:
            _need(kind in VIEW_OPS and len(outputs) == 1 and self._size(inputs[0]) == self._size(outputs[0]))
            _need(self.values[inputs[0]].dtype == self.values[outputs[0]].dtype)
            _need(kind != "transpose" or _axes(self.values[inputs[0]]) == _axes(self.values[outputs[0]]))
            self.places[outputs[0]] = self._place(inputs[0])

    def _linear(self, linear: patterns.Linear, x: int, outputs: list[int]) -> None:
        R, K = linear.weight.shape
        _need(self._size(x) == K and sum(linear.widths or [R]) == R == len(linear.scale))
        _need(linear.bias is None or linear.bias.numel() == R)
        bias = 0 if linear.bias is None else self._keep(linear.bias.float().numpy())
        place = self._keep(np.empty(R, np.float32))
        for register, width in zip(outputs, linear.widths or [R], strict=True):
            self.places[register] = place
            place += 4 * width
        self._add(LINEAR, self.places[outputs[0]], self._place(x), R, K, linear.weight.ctypes.data, linear.weight.itemsize,
                  linear.scale.ctypes.data, bias)  # fmt: skip

    def _norm(self, axis: int, constants: tuple, x: int, out: int) -> None:
        shape = self.values[x].shape
        _need(shape[axis + 1 :].numel() == 1 or axis == -1)
        weight, bounds, *lists = constants
        _need(shape[axis] == len(weight))
        sizes = np.array([len(one) for one in lists], np.float32)
        packed = np.concatenate([weight, bounds, sizes, *lists])
        self._emit(NORM, out, self._place(x), self._size(x) // len(weight), len(weight), self._keep(packed))

    def _size(self, register: int) -> int:
        return self.values[register].numel()

    def _keep(self, array: np.ndarray) -> int:
        """The address of a float32 array that lives as long as the tape."""
        self.kept.append(np.ascontiguousarray(array, np.float32))
        return self.kept[-1].ctypes.data

    def _place(self, register: int) -> int:
        """The address of a register; one that nothing made is a constant."""
        if register not in self.places:
            _need(isinstance(self.known[register], torch.Tensor))
            self.places[register] = self._keep(self.values[register].float().numpy())
        return self.places[register]

    def _outer(self, register: int) -> int:
        """How an instruction names what every call brings along: an input, a state, an output."""
        return -1 - self.outer.index(register)

    def _emit(self, op: int, out: int, *fields: int) -> None:
        self.places[out] = self._keep(np.empty(self._size(out), np.float32))
        self._add(op, self.places[out], *fields)

    def _add(self, *fields: int) -> None:
        self.code.append([*fields, *[0] * (FIELDS - len(fields))])


def _need(holds: bool) -> None:
    if not holds:
        raise NotCompiled


def _axes(value: torch.Tensor) -> list[int]:
    """Sizes that order the elements: those of more than one."""
    return [n for n in value.shape if n > 1]


def _pointer(kind):
    @intrinsic
    def convert(typing, address):
        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), build

    return convert


_floats, _bytes, _halves = (_pointer(kind) for kind in (types.float32, types.int8, types.uint16))


@njit(cache=True)
def _run_bytecode(code, outer, masks, threads):
    """Executes instructions [n, FIELDS]: kind, address of the result, then operands and sizes; a negative address names
    an element of `outer`. False, with nothing done, unless every one of `masks` (place, size) holds one 1 or nothing."""
    for i in range(len(masks)):
        if not _one_hot_rows(_vector(outer, masks[i, 0], masks[i, 1]).reshape(1, masks[i, 1], 1))[0]:
            return False
    for i in range(len(code)):
        kind, out, a, n, m, b, c, d, e, f = code[i]
        if kind == LINEAR:
            _record_product(_vector(outer, a, m), n, m, b, c, d, e, _vector(outer, out, n), threads)
        elif kind == NORM:
            _norm(_vector(outer, a, n * m).reshape(n, m), b, _vector(outer, out, n * m).reshape(n, m))
        elif kind == ROTATE:
            shape = (1, n, 1, m)
            cos, sin = _vector(outer, b, d).reshape(1, 1, 1, d), _vector(outer, c, d).reshape(1, 1, 1, d)
            _rotate(_vector(outer, a, n * m).reshape(shape), cos, sin, _vector(outer, out, n * m).reshape(shape))
        elif kind == WRITE:
            _, slots = _one_hot_rows(_vector(outer, c, m).reshape(1, m, 1))
            _write(_vector(outer, out, n * m * b).reshape(1, n, m, b), slots, _vector(outer, a, n * b).reshape(1, n, 1, b))
        elif kind == ATTEND:
            key, value = _vector(outer, b, e * f * m).reshape(e, f, m), _vector(outer, c, e * f * m).reshape(e, f, m)
            mask, made = _vector(outer, d, f), _vector(outer, out, n * m)
            first, last = _visible(mask.reshape(1, f), np.float32(patterns.BLOCKED))
            _attend_kernel(_vector(outer, a, n * m).reshape(n, m), key, value, mask, first, last, made.reshape(n, m))
            _pointwise(ROUND, made, made, made)
        else:
            _pointwise(kind, _vector(outer, a, n), _vector(outer, b, c), _vector(outer, out, n))
    return True


@njit(cache=True)
def _vector(outer, address, size):
    return carray(_floats(address if address >= 0 else outer[-1 - address]), (size,))


@njit(cache=True)
def _record_product(x, R, K, weight, itemsize, scale, bias, out, threads):
    scales = carray(_floats(scale), (R,))
    if itemsize == 1:
        _one(carray(_bytes(weight), (R, K)), scales, x, out, threads)
    else:
        _one(carray(_halves(weight), (R, K)), scales, x, out, threads)
    if bias:
        out += carray(_floats(bias), (R,))
    _pointwise(ROUND, out, out, out)


@njit(cache=True)
def _norm(x, packed, out):
    width = x.shape[1]
    head = carray(_floats(packed), (width + 6,))
    first, second, third = np.int64(head[width + 3]), np.int64(head[width + 4]), np.int64(head[width + 5])
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
