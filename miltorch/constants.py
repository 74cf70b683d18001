"""Constants of a program: literals and compressed weights as torch tensors."""

from collections.abc import Iterator

import numpy as np
import torch

from miltorch.blob import NUMPY
from miltorch.ops import OPERATIONS
from miltorch.program import Argument, Op, Program, Ref, operation_errors, refs

# torch hardly supports unsigned types of more than 8 bits
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
# declared dtype → dtype of the torch tensor, for booleans and integers
_INTEGER = {
    name: getattr(torch, _WIDER.get(np.dtype(dtype).name, np.dtype(dtype).name))
    for name, dtype in NUMPY.items()
    if np.dtype(dtype).kind in "biu"
}


def torch_dtype(declared: str) -> torch.dtype:
    """The dtype of a tensor that holds values of a declared dtype."""
    if declared == "FLOAT16":
        return torch.float16
    return _INTEGER.get(declared, torch.float32)


def to_tensor(literal) -> object:
    """A literal array as a tensor, a list element by element; strings, numbers and
    weights as they are stored stay what they are.

    The tensor has memory of its own: a view of one number would keep the whole file of
    weights mapped."""
    if isinstance(literal, list):
        return [to_tensor(element) for element in literal]
    if not isinstance(literal, np.ndarray):
        return literal
    if literal.dtype == np.float64:
        literal = literal.astype(np.float32)
    elif literal.dtype.kind == "u" and literal.dtype.itemsize > 1:
        literal = literal.astype(np.int64)
    return torch.from_numpy(np.array(literal))


def python_value(value):
    """A value as a rule takes its attributes: tensors become Python numbers, bools, or
    lists of them."""
    if isinstance(value, list):
        return list(map(python_value, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def widened(value):
    """fp16 tensors as float32, in lists too; anything else as it is."""
    if isinstance(value, list):
        return list(map(widened, value))
    is_half = isinstance(value, torch.Tensor) and value.dtype is torch.float16
    return value.float() if is_half else value


class Constants:
    """Constants and compressed weights of a program, each computed when it is first
    read.

    Attributes:
        ops: the operations that define constants, by the names of their results.
        values: the constants computed so far, by name; floats that are declared FLOAT16
            as torch.float16.
    """

    def __init__(self, program: Program):
        self.program = program
        self.ops = {
            name: op
            for op in program.block.walk()
            if op.is_constant
            for name, _ in op.outputs
        }
        self.values: dict[str, object] = {}

    def __getitem__(self, name: str):
        if name not in self.values:
            self.values |= self._evaluate(self.ops[name])
        return self.values[name]

    def compute_uncached(self, name: str):
        """The value of a constant, which is not stored in `values`: for a caller that
        keeps the value in another form."""
        return self._evaluate(self.ops[name])[name]

    def items_read_at_run_time(self) -> Iterator[tuple[str, object]]:
        """Name and value of every constant that an operation at run time reads."""
        names = set()
        for op in self.program.block.walk():
            if not op.is_constant:
                names.update(op.reads())
        for name in self.ops:
            if name in names:
                yield name, self[name]

    def value_or_none(self, argument: Argument | None):
        """The value of an argument that is a literal, a constant or a list of them; None
        for one that has to be computed at run time."""
        if isinstance(argument, Ref):
            return self[argument.name] if argument.name in self.ops else None
        if not refs(argument):
            return to_tensor(argument)
        values = list(map(self.value_or_none, argument))
        return None if any(value is None for value in values) else values

    def scalar(self, argument: Argument | None) -> float | None:
        """The value of a constant of one element; None for any other argument."""
        value = self.value_or_none(argument)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.item()
        return None

    def _evaluate(self, op: Op) -> dict:
        with operation_errors(self.program, op):
            return self._results(op)

    def _results(self, op: Op) -> dict:
        """The results of one operation by name. Its operands are not stored in `values`:
        they may be as large as the file."""
        if op.kind == "const":
            if refs(op.inputs["val"]):
                raise TypeError("a constant that names another value")
            return {op.key: to_tensor(op.inputs["val"])}
        rule = OPERATIONS[op.kind]
        operands = {}
        for parameter, argument in op.inputs.items():
            constant_op = None
            if isinstance(argument, Ref):
                constant_op = self.ops.get(argument.name)
            if constant_op is None:
                value = to_tensor(argument)
            else:
                value = self._results(constant_op)[argument.name]
            if parameter in rule.attributes:
                value = python_value(value)
            operands[parameter] = widened(value)
        results = rule.function(**operands)
        if not isinstance(results, tuple):
            results = (results,)
        pairs = zip(op.outputs, results, strict=True)
        return {
            name: value.to(torch_dtype(declared.dtype))
            for (name, declared), value in pairs
        }
