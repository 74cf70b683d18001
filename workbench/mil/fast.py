"""The decode path: a `Program` as one straight list of calls on fp16 tensors, weights left as they are stored.

Means the same as the literal graph in `declared`, and differs from it only in the order of float32 sums: an operation
that torch's fp16 kernels compute in float32 and round once runs on fp16 directly, any other by its rule in float32.
What makes it fast is recognised by form; whatever does not fit a form takes its literal meaning:

    linear     1×1 convolutions of one input read their fp16 or int8 weights once, as one matrix-vector product
    cache row  k·(1 − Σ mask) + mask @ rows, when the mask's columns are one-hot or empty, writes those rows in place
    rms_norm, rotation   a norm's dozen operations in one pass, a rotary embedding's nine
    attention  columns that the mask blocks for every query, before and behind the visible ones, are left out

Gates run the literal graph: it sees NaN and leaks in rows that attention here does not touch.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from .forms import FORMS, Linear, together
from .graph import Graph
from .interpret import _INTEGER, _failure, _plain, _tensor, refuse_unknown
from .ops import RULES, TUPLES
from .ops.state import Cell
from .program import Op, Program, Ref
from .tape import Tape, record

# torch computes these on fp16 in float32 and rounds the result once, or only moves or picks values
DIRECT = frozenset(
    """add sub mul real_div maximum minimum abs relu sqrt exp sin cos sigmoid silu tanh softmax clip
    reduce_max reduce_min reshape transpose concat split squeeze expand_dims stack slice_by_index select identity cast
    tile gather greater less greater_equal less_equal equal""".split()
)


@dataclass
class Node:
    """One call: registers in, registers out. A register of a list-valued parameter is a tuple of registers."""

    op: Op
    function: Callable
    inputs: list[int]
    outputs: list[int]


class FastProgram:
    """A flat program made ready for decoding. Stateless, as `Executable`; state cells are advanced in place.

    Raises:
        InputError: naming every unsupported operation.
    """

    def __init__(self, program: Program):
        refuse_unknown(program)
        self.program = replace(program, block=None)  # what it was made of may go
        self.registers: dict[str, int] = {}
        self.values: list[object] = []  # what each register holds before a call: its constant, or None
        self.graph = Graph(program, FORMS)
        self.nodes = _joined([node for op in self.graph.live() for node in self._nodes(op)])
        self.inputs = [(name, self._register(name), _dtype(t)) for name, t in program.inputs.items()]
        self.states = [(name, self._register(name)) for name in program.states]
        self.outputs = [(name, self._register(name)) for name in program.outputs]
        self.tapes: dict[tuple, Tape | None] = {}  # by the inputs' shapes: recorded by their first call
        del self.graph

    @torch.inference_mode()
    def run(self, inputs: dict[str, torch.Tensor], state: dict[str, Cell]) -> dict[str, torch.Tensor]:
        """As `Executable.run` in `declared`, without a hook."""
        shapes = tuple(inputs[name].shape for name, *_ in self.inputs)
        made = self.tapes[shapes].run(inputs, state) if self.tapes.get(shapes) else None
        return self._run(inputs, state, shapes) if made is None else made

    def _run(self, inputs: dict, state: dict, shapes: tuple) -> dict:
        values = list(self.values)
        for name, register, dtype in self.inputs:
            values[register] = inputs[name].to(dtype)
        for name, register in self.states:
            values[register] = state[name]
        node = None
        try:
            for node in self.nodes:
                made = node.function(*[values[i] for i in node.inputs])
                if len(node.outputs) == 1:
                    values[node.outputs[0]] = made
                else:
                    for register, value in zip(node.outputs, made, strict=False):
                        values[register] = value
        except Exception as problem:
            raise _failure(self.program, node.op, problem) from problem
        if shapes not in self.tapes:
            self.tapes[shapes] = record(self, values)
        made = ((name, values[register]) for name, register in self.outputs)
        return {name: value.float() if value.dtype == torch.float16 else value for name, value in made}

    def _register(self, name: str, value=None) -> int:
        if name not in self.registers:
            self.registers[name] = len(self.values)
            self.values.append(value)
        return self.registers[name]

    def _nodes(self, op: Op) -> list[Node]:
        special = self.graph.special.get(op.outputs[0][0] if op.outputs else id(op))
        if special is None:
            return [self._literal(op)]
        outputs = [self._register(name) for name, _ in op.outputs]
        return [Node(op, function, [self._register(n) for n in names], outputs if made is None else [self._register(made)])
                for function, names, made in special if made not in self.registers or made is None]  # fmt: skip

    def _literal(self, op: Op) -> Node:
        """The operation by its rule: constant attributes bound, arrays in registers, results in their declared dtype."""
        rule, graph = RULES[op.kind], self.graph
        attributes, names, lists = {}, [], {}
        positional = [p for p in inspect.signature(rule.function).parameters if p not in rule.attributes]
        for parameter in sorted(op.inputs, key=lambda p: (positional + [p]).index(p)):
            source = op.inputs[parameter]
            known = graph.constant(source)
            if parameter in rule.attributes and known is not None:
                attributes[parameter] = _plain(known)
                continue
            sources = source if isinstance(source, list) else [source]
            if isinstance(source, list) or parameter in TUPLES:
                lists[parameter] = len(sources)
            names.append((parameter, [self._source(s, f"{op.name}.{parameter}.{i}") for i, s in enumerate(sources)]))
        function = partial(rule.function, **attributes) if attributes else rule.function
        parameters = [parameter for parameter, _ in names]
        if lists or parameters != positional[: len(parameters)]:
            function = _spread(function, parameters, lists, rule.attributes)
        if op.kind not in DIRECT or any(graph.dtype(n) != "FLOAT16" for n in _names(op)) or len(op.outputs) > 1:
            function = _typed(function, op, wide=op.kind not in DIRECT)
        return Node(op, function, [r for _, registers in names for r in registers],
                    [self._register(name) for name, _ in op.outputs] or [self._register(f"{op.name}.")])  # fmt: skip

    def _source(self, source, where: str) -> int:
        if isinstance(source, Ref):
            known = self.graph.constant(source)
            return self._register(source.name, _half(known) if known is not None else None)
        return self._register(where, _half(_tensor(source)))


def _joined(nodes: list[Node]) -> list[Node]:
    """Products with one input become one node, where the first of them stood."""
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        if isinstance(node.function, Linear):
            alike = node.function.weight.dtype, node.function.bias is None
            groups.setdefault((node.inputs[0], *alike), []).append(node)
    for first, *more in groups.values():
        first.function = together([node.function for node in (first, *more)])
        first.outputs = [register for node in (first, *more) for register in node.outputs]
    gone = {id(node) for _, *more in groups.values() for node in more}
    return [node for node in nodes if id(node) not in gone]


def _names(op: Op) -> list[str]:
    """Every value that an operation reads as an array or makes."""
    reads = [s for p, source in op.inputs.items() if p not in RULES[op.kind].attributes
             for s in (source if isinstance(source, list) else [source])]  # fmt: skip
    return [s.name if isinstance(s, Ref) else "" for s in reads] + [name for name, _ in op.outputs]


def _dtype(declared) -> torch.dtype:
    return torch.float16 if declared.dtype == "FLOAT16" else _INTEGER.get(declared.dtype, torch.float32)


def _half(value):
    """A float32 literal that fp16 holds exactly as fp16; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        half = value.half()
        return half if torch.equal(half.float(), value) else value
    return value


def _spread(function, parameters, lists, attributes):
    """Calls by name: for lists of values, attributes known only at run time, and parameters left out."""
    if list(lists) == parameters and len(parameters) == 1:
        return lambda *values: function(values)

    def call(*values):
        rest, arguments = iter(values), {}
        for parameter in parameters:
            count = lists.get(parameter)
            value = next(rest) if count is None else [next(rest) for _ in range(count)]
            arguments[parameter] = _plain(value) if parameter in attributes else value
        return function(**arguments)

    return call


def _typed(function, op: Op, wide: bool):
    """Brings results to their declared dtype; `wide` operations see float32."""
    dtypes = [_dtype(t) for _, t in op.outputs]
    many = len(dtypes) != 1

    def call(*values):
        if wide:
            values = [v.float() if isinstance(v, torch.Tensor) and v.dtype == torch.float16 else v for v in values]
        made = function(*values)
        if many:
            return [v if v.dtype == d else v.to(d) for v, d in zip(made or (), dtypes, strict=False)]
        made = made[0] if isinstance(made, (tuple, list)) else made
        return made if made.dtype == dtypes[0] else made.to(dtypes[0])

    return call
