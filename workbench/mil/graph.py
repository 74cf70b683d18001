"""What the decode path's forms ask about a program: who makes and who reads a value, what is constant."""

import itertools
from collections.abc import Callable
from contextlib import suppress

import torch

from .interpret import _plain, _tensor
from .ops import RULES
from .program import Op, Program, Ref


class Unlike(Exception):
    """An operation is not of the form that was looked for."""


def need(found):
    """`found`, unless there is nothing."""
    if found is None or found is False:
        raise Unlike
    return found


class Graph:
    """A program's live operations, and what stands for those that a form recognises.

    Args:
        forms: pairs of a kind and a function of the graph and an operation of that kind. It returns the calls that stand
            for the operation: (function, names of its operands, name of its result, or None for the operation's own);
            or raises `Unlike`.
    """

    def __init__(self, program: Program, forms: tuple[tuple[str, Callable], ...]):
        self.program, self.ops = program, [op for op in program.block.ops if op.kind != "const"]
        self.made = {name: op for op in program.block.ops for name, _ in op.outputs}
        self.types = program.inputs | {name: kind for op in program.block.ops for name, kind in op.outputs}
        self.order = {id(op): i for i, op in enumerate(self.ops)}
        self.folded: dict[str, torch.Tensor] = {}
        self.special: dict = {}  # first output (or id) of an operation → the calls that stand for it
        for op, (kind, form) in itertools.product(self.ops, forms):
            if op.kind == kind:
                with suppress(Unlike):
                    self.special[op.outputs[0][0] if op.outputs else id(op)] = form(self, op)

    def live(self) -> list[Op]:
        """Operations that outputs and state writes still need once the forms stand for theirs, in order."""
        needed, kept = set(self.program.outputs), []
        for op in reversed(self.ops):
            special = self.special.get(op.outputs[0][0] if op.outputs else id(op))
            unread = op.outputs and not any(name in needed for name, _ in op.outputs)
            if unread or op.kind.startswith("constexpr_"):
                continue
            kept.append(op)
            if special is not None:
                needed.update(name for _, names, _ in special for name in names)
            else:
                needed.update(ref.name for ref in _refs(op))
        return kept[::-1]

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        writes = [o for o in self.ops if o.kind == "write_state" and o.inputs["input"] == read.inputs["input"]]
        return all(self.order[id(o)] < self.order[id(read)] for o in writes)

    def producer(self, source, kind: str | None = None) -> Op | None:
        """The operation that makes `source`, when it is of `kind`."""
        op = self.made.get(source.name) if isinstance(source, Ref) else None
        return op if op is not None and kind in (None, op.kind) else None

    def maker(self, source, kind: str) -> Op:
        """As `producer`; raises Unlike where that gives None."""
        return need(self.producer(source, kind))

    def constant(self, source):
        """The float32 (or integer) value of a constant, decompressed; None for anything computed."""
        if isinstance(source, list):
            known = [self.constant(s) for s in source]
            return None if any(k is None for k in known) else known
        if not isinstance(source, Ref):
            return _tensor(source)
        op = self.made.get(source.name)
        if op is None or not (op.kind == "const" or op.kind.startswith("constexpr_")):
            return None
        if op.kind == "const":
            return _tensor(op.inputs["val"])
        if source.name not in self.folded:
            rule, known = RULES[op.kind], {name: self.constant(given) for name, given in op.inputs.items()}
            made = rule.function(**{name: _plain(v) if name in rule.attributes else v for name, v in known.items()})
            for (name, declared), value in zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                self.folded[name] = value.half().float() if declared.dtype == "FLOAT16" else value
        return self.folded[source.name]

    def dtype(self, name: str) -> str | None:
        """Declared dtype of a value; None for one without a name."""
        return self.types[name].dtype if name in self.types else None

    def attribute(self, op: Op, name: str, default=None):
        value = self.constant(op.inputs[name]) if name in op.inputs else None
        return default if value is None else _plain(value)


def _refs(op: Op):
    for source in op.inputs.values():
        yield from (s for s in (source if isinstance(source, list) else [source]) if isinstance(s, Ref))
