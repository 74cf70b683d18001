"""What the decode path's forms ask about a program: who makes and who reads a value, what is constant."""

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch

from miltorch.interpret import _INTEGER, _python_value, _to_tensor
from miltorch.ops import OPERATIONS
from miltorch.program import Op, Program, Ref

Result = TypeVar("Result")
STATE_WRITES = ("write_state", "coreml_update_state")


class NoMatch(Exception):
    """An operation is not of the form that was looked for."""


def need(found):
    """`found`, unless there is nothing."""
    if found is None or found is False:
        raise NoMatch
    return found


def tried(attempt: Callable[..., Result], *arguments) -> Result | None:
    """What `attempt` returns, or None when it raises anything at all.

    Everything that the decode path does beyond the literal graph is tried here: a form, a tape, a program's first call of
    some shapes. Each describes programs of one form. A program of another form may lack an operand, hold a string where a
    number is usual, or have another rank, so the exceptions are as many as the programs, and each means only that the
    form does not apply. The literal operation then says what the program means, or refuses it with the one message.
    """
    try:
        return attempt(*arguments)
    except Exception:
        return None


class Graph:
    """A flat program's live operations, and what stands for those that a form recognises.

    Args:
        forms: pairs of a kind and a function of the graph and an operation of that kind. It returns the calls that stand
            for the operation: (function, names of its operands, name of its result, or None for the operation's own);
            or raises `Unlike`; any other exception means the same (see `tried`). Operands and results are fp16.

    Raises:
        Unlike: two values have one name, or an operation has blocks.
    """

    def __init__(self, program: Program, forms: tuple[tuple[str, Callable], ...]):
        self.program, self.ops = program, [op for op in program.block.ops if op.kind != "const"]
        self.made = {name: op for op in program.block.ops for name, _ in op.outputs}
        self.types = program.inputs | {name: kind for op in program.block.ops for name, kind in op.outputs}
        count = len(program.inputs) + sum(len(op.outputs) for op in program.block.ops)
        need(len(self.types) == count and not self.types.keys() & program.states.keys())
        need(not any(op.blocks for op in program.block.ops))
        self.order = {id(op): i for i, op in enumerate(self.ops)}
        self.folded: dict[str, torch.Tensor] = {}
        self.dense: dict[str, torch.Size] = {}  # shapes of the compressed constants that were read
        self.special: dict = {}  # first output (or id) of an operation → the calls that stand for it
        for op, (kind, form) in itertools.product(self.ops, forms):
            calls = tried(self._calls, form, op) if op.kind == kind else None
            if calls is not None:
                self.special[op.outputs[0][0] if op.outputs else id(op)] = calls

    def _calls(self, form: Callable, op: Op) -> list[tuple]:
        """What `form` gives for `op`."""
        calls = form(self, op)
        read = {name for _, names, _ in calls for name in names if name in self.types} | {name for name, _ in op.outputs}
        need(all(self.types[name].dtype == "FLOAT16" for name in read))
        return calls

    def live(self) -> list[Op]:
        """Operations that outputs and state writes still need once the forms stand for theirs, in order."""
        needed, kept = set(self.program.outputs), []
        for op in reversed(self.ops):
            special = self.special.get(op.outputs[0][0] if op.outputs else id(op))
            unread = op.outputs and not any(name in needed for name, _ in op.outputs)
            if unread and op.kind not in STATE_WRITES or op.kind.startswith("constexpr_"):
                continue
            kept.append(op)
            if special is not None:
                needed.update(name for _, names, _ in special for name in names)
            else:
                needed.update(ref.name for ref in _refs(op))
        return kept[::-1]

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        writes = [o for o in self.ops if o.kind in STATE_WRITES and read.inputs["input"] in o.inputs.values()]
        return all(self.order[id(o)] < self.order[id(read)] for o in writes)

    def readers(self, name: str) -> list[Op]:
        """Every operation that reads a value or state."""
        return [op for op in self.ops if any(ref.name == name for ref in _refs(op))]

    def producer(self, source, kind: str | None = None) -> Op | None:
        """The operation that makes `source`, when it is of `kind`; one that computes makes fp16 values."""
        op = self.made.get(source.name) if isinstance(source, Ref) else None
        if op is None or kind not in (None, op.kind):
            return None
        return op if _constant(op) or all(t.dtype == "FLOAT16" for _, t in op.outputs) else None

    def maker(self, source, kind: str) -> Op:
        """As `producer`; raises Unlike where that gives None."""
        return need(self.producer(source, kind))

    def constant(self, source):
        """The float32 (or integer) value of a constant, decompressed; None for anything computed."""
        if isinstance(source, list):
            known = [self.constant(s) for s in source]
            return None if any(k is None for k in known) else known
        if not isinstance(source, Ref):
            return _to_tensor(source)
        op = self.made.get(source.name)
        if op is None or not _constant(op):
            return None
        if op.kind == "const":
            return _to_tensor(op.inputs["val"])
        if source.name not in self.folded:
            rule, known = OPERATIONS[op.kind], {name: self.constant(given) for name, given in op.inputs.items()}
            made = rule.function(**{name: _python_value(v) if name in rule.attributes else v for name, v in known.items()})
            for (name, declared), value in zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                dtype = _INTEGER.get(declared.dtype, torch.float32)
                self.folded[name] = value.half().float() if declared.dtype == "FLOAT16" else value.to(dtype)
                self.dense[name] = value.shape
        return self.folded[source.name]

    def dtype(self, name: str) -> str | None:
        """Declared dtype of a value; None for one without a name."""
        return self.types[name].dtype if name in self.types else None

    def attribute(self, op: Op, name: str, default=None):
        value = self.constant(op.inputs[name]) if name in op.inputs else None
        return default if value is None else _python_value(value)


def _constant(op: Op) -> bool:
    return op.kind == "const" or op.kind.startswith("constexpr_")


def _refs(op: Op):
    for source in op.inputs.values():
        yield from (s for s in (source if isinstance(source, list) else [source]) if isinstance(s, Ref))
