"""Finds patterns of operations in a program: `PatternGraph` keeps what stands for those
that a pattern recognises."""

from collections.abc import Callable

import torch

from miltorch.graph import Graph
from miltorch.interpret import _INTEGER, _python_value, _to_tensor
from miltorch.ops import OPERATIONS
from miltorch.program import Op, Program

STATE_WRITES = ("write_state", "coreml_update_state")


class NoMatch(Exception):
    """An operation does not fit the pattern."""


def need(value):
    """`value`; raises NoMatch for None and False."""
    if value is None or value is False:
        raise NoMatch
    return value


def tried(attempt: Callable, *arguments):
    """What `attempt` returns, or None when it raises anything at all.

    Everything that the decode path does beyond the literal graph is tried here: a
    pattern, a bytecode, a program's first call of some shapes. Each describes programs
    of one form. A program of another form may lack an operand, hold a string where a
    number is usual, or have another rank, so the exceptions are as many as the
    programs, and each means only that the pattern does not apply. The literal operation
    then says what the program means, or refuses it with the one message."""
    try:
        return attempt(*arguments)
    except Exception:
        return None


class PatternGraph(Graph):
    """A flat program's live operations, and the calls that replace those that a pattern
    recognises.

    Args:
        patterns: pairs of a kind and a function of the graph and an operation of that
            kind. It returns the calls that replace the operation: (function, names of
            its operands, name of its result, or None for the operation's own); or
            raises `NoMatch`; any other exception means the same (see `tried`). Operands
            and results are fp16.

    Raises:
        NoMatch: two values have one name, or an operation has blocks.
    """

    def __init__(self, program: Program, patterns: tuple[tuple[str, Callable], ...]):
        super().__init__(program)
        need(not any(op.blocks for op in program.block.ops))
        outputs = sum(len(op.outputs) for op in program.block.ops)
        need(len(self.types) == len(program.inputs) + len(program.states) + outputs)
        self.order = {op.key: i for i, op in enumerate(self.ops)}
        self.folded: dict[str, torch.Tensor] = {}
        # shapes of the compressed constants that were read
        self.dense: dict[str, torch.Size] = {}
        self.special: dict = {}  # key of an operation → the calls that replace it
        for op in self.ops:
            for kind, pattern in patterns:
                if op.kind != kind:
                    continue
                calls = tried(self._calls, pattern, op)
                if calls is not None:
                    self.special[op.key] = calls

    def _calls(self, pattern: Callable, op: Op) -> list[tuple]:
        """The calls that `pattern` returns for `op`, all on fp16 values."""
        calls = pattern(self, op)
        values = set(dict(op.outputs))
        for _, operands, _ in calls:
            values.update(operands)
        for name in values & self.types.keys():
            need(self.types[name].dtype == "FLOAT16")
        return calls

    def live(self) -> list[Op]:
        """Operations that outputs and state writes still need once calls replace those
        of the patterns, in order."""
        needed, ops = set(self.program.outputs), []
        for op in reversed(self.ops):
            dead = op.outputs and needed.isdisjoint(dict(op.outputs))
            if dead and op.kind not in STATE_WRITES:
                continue
            ops.append(op)
            if op.key not in self.special:
                needed.update(op.reads())
            for _, operands, _ in self.special.get(op.key, ()):
                needed.update(operands)
        return ops[::-1]

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        for op in self.readers(read.inputs["input"].name):
            if op.kind in STATE_WRITES and self.order[op.key] >= self.order[read.key]:
                return False
        return True

    def half(self, source, kind: str | None = None) -> Op | None:
        """The producer of `source`, when it is of `kind`, and computes fp16 values or
        is a constant."""
        op = self.producer(source)
        if op is None or kind not in (None, op.kind):
            return None
        if op.constant or all(t.dtype == "FLOAT16" for _, t in op.outputs):
            return op
        return None

    def match(self, source, pattern, parts: dict) -> dict:
        """Binds the parts of `pattern` to the operations that compute `source`; raises
        NoMatch where they differ.

        A pattern is the name of a value, which stands for one value wherever it occurs,
        or (kind, patterns of x and y): an operation, bound to its kind or, written
        `label:kind`, to its label. Two kinds may be absent: `reshape?`, and
        `label:scalars`, the products with constant scalars of one value, bound to their
        factors."""
        if isinstance(pattern, str):
            value = parts.setdefault(pattern, source)
            need(value is source or bool(value == source))
            return parts
        label, _, kind = pattern[0].rpartition(":")
        if kind == "scalars":
            source, parts[label] = self._scalars(source)
            return self.match(source, pattern[1], parts)
        op = self.half(source, kind.removesuffix("?"))
        if op is None and kind == "reshape?":
            return self.match(source, pattern[1], parts)
        parts[label or kind] = need(op)
        for operand, inner in zip("xy", pattern[1:]):
            self.match(op.inputs[operand], inner, parts)
        return parts

    def _scalars(self, source) -> tuple:
        """`source` without the constant scalars that multiply it one after another, and
        those, in their order."""
        factors: list[float] = []
        while (product := self.half(source, "mul")) is not None:
            factor = self.constant(product.inputs["y"])
            if not isinstance(factor, torch.Tensor) or factor.numel() != 1:
                break
            factors.insert(0, factor.item())
            source = product.inputs["x"]
        return source, factors

    def constant(self, source):
        """The float32 (or integer) value of a constant, decompressed; None for anything
        computed."""
        if isinstance(source, list):
            values = list(map(self.constant, source))
            if any(value is None for value in values):
                return None
            return values
        op = self.producer(source)
        if op is None or op.kind == "const":
            return _to_tensor(self.literal(source))
        if op.constant and source.name not in self.folded:
            self._fold(op)
        return self.folded.get(source.name)

    def _fold(self, op: Op) -> None:
        """Decompresses the results of an operation on constants."""
        rule, operands = OPERATIONS[op.kind], {}
        for name, source in op.inputs.items():
            operands[name] = self.constant(source)
            if name in rule.attributes:
                operands[name] = _python_value(operands[name])
        results = rule.function(**operands)
        if not isinstance(results, tuple):
            results = (results,)
        for (name, declared), value in zip(op.outputs, results, strict=True):
            self.dense[name] = value.shape
            if declared.dtype == "FLOAT16":
                value = value.half()
            self.folded[name] = value.to(_INTEGER.get(declared.dtype, torch.float32))

    def dtype(self, name: str) -> str | None:
        """Declared dtype of a value; None for a state, and for one without a name."""
        declared = self.types.get(name)
        if declared is None or declared.kind == "state":
            return None
        return declared.dtype

    def attribute(self, op: Op, name: str, default=None):
        value = self.constant(op.inputs.get(name))
        if value is None:
            return default
        return _python_value(value)
