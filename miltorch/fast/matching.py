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
                calls = tried(self._calls, pattern, op) if op.kind == kind else None
                if calls is not None:
                    self.special[op.key] = calls

    def _calls(self, pattern: Callable, op: Op) -> list[tuple]:
        """The calls that `pattern` returns for `op`, all on fp16 values."""
        calls = pattern(self, op)
        operands = {
            name for _, names, _ in calls for name in names if name in self.types
        }
        need(
            all(
                self.types[name].dtype == "FLOAT16"
                for name in operands | {name for name, _ in op.outputs}
            )
        )
        return calls

    def live(self) -> list[Op]:
        """Operations that outputs and state writes still need once calls replace those
        of the patterns, in order."""
        needed, ops = set(self.program.outputs), []
        for op in reversed(self.ops):
            if (
                not op.outputs
                or op.kind in STATE_WRITES
                or any(name in needed for name, _ in op.outputs)
            ):
                ops.append(op)
                calls = self.special.get(op.key)
                needed.update(
                    op.reads()
                    if calls is None
                    else (name for _, names, _ in calls for name in names)
                )
        return ops[::-1]

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        writes = [
            op
            for op in self.readers(read.inputs["input"].name)
            if op.kind in STATE_WRITES
        ]
        return all(self.order[op.key] < self.order[read.key] for op in writes)

    def half(self, source, kind: str | None = None) -> Op | None:
        """The producer of `source`, when it is of `kind`, and computes fp16 values or
        is a constant."""
        op = self.producer(source)
        if op is None or kind not in (None, op.kind):
            return None
        return (
            op
            if op.constant or all(t.dtype == "FLOAT16" for _, t in op.outputs)
            else None
        )

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
            values = [self.constant(s) for s in source]
            return None if any(value is None for value in values) else values
        op = self.producer(source)
        if op is None or op.kind == "const":
            return _to_tensor(self.literal(source))
        if op.constant and source.name not in self.folded:
            rule, values = (
                OPERATIONS[op.kind],
                {name: self.constant(s) for name, s in op.inputs.items()},
            )
            dense = rule.function(
                **{
                    n: _python_value(v) if n in rule.attributes else v
                    for n, v in values.items()
                }
            )
            for (name, declared), value in zip(
                op.outputs, dense if isinstance(dense, tuple) else (dense,), strict=True
            ):
                dtype = _INTEGER.get(declared.dtype, torch.float32)
                self.folded[name] = (
                    value.half().float()
                    if declared.dtype == "FLOAT16"
                    else value.to(dtype)
                )
                self.dense[name] = value.shape
        return self.folded.get(source.name)

    def dtype(self, name: str) -> str | None:
        """Declared dtype of a value; None for a state, and for one without a name."""
        declared = self.types.get(name)
        return None if declared is None or declared.kind == "state" else declared.dtype

    def attribute(self, op: Op, name: str, default=None):
        value = self.constant(op.inputs[name]) if name in op.inputs else None
        return default if value is None else _python_value(value)
