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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

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
from miltorch.program import Op, Program, Ref, read

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
        self.nodes = _joined(
            [node for op in self.graph.live() for node in self._nodes(op)]
        )
        in_large_pages(
            [n.function for n in self.nodes if isinstance(n.function, Linear)]
        )
        self.inputs = {
            name: (self._register(name), _torch_dtype(t))
            for name, t in program.inputs.items()
        }
        self.states, self.outputs = (
            {n: self._register(n) for n in names}
            for names in (program.states, program.outputs)
        )
        self.outline = Executable(program, builder=partial(Outline, self.graph))
        reads, body = set(read_names(self.outline.body)), self.outline.body
        body.constants = {
            name: value for name, value in body.constants.items() if name in reads
        }
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
        outputs = bytecode.run(inputs, state) if bytecode else None
        return self._run(inputs, state)[0] if outputs is None else outputs

    @torch.inference_mode()
    def _first(self, inputs: dict, state: dict, shapes: tuple) -> dict:
        """The first call of some shapes, which decides how the others run."""
        # refuses other shapes than the program declares
        self.outline.operands(inputs, state)
        first = tried(
            self._alike, inputs, {name: state[name].value for name in self.states}
        )
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
        need(
            all(
                outputs[name].shape == value.shape
                and outputs[name].dtype == value.dtype
                for name, value in outline.items()
            )
        )
        for name, value in before.items():
            need(
                cells[name].value.shape == value.shape
                and cells[name].value.dtype == value.dtype == torch.float32
            )
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
                results = (result,) if len(node.outputs) == 1 else result
                for register, value in zip(node.outputs, results, strict=False):
                    values[register] = value
        except InputError:
            raise
        except Exception as problem:
            raise failure(self.program, node.op, problem) from problem
        outputs = {name: values[register] for name, register in self.outputs.items()}
        return {
            name: value.float() if value.dtype == torch.float16 else value
            for name, value in outputs.items()
        }, values

    def _register(self, name: str, value=None) -> int:
        if name not in self.registers:
            self.registers[name] = len(self.values)
            self.values.append(value)
        return self.registers[name]

    def _nodes(self, op: Op) -> list[Node]:
        if op.key not in self.graph.special:
            return [self._literal(op)]
        outputs = [self._register(name) for name, _ in op.outputs]
        return [
            Node(
                op,
                function,
                [self._register(n) for n in names],
                [self._register(result)] if result else outputs,
            )
            for function, names, result in self.graph.special[op.key]
            if result not in self.registers
        ]

    def _literal(self, op: Op) -> Node:
        """The operation by its rule: constant attributes bound, arrays in registers,
        results in their declared dtype."""
        rule, graph = OPERATIONS[op.kind], self.graph
        attributes, parameters, registers, lists = {}, [], [], {}
        positional = [
            p
            for p in inspect.signature(rule.function).parameters
            if p not in rule.attributes
        ]
        for parameter in sorted(op.inputs, key=lambda p: (positional + [p]).index(p)):
            source = op.inputs[parameter]
            if parameter in rule.attributes and graph.constant(source) is not None:
                attributes[parameter] = _python_value(graph.constant(source))
                continue
            sources = source if isinstance(source, list) else [source]
            if isinstance(source, list) or parameter in TUPLES:
                lists[parameter] = len(sources)
            parameters.append(parameter)
            registers += [
                self._source(s, f"{op.name}.{parameter}.{i}")
                for i, s in enumerate(sources)
            ]
        function = partial(rule.function, **attributes) if attributes else rule.function
        if lists or parameters != positional[: len(parameters)]:
            function = _call_by_name(function, parameters, lists, rule.attributes)
        plain = op.kind in DIRECT - RETYPING and len(op.outputs) == 1
        if not plain or any(graph.dtype(n) != "FLOAT16" for n in _names(op)):
            function = _typed(function, op, wide=op.kind not in DIRECT)
        return Node(
            op,
            function,
            registers,
            [self._register(n) for n, _ in op.outputs]
            or [self._register(f"{op.name}.")],
            attributes,
        )

    def _source(self, source, where: str) -> int:
        return self._register(
            source.name if isinstance(source, Ref) else where,
            _to_half(self.graph.constant(source)),
        )


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
        value, shape = (
            op.inputs.get("val") if op.kind == "const" else None,
            self.graph.dense.get(op.key),
        )
        large = (
            isinstance(value, np.ndarray)
            and value.dtype.kind == "f"
            and value.size > LARGE
        )
        dense = (
            shape is not None
            and len(op.outputs) == 1
            and shape == op.outputs[0][1].shape
            and shape.numel() > 1
        )
        return (
            torch.zeros(()).expand(value.shape if large else shape)
            if large or dense
            else None
        )

    def _step(self, op: Op, scope: dict, body: Body) -> Step:
        step = super()._step(op, scope, body)
        if any(
            isinstance(function, Linear)
            for function, *_ in self.graph.special.get(op.key, ())
        ):
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
    for node in nodes:
        if isinstance(node.function, Linear):
            group = node.inputs[0], node.function.form, node.function.bias is None
            groups.setdefault(group, []).append(node)
    for group in groups.values():
        group[0].function = together([node.function for node in group])
        group[0].outputs = [register for node in group for register in node.outputs]
    others = {id(node) for group in groups.values() for node in group[1:]}
    return [node for node in nodes if id(node) not in others]


def _names(op: Op) -> list[str]:
    """Every value that an operation reads as an array or makes."""
    arrays = [
        s
        for p, source in op.inputs.items()
        if p not in OPERATIONS[op.kind].attributes
        for s in (source if isinstance(source, list) else [source])
    ]
    return [s.name if isinstance(s, Ref) else "" for s in arrays] + [
        name for name, _ in op.outputs
    ]


def _torch_dtype(declared) -> torch.dtype:
    return (
        torch.float16
        if declared.dtype == "FLOAT16"
        else _INTEGER.get(declared.dtype, torch.float32)
    )


def _to_half(value):
    """A float32 literal as fp16 where fp16 can represent it; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        half = value.half()
        return half if torch.equal(half.float(), value) else value
    return value


def _call_by_name(function, parameters, lists, attributes):
    """Calls by name: for lists of values, attributes that are computed, and absent
    parameters."""
    if list(lists) == parameters and len(parameters) == 1:
        return lambda *values: function(values)

    def call(*values):
        rest, arguments = iter(values), {}
        for parameter in parameters:
            count = lists.get(parameter)
            value = next(rest) if count is None else [next(rest) for _ in range(count)]
            arguments[parameter] = (
                _python_value(value) if parameter in attributes else value
            )
        return function(**arguments)

    return call


def _typed(function, op: Op, wide: bool):
    """Brings results to their declared dtype; `wide` operations see float32."""
    dtypes = [_torch_dtype(t) for _, t in op.outputs]
    many = len(dtypes) != 1

    def call(*values):
        if wide:
            values = [
                v.float()
                if isinstance(v, torch.Tensor) and v.dtype == torch.float16
                else v
                for v in values
            ]
        result = function(*values)
        if many:
            return [v.to(d) for v, d in zip(result or (), dtypes, strict=False)]
        return (result[0] if isinstance(result, (tuple, list)) else result).to(
            dtypes[0]
        )

    return call
