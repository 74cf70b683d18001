"""Finds groups of operations in a program, and keeps the steps that stand for them."""

from collections.abc import Callable

import torch

from miltorch.graph import Graph
from miltorch.program import Op, Program, Ref
from miltorch.steps import Constants, Step, python_value, torch_dtype

WRITES = ("write_state", "coreml_update_state")


class NoMatch(Exception):
    """Operations do not form a group; the message says why, "" where none was meant."""


def need(value, why: str = ""):
    """`value`; raises NoMatch for None and False."""
    if value is None or value is False:
        raise NoMatch(why)
    return value


class Groups(Graph):
    """A flat program's operations, and the steps of the groups found so far."""

    def __init__(self, program: Program, constants: Constants, reads: str):
        super().__init__(program)
        self.constants, self.reads = constants, reads
        self.order = {op.key: i for i, op in enumerate(self.ops)}
        self.steps: dict[str | int, list[Step]] = {}
        self.unfused: dict[str, str] = {}
        # of convolutions: input, form of the weight, whether there is a bias
        self.linears: dict[tuple, list[tuple[Op, object, torch.Tensor | None]]] = {}

    def add(self, op: Op, function: Callable, **operands: Ref) -> None:
        """A step of fp16 values in place of `op`."""
        for name in (*dict(op.outputs), *(ref.name for ref in operands.values())):
            need(self.types[name].dtype == "FLOAT16", "its values are not fp16")
        outputs = [(name, torch_dtype(t.dtype)) for name, t in op.outputs]
        names = [(p, ref.name, False) for p, ref in operands.items()]
        self.steps.setdefault(op.key, []).append(
            Step(op, function, outputs, operands=names)
        )

    def shared(self, op: Op, what: str, function: Callable, source: Ref) -> Ref:
        """What a function makes of an input of the program, computed once before
        `op`."""
        need(self.types[source.name].dtype == "FLOAT16", "its mask is not fp16")
        name = f"{source.name}.{what}"
        if name not in self.types:
            self.types[name] = self.types[source.name]
            step = Step(op, function, [(name, None)], operands=[("x", source.name, 0)])
            self.steps.setdefault(op.key, []).insert(0, step)
        return Ref(name)

    def given(self, source) -> Ref:
        """A value that an operation names, and not a literal."""
        need(isinstance(source, Ref) and source.name in self.types)
        return source

    def shape(self, source, rank: int | None = None) -> tuple[int | None, ...]:
        """The declared shape of a value; raises NoMatch for another rank."""
        shape = self.types[self.given(source).name].shape
        need(rank in (None, len(shape)), f"{source.name} has {len(shape)} axes")
        return shape

    def number(self, op: Op, name: str, default=None) -> float:
        """A constant attribute; raises NoMatch for a computed one, or a list."""
        value = default
        if name in op.inputs:
            value = python_value(self.constants.of(op.inputs[name]))
        need(isinstance(value, bool | int | float | str))
        return value

    def numbers(self, op: Op, name: str, default=None) -> list:
        """A constant attribute that is a list; raises NoMatch for any other."""
        value = default
        if name in op.inputs:
            value = python_value(self.constants.of(op.inputs[name]))
        need(isinstance(value, list))
        return value

    def half(self, source, kind: str) -> Op | None:
        """The producer of `source`, when it is of `kind` and computes fp16 values."""
        op = self.producer(source)
        if op is None or op.kind != kind or op.constant:
            return None
        return op if all(t.dtype == "FLOAT16" for _, t in op.outputs) else None

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        readers = self.readers(self.given(read.inputs.get("input")).name)
        return all(
            op.kind not in WRITES or self.order[op.key] < self.order[read.key]
            for op in readers
        )

    def check_only_read(self, read: Op, write: Op, inside: list[Op]) -> None:
        """Needs `read` to be the one access of a state before `write`, for the
        operations `inside` alone: rows are written in place, where the state's earlier
        value would change under any other reader."""
        state = self.given(write.inputs.get("input"))
        need(read.inputs.get("input") == state, "it reads another state")
        for op in self.readers(state.name):
            before = self.order[op.key] < self.order[write.key]
            need(op is read or not before, "the state is read before")
        names = {id(op) for op in inside}
        readers = self.readers(read.key)
        need(all(id(op) in names for op in readers), "the state is read beside")
        need(read.key not in self.program.outputs, "the state is an output")

    def match(self, source, pattern, parts: dict) -> dict:
        """Binds the parts of `pattern` to the operations that compute `source`; raises
        NoMatch where they differ.

        A pattern is the name of a value, which stands for one value wherever it occurs,
        or (kind, patterns of x and y): an operation, bound to its kind or, written
        `label:kind`, to its label. Two kinds may be absent: `reshape?`, and
        `label:scalars`, the products with constant scalars of one value, bound to their
        product."""
        if isinstance(pattern, str):
            bound = parts.setdefault(pattern, source)
            need(bound is source or (isinstance(bound, Ref) and bound == source))
            return parts
        label, _, kind = pattern[0].rpartition(":")
        if kind == "scalars":
            source, parts[label] = self.scalars(source)
            return self.match(source, pattern[1], parts)
        op = self.half(source, kind.removesuffix("?"))
        if op is None and kind == "reshape?":
            return self.match(source, pattern[1], parts)
        parts[label or kind] = need(op)
        for operand, inner in zip("xy", pattern[1:]):
            self.match(op.inputs.get(operand), inner, parts)
        return parts

    def scalars(self, source) -> tuple:
        """`source` without the constant scalars that multiply it one after another, and
        their product."""
        gain = 1.0
        while (product := self.half(source, "mul")) is not None:
            factor = self.constants.of(product.inputs.get("y"))
            if not isinstance(factor, torch.Tensor) or factor.numel() != 1:
                break
            gain *= factor.item()
            source = product.inputs.get("x")
        return source, gain
