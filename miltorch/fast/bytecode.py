"""A few tokens in a single compiled call: a `FastProgram`'s calls as instructions of a
small machine.

Between the large products a layer is some twenty small steps, which cost less to do
than to dispatch one by one. Registers are float32 tensors that hold values already
rounded to fp16, so an instruction means what the call it stands for means. A call that
only moves values is done here once, on the registers themselves: its result is a view
of its operand."""

import numpy as np
import torch

from miltorch.fast import kernels, machine, patterns
from miltorch.fast.linear import scratch_bytes
from miltorch.fast.products import Linear
from miltorch.fast.recorder import Recorder, need_instruction, shared
from miltorch.ops import OPERATIONS
from miltorch.ops.convolution import FEW_COLUMNS

PAIRS = {
    "add": machine.ADD,
    "sub": machine.SUB,
    "mul": machine.MUL,
    "real_div": machine.DIV,
    "maximum": machine.MAX,
    "minimum": machine.MIN,
    "equal": machine.EQUAL,
}
UNARY = {
    "cast": machine.COPY,
    "abs": machine.ABS,
    "relu": machine.RELU,
    "sqrt": machine.SQRT,
    "exp": machine.EXP,
    "tanh": machine.TANH,
    "sigmoid": machine.SIGMOID,
    "silu": machine.SILU,
}
GELUS = {"EXACT": machine.GELU, "TANH_APPROXIMATION": machine.GELU_TANH}
REDUCTIONS = {
    "reduce_sum": machine.SUM,
    "reduce_mean": machine.MEAN,
    "reduce_max": machine.LARGEST,
    "reduce_min": machine.SMALLEST,
}
VIEWS = {
    "reshape",
    "transpose",
    "expand_dims",
    "squeeze",
    "identity",
    "slice_by_index",
    "split",
}
EXACT = 2048  # integers up to here are fp16 values


class Bytecode(Recorder):
    """What `program` does for inputs of the shapes it was recorded with.

    Args:
        program: a `FastProgram`.
        values: its registers after a call of these shapes.

    Raises:
        NotCompiled: something in it has no instruction.
    """

    def __init__(self, program, values: list):
        super().__init__(program, values)
        self.masks: list = []  # (address, B, S, T, address of the places) of each write mask
        # of a write mask's register: the address of its places
        self.places: dict[int, int] = {}
        # shapes by name
        self.inputs = {n: values[i].shape for n, (i, _) in program.inputs.items()}
        self.states = {n: values[i].value.shape for n, i in program.states.items()}
        self.outputs = {n: values[i].shape for n, i in program.outputs.items()}
        # by register, stand for the arrays of a call: their memory is never touched
        self.sources, self.cells, targets = {}, {}, {}
        for register, _ in program.inputs.values():
            self.sources[register] = torch.empty(values[register].shape)
        for register in program.states.values():
            self.cells[register] = torch.empty(values[register].value.shape)
        for name, register in program.outputs.items():
            targets[name] = torch.empty(values[register].shape)
        stand_ins = *self.sources.values(), *self.cells.values(), *targets.values()
        for number, stand_in in enumerate(stand_ins):
            self.outer[stand_in.data_ptr()] = -1 - number
        for register, dtype in program.inputs.values():
            if dtype == torch.float16:
                self._copy(self.sources[register], self._new(register))
        for node in program.nodes:
            self._record(node)
        for name, register in program.outputs.items():
            need_instruction(values[register].dtype == torch.float16)
            self._copy(self._value(register), targets[name])
        self.code = np.array(self.code, np.int64).reshape(-1, machine.FIELDS)
        self.masks = np.array(self.masks, np.int64).reshape(-1, 5)
        self.scratch = torch.empty(self.width)
        del self.constants, self.values, self.wide, self.registers
        del self.cells, self.sources

    def run(
        self, inputs: dict[str, torch.Tensor], state: dict
    ) -> dict[str, torch.Tensor] | None:
        """As `FastProgram.run`; None, with nothing done, when a write mask is not
        one-hot or a state is laid out otherwise."""
        cells = [state[name].value for name in self.states]
        if not all(cell.is_contiguous() for cell in cells):
            return None
        operands = [inputs[name].float().contiguous() for name in self.inputs]
        outputs = {name: torch.empty(shape) for name, shape in self.outputs.items()}
        arrays = *operands, *cells, *outputs.values()
        outer = np.array([array.data_ptr() for array in arrays], np.int64)
        complete = kernels.on_threads(
            machine.execute,
            self.code,
            outer,
            self.masks,
            self.scratch.data_ptr(),
            self.width,
            torch.get_num_threads(),
        )
        if complete:
            return outputs
        return None

    def _record(self, node) -> None:
        function, inputs, outputs = node.function, node.inputs, node.outputs
        pattern, kind = getattr(function, "func", None), node.op.kind
        if isinstance(function, Linear):
            self._linear(function, self._value(inputs[0]), outputs)
        elif pattern is patterns._rms_norm:
            self._norm(*function.args, self._value(inputs[0]), self._new(outputs[0]))
        elif function is kernels.rotate:
            self._rotate(*map(self._value, inputs), self._new(outputs[0]))
        elif function is patterns._write_positions:
            self._write_mask(inputs[0])
        elif pattern is patterns._write_rows:
            self._write_rows(*function.args, *inputs)
        elif function is patterns._attend_visible:
            self._attend(*inputs[:4], outputs[0])
        elif kind in VIEWS:
            self._view(function, inputs, outputs)
        elif function is not patterns._span and not self._known(node):
            need_instruction(len(outputs) == 1)
            self._operation(kind, node.attributes, inputs, outputs[0])

    def _known(self, node) -> bool:
        """Whether a call computes from shapes alone what the recorded call has
        shown."""
        kind = node.op.kind
        if kind != "shape":
            fixed = node.inputs and all(map(self._fixed, node.inputs))
            if not fixed or kind.startswith("random"):
                return False
        self.known.update(node.outputs)
        return True

    def _operation(
        self, kind: str, attributes: dict, inputs: list[int], out: int
    ) -> None:
        if kind == "read_state":
            return self._copy(self.cells[inputs[0]], self._new(out))
        if kind == "write_state":
            return self._copy(self._value(inputs[1]), self.cells[inputs[0]])
        values = [self._value(i) for i in inputs]
        operands = {self.values[i].dtype for i in inputs}
        dtype = {"equal": torch.bool}.get(kind, torch.float16)
        result = self._new(out, dtype, kind)
        need_instruction(operands == {torch.float16} or kind in ("equal", "cast"))
        x, *others = values
        if kind in PAIRS:
            self._strided(PAIRS[kind], result, x, *(others or [x]))
        elif kind in UNARY:
            self._strided(UNARY[kind], result, x)
        elif kind == "gelu":
            self._strided(GELUS[attributes.get("mode", "EXACT")], result, x)
        elif kind == "rsqrt":
            eps = torch.tensor(attributes.get("epsilon", 1e-12))
            self._strided(machine.RSQRT, result, x, self._keep(eps))
        elif kind == "clip":
            low = self._keep(torch.tensor(attributes["alpha"]))
            high = self._keep(torch.tensor(attributes["beta"]))
            clipped = self._keep(torch.empty(x.shape))
            self._strided(machine.MAX, clipped, x, low)
            self._strided(machine.MIN, result, clipped, high)
        elif kind in REDUCTIONS or kind == "reduce_argmax":
            self._reduce(kind, attributes, result, x)
        else:
            self._placed_operation(kind, attributes, result, values)

    def _placed_operation(
        self,
        kind: str,
        attributes: dict,
        result: torch.Tensor,
        values: list[torch.Tensor],
    ) -> None:
        """An operation whose elements depend on others than those of the same place."""
        x, *others = values
        if kind == "softmax":
            axis = attributes.get("axis", -1)
            self._rows(machine.SOFTMAX, result.movedim(axis, -1), x.movedim(axis, -1))
        elif kind == "concat":
            need_instruction(not attributes.get("interleave", False))
            axis = attributes["axis"]
            parts = result.split([value.shape[axis] for value in values], axis)
            for value, part in zip(values, parts, strict=True):
                self._strided(machine.COPY, part, value)
        elif kind == "slice_update":
            need_instruction(len(others) == 1)
            part = OPERATIONS["slice_by_index"].function(result, **attributes)
            need_instruction(shared(part, result))
            self._copy(x, result)
            self._copy(others[0], part)
        elif kind == "matmul":
            (columns,) = others
            if attributes.get("transpose_x", False):
                x = x.transpose(-1, -2)
            if not attributes.get("transpose_y", False):
                columns = columns.transpose(-1, -2)
            self._products(result, x.unsqueeze(-2), columns.unsqueeze(-3))
        else:
            need_instruction(kind == "conv")
            self._convolution(attributes, result, *values)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        need_instruction(source.shape == target.shape)
        self._strided(machine.COPY, target, source)

    def _view(self, function, inputs: list[int], outputs: list[int]) -> None:
        """A call that only moves values, as views of its operand, which is made dense
        first where there is none."""
        x, others = self._value(inputs[0]), [self.values[i] for i in inputs[1:]]
        need_instruction(all(map(self._fixed, inputs[1:])))
        for source in (x, self._dense(x)):
            views = function(source, *others)
            if isinstance(views, torch.Tensor):
                views = [views]
            if all(shared(view, source) for view in views):
                break
        for view, register in zip(views, outputs, strict=False):
            need_instruction(shared(view, source))
            need_instruction(view.shape == self.values[register].shape)
            self.registers[register] = view

    def _linear(self, linear: Linear, x: torch.Tensor, outputs: list[int]) -> None:
        (R, K), (weight, scale) = linear.weight.shape, linear.arrays
        widths = linear.widths or [R]
        x = self._flat(x, 2)
        B, _, T = x.shape
        need_instruction(x.shape[1] == K and sum(widths) == R and B * T < FEW_COLUMNS)
        bias = 0
        if linear.bias is not None:
            need_instruction(linear.bias.numel() == R)
            bias = self._keep(linear.bias.float()).data_ptr()
        shape = self.values[outputs[0]].shape
        memory = scratch_bytes(linear.form, B * T, K)
        self.width = max(self.width, -(-memory // 4))
        out = self._keep(torch.empty(B, R, T))
        strides = 4 * np.array(x.stride())
        places = out.data_ptr(), x.data_ptr(), *strides.tolist()
        table = 0
        if linear.table is not None:
            table = linear.table.ctypes.data
        stored = weight.ctypes.data, linear.form, scale.ctypes.data, table, bias
        self._add(machine.LINEAR, *places, B, K, T, R, *stored)
        for register, part in zip(outputs, out.split(widths, 1), strict=True):
            self.registers[register] = part.view(B, -1, *shape[2:])

    def _norm(
        self, axis: int, constants: list, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        weight, bounds, *lists = constants
        need_instruction(x.shape[axis] == len(weight))
        lengths = list(map(len, lists))
        packed = np.concatenate([weight, bounds, lengths, *lists])
        packed = self._keep(torch.from_numpy(packed.astype(np.float32)))
        self._rows(machine.NORM, out.movedim(axis, -1), x.movedim(axis, -1), packed[:1])

    def _rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        half = cos.shape[-1]
        need_instruction(cos.shape == sin.shape and 2 * half <= x.shape[-1])
        shape = *x.shape[:3], half
        tables = cos.expand(shape), sin.expand(shape)
        self._rows(machine.ROTATE, out, x, *tables, number=half)

    def _write_mask(self, register: int) -> None:
        mask = self.values[register]
        B, _, S, T = mask.shape
        need_instruction(mask.shape[1] == 1 and register not in self.places)
        places = self._keep(torch.empty(B, T, dtype=torch.int64)).data_ptr()
        self.places[register] = places
        self.masks.append((self._address(self.sources[register]), B, S, T, places))

    def _write_rows(self, transposed: bool, cell: int, mask: int, _, rows: int) -> None:
        state, rows = self.cells[cell], self._value(rows)
        if transposed:
            rows = rows.transpose(-1, -2)
        rows = self._dense(rows)
        B, H, S, D = state.shape
        T = rows.shape[2]
        need_instruction(rows.shape == (B, H, T, D))
        need_instruction(self.values[mask].shape == (B, 1, S, T))
        places = self._address(state), rows.data_ptr(), self.places[mask]
        self._add(machine.WRITE, *places, B, H, S, T, D)

    def _attend(self, q: int, key: int, value: int, mask: int, out: int) -> None:
        q, mask = self._value(q), self._value(mask)
        keys, values = self.cells[key], self.cells[value]
        B, groups, S, D = keys.shape
        N, T = q.shape[2], mask.shape[2]
        need_instruction(values.shape == keys.shape)
        need_instruction(mask.shape == (B, 1, T, S))
        need_instruction(q.shape == (B, groups, N, D))
        need_instruction(N % T == 0 and B * T < FEW_COLUMNS)
        q, mask, result = self._dense(q), self._dense(mask), self._new(out)
        tensors = result, q, keys, values, mask
        places = map(self._address, tensors)
        self._add(machine.ATTEND, *places, B, groups, N, D, T, S)

    def _reduce(
        self, kind: str, attributes: dict, out: torch.Tensor, x: torch.Tensor
    ) -> None:
        every = range(x.dim())
        axes = attributes.get("axes")
        if kind == "reduce_argmax":
            axes = [attributes.get("axis", -1)]
        elif axes is None:
            axes = every
        axes = [axis % x.dim() for axis in axes]
        rest = [axis for axis in every if axis not in axes]
        rows = self._flat(x.permute(*rest, *axes), len(rest))
        need_instruction(kind in REDUCTIONS or rows.shape[-1] <= EXACT)
        out = out.view(rows.shape[:-1])[..., None]
        self._rows(REDUCTIONS.get(kind, machine.WHICH), out.expand(rows.shape), rows)

    def _products(self, out, x, y, bias=None) -> None:
        """out [..., M, N] from x [..., M, 1, K] and y [..., 1, N, K], and a bias that
        spreads over out."""
        K = x.shape[-1]
        if bias is None:
            if K == 1:
                self._strided(machine.MUL, out, x[..., 0], y[..., 0])
                return
            bias = self._keep(torch.zeros(()))
        shape = *out.shape, K
        bias = bias.expand(out.shape)[..., None].expand(shape)
        out = out[..., None].expand(shape)
        self._rows(machine.DOT, out, x.expand(shape), y.expand(shape), bias)

    def _convolution(self, attributes: dict, out, x, weight, bias=None) -> None:
        """A convolution without padding as the products of its windows [B, groups,
        places, K] with its weights."""
        need_instruction(attributes.get("pad_type", "valid") in ("valid", "custom"))
        need_instruction(not any(attributes.get("pad", [])))
        taps, groups = weight.shape[2:], attributes.get("groups", 1)
        strides = attributes.get("strides", [1] * len(taps))
        dilations = attributes.get("dilations", [1] * len(taps))
        windows = x
        steps = zip(taps, strides, dilations, strict=True)
        for axis, (size, stride, dilation) in enumerate(steps, 2):
            reach = (size - 1) * dilation + 1
            windows = windows.unfold(axis, reach, stride)[..., ::dilation]
        spatial = windows.shape[2 : 2 + len(taps)]
        windows = windows.unflatten(1, (groups, -1)).movedim(2, 2 + len(taps))
        places = range(2, 2 + len(taps))
        flat = windows.flatten(2 + len(taps)).flatten(places[0], places[-1])
        if not shared(flat, windows):
            flat = self._dense(windows).flatten(2 + len(taps))
            flat = flat.flatten(places[0], places[-1])
        rows = weight.reshape(groups, -1, 1, weight[0].numel())
        out = out.view(len(x), groups, -1, spatial.numel())
        if bias is not None:
            bias = bias.view(groups, -1, 1)
        self._products(out, rows, flat.unsqueeze(2), bias)
