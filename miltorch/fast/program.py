"""The decode path: a `Program` as one straight list of calls on fp16 tensors, weights
left as they are stored.

Means the same as the literal graph in `declared`, and differs from it only in the order
of float32 sums: an operation that torch's fp16 kernels compute in float32 and round
once runs on fp16 directly, any other by its rule in float32. What makes it fast
replaces patterns of operations; an operation outside of every pattern runs literally:

    linear     1×1 convolutions of one input read their stored weights once, as one product
    cache row  k·(1 − Σ mask) + mask @ rows writes rows in place where the mask is one-hot or empty
    rms_norm, rotation   a norm's dozen operations in one pass, a rotary embedding's nine
    attention  columns that the mask blocks for every query, at both ends, are left out

Gates run the literal graph: it sees NaN and leaks in rows that attention here does not
touch."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from miltorch.errors import InputError
from miltorch.fast.bytecode import Bytecode
from miltorch.fast.matching import PatternGraph, need, tried
from miltorch.fast.patterns import PATTERNS
from miltorch.fast.products import Linear, in_large_pages, together
from miltorch.interpret import (
    _INTEGER,
    Body,
    Builder,
    Executable,
    Step,
    _python_value,
    failure,
    read_names,
)
from miltorch.ops import OPERATIONS, TUPLES
from miltorch.ops.state import StateCell
from miltorch.program import Op, Program, read

# torch computes these on fp16 in float32 and rounds the result once, or only moves or
# picks values
DIRECT = frozenset(
    """add sub mul real_div maximum minimum abs relu sqrt exp sin cos sigmoid silu tanh softmax clip
    reduce_max reduce_min reshape transpose concat split squeeze expand_dims stack slice_by_index
    select identity cast
    tile gather greater less greater_equal less_equal equal""".split()
)
# fp16 in, something else out
RETYPING = frozenset("cast greater less greater_equal less_equal equal".split())
LARGE = 1 << 16  # elements of a constant whose values an outline leaves out


@dataclass
class Node:
    """One call: registers in, registers out. A register of a list-valued parameter is a
    tuple of registers."""

    op: Op
    function: Callable
    inputs: list[int]
    outputs: list[int]
    # of an operation that runs by its rule
    attributes: dict = field(default_factory=dict)


def ready(
    program: Program, literal: Callable[[], Executable] | None = None
) -> "FastProgram | None":
    """`program` compiled for decoding; None where only the literal graph can run or
    refuse it."""
    return tried(FastProgram, program, literal)


class FastProgram:
    """A flat program compiled for decoding. Stateless, as `Executable`; state cells are
    advanced in place.

    The literal reader validates every program first, and every combination of shapes at
    its first call: an `Outline` walks the literal graph, and the call itself is tried
    on copies of the states. Where either raises, or where outputs and states have other
    shapes than the literal graph gives them, calls of these shapes run literally from
    then on.

    Args:
        literal: gives the literal program (default: reads the package again).

    Raises:
        Exception: of any type, for what is not flat or what the literal reader refuses;
            see `ready`.
    """

    def __init__(
        self, program: Program, literal: Callable[[], Executable] | None = None
    ):
        # the operations and their weights may be freed
        self.program = replace(program, block=None)
        self.literal = literal or (
            lambda: Executable(read(program.package, program.function))
        )
        self.registers: dict[str, int] = {}
        # what each register holds before a call: its constant, or None
        self.values: list[object] = []
        self.graph = PatternGraph(program, PATTERNS)
        nodes = []
        for op in self.graph.live():
            nodes += self._nodes(op)
        self.nodes = _joined(nodes)
        functions = [node.function for node in self.nodes]
        in_large_pages([each for each in functions if isinstance(each, Linear)])
        self.inputs = {}
        for name, declared in program.inputs.items():
            self.inputs[name] = self._register(name), _torch_dtype(declared)
        self.states = self._registers(program.states)
        self.outputs = self._registers(program.outputs)
        self.outline = Executable(program, builder=partial(Outline, self.graph))
        constants = self.outline.body.constants
        for name in constants.keys() - set(read_names(self.outline.body)):
            del constants[name]
        self.outline.program = self.program
        # by the shapes of inputs, decided by their first call: a bytecode, None for
        # call by call, or the literal graph
        self.bytecodes: dict[tuple, Bytecode | Executable | None] = {}
        # constants in float32, as all bytecodes read them
        self.wide: dict[int, torch.Tensor] = {}
        del self.graph

    def run(
        self, inputs: dict[str, torch.Tensor], state: dict[str, StateCell]
    ) -> dict[str, torch.Tensor]:
        """As `Executable.run` in `declared`, without a hook."""
        try:
            shapes = tuple([inputs[name].shape for name in self.inputs])
            for name, declared in self.program.states.items():
                cell = state[name].value
                if cell.shape != declared.shape or cell.dtype is not torch.float32:
                    return self.literal().run(inputs, state)
        except KeyError:  # something is missing: refused
            self.outline.operands(inputs, state)
        if shapes not in self.bytecodes:
            return self._first(inputs, state, shapes)
        bytecode = self.bytecodes.get(shapes)
        if bytecode is not None:
            outputs = bytecode.run(inputs, state)
            if outputs is not None:
                return outputs
        return self._run(inputs, state)[0]

    @torch.inference_mode()
    def _first(self, inputs: dict, state: dict, shapes: tuple) -> dict:
        """The first call of some shapes, which decides how the others run."""
        # refuses other shapes than the program declares
        self.outline.operands(inputs, state)
        before = {name: state[name].value for name in self.states}
        first = tried(self._alike, inputs, before)
        if first is None:
            self.bytecodes[shapes] = self.literal()
            return self.bytecodes[shapes].run(inputs, state)
        outputs, values, cells = first
        for name, cell in cells.items():
            state[name].value = cell.value
        self.bytecodes[shapes] = tried(Bytecode, self, values)
        return outputs

    def _alike(self, inputs: dict, before: dict) -> tuple[dict, list, dict]:
        """Outputs, registers and cells after a call on copies of the states `before`,
        shaped as the literal graph's are."""
        outline = self.outline.run(
            inputs, {name: StateCell(value) for name, value in before.items()}
        )
        cells = {name: StateCell(value.clone()) for name, value in before.items()}
        outputs, values = self._run(inputs, cells)
        need(outputs.keys() == outline.keys())
        for name, value in outline.items():
            need(outputs[name].shape == value.shape)
            need(outputs[name].dtype == value.dtype)
        for name, value in before.items():
            cell = cells[name].value
            need(cell.shape == value.shape)
            need(cell.dtype == value.dtype == torch.float32)
        return outputs, values, cells

    @torch.inference_mode()
    def _run(self, inputs: dict, state: dict) -> tuple[dict, list]:
        """Outputs of a call, and what every register held after it."""
        values = list(self.values)
        for name, (register, dtype) in self.inputs.items():
            values[register] = inputs[name].to(dtype)
        for name, register in self.states.items():
            values[register] = state[name]
        node = None
        try:
            for node in self.nodes:
                result = node.function(*[values[i] for i in node.inputs])
                if len(node.outputs) == 1:
                    result = (result,)
                for register, value in zip(node.outputs, result, strict=False):
                    values[register] = value
        except InputError:
            raise
        except Exception as problem:
            raise failure(self.program, node.op, problem) from problem
        outputs = {}
        for name, register in self.outputs.items():
            outputs[name] = _widened(values[register])
        return outputs, values

    def _register(self, name: str, value=None) -> int:
        if name not in self.registers:
            self.registers[name] = len(self.values)
            self.values.append(value)
        return self.registers[name]

    def _registers(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self._register(name) for name in names}

    def _nodes(self, op: Op) -> list[Node]:
        if op.key not in self.graph.special:
            return [self._literal(op)]
        outputs = [self._register(name) for name, _ in op.outputs]
        nodes = []
        for function, names, result in self.graph.special[op.key]:
            if result in self.registers:
                continue
            node = Node(op, function, list(map(self._register, names)), outputs)
            if result:
                node.outputs = [self._register(result)]
            nodes.append(node)
        return nodes

    def _literal(self, op: Op) -> Node:
        """The operation by its rule: constant attributes bound, arrays in registers,
        results in their declared dtype."""
        rule, graph = OPERATIONS[op.kind], self.graph
        attributes, parameters, registers, lists = {}, [], [], {}
        signature = inspect.signature(rule.function).parameters
        positional = [p for p in signature if p not in rule.attributes]
        for parameter in sorted(op.inputs, key=lambda p: (positional + [p]).index(p)):
            source = op.inputs[parameter]
            if parameter in rule.attributes and graph.constant(source) is not None:
                attributes[parameter] = _python_value(graph.constant(source))
                continue
            sources = _listed(source)
            if isinstance(source, list) or parameter in TUPLES:
                lists[parameter] = len(sources)
            parameters.append(parameter)
            for i, each in enumerate(sources):
                registers.append(self._source(each, f"{op.name}.{parameter}.{i}"))
        function = rule.function
        if attributes:
            function = partial(function, **attributes)
        if lists or parameters != positional[: len(parameters)]:
            function = _call_by_name(function, parameters, lists, rule.attributes)
        plain = op.kind in DIRECT - RETYPING and len(op.outputs) == 1
        if not plain or any(graph.dtype(n) != "FLOAT16" for n in _names(op)):
            function = _typed(function, op, wide=op.kind not in DIRECT)
        outputs = [self._register(name) for name, _ in op.outputs]
        if not outputs:
            outputs = [self._register(f"{op.name}.")]
        return Node(op, function, registers, outputs, attributes)

    def _source(self, source, where: str) -> int:
        """The register of an operand; a literal in the operation is named `where`."""
        name = getattr(source, "name", where)
        return self._register(name, _to_half(self.graph.constant(source)))


class Outline(Builder):
    """Builds a literal program that computes the shapes of every operation's results,
    but not their values.

    Products that a `Linear` stands for give zeros, and constants that are large or
    compressed are zeros that take no memory, where the decode path has read them
    itself: an outline costs neither the weights' memory nor their products' time."""

    def __init__(self, graph: PatternGraph, executable: Executable):
        super().__init__(executable)
        self.graph = graph

    def _add(self, op: Op, scope: dict, body: Body) -> None:
        zeros = self._zeros(op)
        if zeros is None:
            super()._add(op, scope, body)
        else:
            scope[op.key] = body.constants[op.key] = zeros

    def _zeros(self, op: Op) -> torch.Tensor | None:
        """Zeros in place of a float constant, or None."""
        value = op.inputs.get("val")
        if op.kind == "const" and isinstance(value, np.ndarray):
            if value.dtype.kind == "f" and value.size > LARGE:
                return torch.zeros(()).expand(value.shape)
        shape = self.graph.dense.get(op.key, torch.Size())
        if [declared.shape for _, declared in op.outputs] != [shape]:
            return None
        if shape.numel() <= 1:
            return None
        return torch.zeros(()).expand(shape)

    def _step(self, op: Op, scope: dict, body: Body) -> Step:
        step = super()._step(op, scope, body)
        for function, *_ in self.graph.special.get(op.key, ()):
            if isinstance(function, Linear):
                step.function = partial(_outline, step.function)
        return step


def _outline(conv: Callable, x, weight, bias=None, **attributes):
    """Zeros of the shape that a 1×1 convolution gives, from one of its columns."""
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{x.shape[1]} channels for a weight of shape {list(weight.shape)}"
        )
    return conv(x[:, :1], x.new_zeros(1, 1, 1, 1), **attributes).expand(
        -1, len(weight), -1, -1
    )


def _joined(nodes: list[Node]) -> list[Node]:
    """Products with one input become one node, where the first of them stood."""
    groups: dict[tuple, list[Node]] = {}
    joined = []
    for node in nodes:
        group = [node]
        if isinstance(node.function, Linear):
            key = node.inputs[0], node.function.form, node.function.bias is None
            group = groups.setdefault(key, [])
            group.append(node)
        if group[0] is node:
            joined.append(node)
    for first, *others in groups.values():
        linears = [node.function for node in (first, *others)]
        first.function = together(linears)
        for node in others:
            first.outputs = first.outputs + node.outputs
    return joined


def _listed(source) -> list:
    if isinstance(source, list):
        return source
    return [source]


def _names(op: Op) -> list[str]:
    """Every value that an operation reads as an array or makes; "" for a literal."""
    names = [name for name, _ in op.outputs]
    for parameter, source in op.inputs.items():
        if parameter not in OPERATIONS[op.kind].attributes:
            names += [getattr(each, "name", "") for each in _listed(source)]
    return names


def _torch_dtype(declared) -> torch.dtype:
    if declared.dtype == "FLOAT16":
        return torch.float16
    return _INTEGER.get(declared.dtype, torch.float32)


def _to_half(value):
    """A float32 literal as fp16 where fp16 can represent it; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        half = value.half()
        if torch.equal(half.float(), value):
            return half
    return value


def _widened(value):
    """An fp16 tensor as float32; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
        return value.float()
    return value


def _call_by_name(function, parameters, lists, attributes):
    """Calls by name: for lists of values, attributes that are computed, and absent
    parameters."""
    if list(lists) == parameters and len(parameters) == 1:
        return lambda *values: function(values)

    def call(*values):
        rest, arguments = iter(values), {}
        for parameter in parameters:
            if parameter in lists:
                value = list(islice(rest, lists[parameter]))
            else:
                value = next(rest)
            if parameter in attributes:
                value = _python_value(value)
            arguments[parameter] = value
        return function(**arguments)

    return call


def _typed(function, op: Op, wide: bool):
    """Brings results to their declared dtype; `wide` operations see float32."""
    dtypes = [_torch_dtype(t) for _, t in op.outputs]
    many = len(dtypes) != 1

    def call(*values):
        if wide:
            values = map(_widened, values)
        result = function(*values)
        if many:
            return [v.to(d) for v, d in zip(result or (), dtypes, strict=False)]
        if isinstance(result, (tuple, list)):
            result = result[0]
        return result.to(dtypes[0])

    return call
