"""Constants of a program, and the steps that an executable runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from miltorch.errors import InputError
from miltorch.ops import OPERATIONS
from miltorch.program import NUMPY, Op, Program, Ref, refs

# for unsigned types, which torch hardly supports
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
# declared dtype → dtype of the torch tensor, for booleans and integers
_INTEGER = {
    name: getattr(torch, _WIDER.get(np.dtype(dtype).name, np.dtype(dtype).name))
    for name, dtype in NUMPY.items()
    if np.dtype(dtype).kind in "biu"
}


def to_tensor(literal) -> object:
    """A literal as a tensor of its own memory: a view of one number would keep the whole
    file of weights mapped. Strings stay as they are, lists go element by element."""
    if isinstance(literal, list):
        return [to_tensor(v) for v in literal]
    if not isinstance(literal, np.ndarray):
        return literal
    if literal.dtype == np.float64:
        literal = literal.astype(np.float32)
    elif literal.dtype.kind == "u" and literal.dtype.itemsize > 1:
        literal = literal.astype(np.int64)
    return torch.from_numpy(np.array(literal))


def python_value(value):
    """A value as an attribute: Python numbers, bools, strings, or lists of them."""
    if isinstance(value, list):
        return list(map(python_value, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def widened(value):
    """fp16 tensors as float32, in lists too; anything else as it is."""
    if isinstance(value, list):
        return list(map(widened, value))
    half = isinstance(value, torch.Tensor) and value.dtype is torch.float16
    return value.float() if half else value


class Constants:
    """Constants and compressed weights of a program, each made when it is first read.

    Attributes:
        values: those that were made, by name; floats that are declared FLOAT16 as
            torch.float16.
    """

    def __init__(self, program: Program):
        self.program = program
        self.ops = {
            name: op
            for op in program.block.walk()
            if op.constant
            for name, _ in op.outputs
        }
        self.values: dict[str, object] = {}

    def __getitem__(self, name: str):
        if name not in self.values:
            self.values |= self._made(self.ops[name])
        return self.values[name]

    def read(self) -> Iterator[tuple[str, object]]:
        """Name and value of every constant that an operation reads which is none."""
        names = set()
        for op in self.program.block.walk():
            if not op.constant:
                names.update(op.reads())
        for name in self.ops:
            if name in names:
                yield name, self[name]

    def of(self, source):
        """The value of a constant argument; None for one that has to be computed."""
        if isinstance(source, Ref):
            return self[source.name] if source.name in self.ops else None
        if not refs(source):
            return to_tensor(source)
        values = list(map(self.of, source))
        return None if any(value is None for value in values) else values

    def _made(self, op: Op) -> dict:
        with refusing(self.program, op):
            return self._results(op)

    def _results(self, op: Op) -> dict:
        """The results of one operation by name. Its operands, which may be as large as
        the file, are not kept."""
        if op.kind == "const":
            if refs(op.inputs["val"]):
                raise TypeError("a constant that names another value")
            return {op.key: to_tensor(op.inputs["val"])}
        rule, operands = OPERATIONS[op.kind], {}
        for parameter, source in op.inputs.items():
            stored = self.ops.get(getattr(source, "name", None))
            if stored is not None:
                value = self._results(stored)[source.name]
            else:
                value = to_tensor(source)
            if parameter in rule.attributes:
                value = python_value(value)
            operands[parameter] = widened(value)
        results = rule.function(**operands)
        if not isinstance(results, tuple):
            results = (results,)
        pairs = zip(op.outputs, results, strict=True)
        return {n: value.to(torch_dtype(t.dtype)) for (n, t), value in pairs}


def torch_dtype(declared: str) -> torch.dtype:
    """The dtype of a tensor that holds values of a declared dtype."""
    if declared == "FLOAT16":
        return torch.float16
    return _INTEGER.get(declared, torch.float32)


@dataclass
class Step:
    """An operation bound to a function: its constant arguments, the names of the others,
    and the dtypes of its results (None: as they come)."""

    op: Op
    function: Callable
    outputs: list[tuple[str, torch.dtype | None]]
    constants: dict[str, object] = field(default_factory=dict)
    # parameter, value name(s), is attribute
    operands: list[tuple[str, str | list[str], bool]] = field(default_factory=list)
    wide: bool = False  # reads fp16 operands as float32
    # may run once for the columns of several calls (`miltorch.columns`)
    columnwise: bool = False
    bodies: list["Body"] = field(default_factory=list)
    # values that nothing after this step reads
    dead: list[str] = field(default_factory=list)

    def arguments(self, values: dict) -> dict:
        """What the function takes of the values of a call."""
        arguments = self.constants.copy()
        for parameter, source, attribute in self.operands:
            if source.__class__ is str:
                value = values[source]
            else:
                value = [values[n] for n in source]
            if attribute:
                value = python_value(value)
            elif self.wide:
                value = widened(value)
            arguments[parameter] = value
        return arguments

    def reads(self) -> Iterator[str]:
        """Every name that running the step looks up."""
        for _, source, _ in self.operands:
            yield from [source] if isinstance(source, str) else source
        for body in self.bodies:
            yield from body.outputs
            for step in body.steps:
                yield from step.reads()


@dataclass
class Body:
    """The steps of a block. `constants` are those that they read by name; it also sees
    the values of the blocks around it."""

    inputs: list[str]
    steps: list[Step] = field(default_factory=list)
    constants: dict[str, object] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


@contextmanager
def refusing(program: Program, op: Op) -> Iterator[None]:
    """Context manager that turns whatever a damaged operation leads to into an
    InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as problem:
        raise failure(program, op, problem) from problem


def failure(program: Program, op: Op, problem: Exception) -> InputError:
    """The error of an operation that cannot take its operands."""
    return InputError(
        f"{op.kind} {op.name!r}",
        f"{type(problem).__name__}: {problem}",
        "operands this operation accepts",
        f"check the inputs, then export {program.package.name} again",
    )
