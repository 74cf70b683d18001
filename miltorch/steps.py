"""Steps: the operations of a program, each bound to its rule in one precision."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from miltorch.blob import NUMPY
from miltorch.constants import Constants, python_value, to_tensor, torch_dtype, widened
from miltorch.ops import HALF_OPERANDS, LIST_PARAMETERS, OPERATIONS, narrowed
from miltorch.program import Argument, Block, Op, Program, Ref, Type, operation_errors

NARROW_INTEGERS = frozenset({"INT8", "INT16", "UINT8", "UINT16"})


class Operand(NamedTuple):
    """An argument of a rule that is computed at run time."""

    parameter: str
    source: str | list[str]  # the name of a value, or of each value of a list
    is_attribute: bool  # whether the rule takes a Python value in place of a tensor


class Output(NamedTuple):
    """A result of a step; `dtype` is None where the rule's own result is kept."""

    name: str
    dtype: torch.dtype | None


@dataclass
class Step:
    """An operation bound to the function that computes it.

    Attributes:
        constants: the function's constant arguments, by parameter.
        widens: whether the function reads fp16 operands as float32.
        bodies: the steps of the operation's nested blocks.
        dead: values that nothing after this step reads.
    """

    op: Op
    function: Callable
    outputs: list[Output]
    constants: dict[str, object] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    widens: bool = False
    bodies: list["Body"] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def arguments(self, values: dict) -> dict:
        """The arguments of the function: its constants, and operands from `values`."""
        arguments = self.constants.copy()
        for parameter, source, is_attribute in self.operands:
            if isinstance(source, str):
                value = values[source]
            else:
                value = [values[name] for name in source]
            if is_attribute:
                value = python_value(value)
            elif self.widens:
                value = widened(value)
            arguments[parameter] = value
        return arguments

    def store(self, result, values: dict) -> None:
        """Puts what the function returned into `values`, in the declared dtypes.

        Raises:
            ValueError: fewer results than declared.
            TypeError: fractions where integers are declared, unless the operation is a
                cast.
        """
        results = result if isinstance(result, tuple) else (result,)
        if len(results) < len(self.outputs):
            raise ValueError(f"{len(results)} results of {len(self.outputs)}")
        # an operation that declares no result may return one
        for (name, dtype), value in zip(self.outputs, results):
            if dtype is not None and value.dtype is not dtype:
                converted = value.to(dtype)
                to_integers = value.is_floating_point() and not dtype.is_floating_point
                must_be_whole = to_integers and self.op.kind != "cast"
                if must_be_whole and not torch.equal(value, converted):
                    raise TypeError(f"{name} has fractions, and {dtype} is declared")
                value = converted
            values[name] = value

    def reads(self) -> Iterator[str]:
        """Every name that running the step looks up, in nested blocks too."""
        for operand in self.operands:
            if isinstance(operand.source, str):
                yield operand.source
            else:
                yield from operand.source
        for body in self.bodies:
            yield from body.outputs
            for step in body.steps:
                yield from step.reads()


@dataclass
class Body:
    """The steps of a block. `constants` are those that the steps read by name; a nested
    block also reads the values of the blocks around it."""

    inputs: list[str]
    steps: list[Step] = field(default_factory=list)
    constants: dict[str, object] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def run_time_dtype(declared: Type, precision: str) -> torch.dtype | None:
    """The dtype of the tensor that holds a value of a declared type; None for values
    that are no tensors."""
    if declared.kind != "tensor" or declared.dtype == "STRING":
        return None
    if precision == "exact" and declared.dtype == "FLOAT16":
        return torch.float32
    return torch_dtype(declared.dtype)


def is_pointwise_weight(op: Op, parameter: str, value) -> bool:
    """Whether a constant is the weight of a 1×1 convolution, whose rule takes fp16."""
    return (
        (op.kind, parameter) == ("conv", "weight")
        and value.dim() > 2
        and value.shape[2:].numel() == 1
    )


class Binder:
    """Binds the operations of a program to their rules, their constants and the names of
    their operands."""

    def __init__(self, program: Program, constants: Constants, precision: str):
        self.program = program
        self.constants = constants
        self.precision = precision
        # the casts of this program that were seen to change a value
        self.warned: list[str] = []

    def bind(self) -> Body:
        """The steps of the program."""
        body = self.body(self.program.block)
        _mark_dead(body)
        return body

    def body(self, block: Block) -> Body:
        """The steps of a block, and the constants that they read by name."""
        body = Body([name for name, _ in block.inputs], outputs=block.outputs)
        for op in block.ops:
            if not op.is_constant:
                with operation_errors(self.program, op):
                    body.steps.append(self.step(op, body))
        for name in block.outputs:
            self.add_constant(name, body)
        return body

    def step(self, op: Op, body: Body) -> Step:
        """An operation of a block bound to its rule. Constants that its operands name are
        added to `body`."""
        outputs = [
            Output(name, run_time_dtype(declared, self.precision))
            for name, declared in op.outputs
        ]
        step = Step(op, self.function(op), outputs)
        # in `exact` every float is float32 already
        is_exact = self.precision == "exact"
        takes_half = op.kind in HALF_OPERANDS and not is_exact
        step.widens = not takes_half and not is_exact
        attributes = OPERATIONS[op.kind].attributes
        for parameter, argument in op.inputs.items():
            if parameter in LIST_PARAMETERS and not isinstance(argument, list):
                argument = [argument]
            value = self.constants.value_or_none(argument)
            if value is None:
                source = self.operand_source(argument, body, f"{op.name}.{parameter}")
                operand = Operand(parameter, source, parameter in attributes)
                step.operands.append(operand)
            elif parameter in attributes:
                step.constants[parameter] = python_value(value)
            elif takes_half or is_pointwise_weight(op, parameter, value):
                step.constants[parameter] = value
            else:
                step.constants[parameter] = widened(value)
        step.bodies = [self.body(block) for block in op.blocks]
        return step

    def function(self, op: Op) -> Callable:
        """The rule of an operation, in this precision."""
        function = OPERATIONS[op.kind].function
        declared = op.outputs[0][1].dtype if op.outputs else ""
        if op.kind == "cast" and declared in NARROW_INTEGERS:
            function = self.watched_cast(op, function)
        if self.precision == "narrow" and declared == "FLOAT16" and not op.blocks:
            function = narrowed(function)
        return function

    def operand_source(
        self, argument: Argument, body: Body, literal_name: str
    ) -> str | list[str]:
        """`Operand.source` of an argument. Adds to `body` the constants that the argument
        names, and its literals: those of a list with computed values get names that
        begin with `literal_name`."""
        if isinstance(argument, list):
            return [
                self.operand_source(element, body, f"{literal_name}.{index}")
                for index, element in enumerate(argument)
            ]
        if isinstance(argument, Ref):
            self.add_constant(argument.name, body)
            return argument.name
        body.constants[literal_name] = self.as_at_run_time(to_tensor(argument))
        return literal_name

    def add_constant(self, name: str, body: Body) -> None:
        """Adds the constant `name` to those of a body; does nothing where `name` is a value
        that is computed at run time."""
        if name in self.constants.ops:
            body.constants[name] = self.as_at_run_time(self.constants[name])

    def as_at_run_time(self, value):
        """A constant in the dtype that values of its declared dtype have at run time, fp16
        in float32 for `exact`."""
        return widened(value) if self.precision == "exact" else value

    def watched_cast(self, op: Op, function: Callable) -> Callable:
        """A cast to few bits that warns, once for this program, where it changes a
        value. coremltools puts such casts around gathers. MIL wraps the value around; a
        Mac has been seen to keep 40000 (coremltools' issue 2222), so that the right
        value is open."""
        declared = op.outputs[0][1].dtype
        limits = np.iinfo(NUMPY[declared])
        # not this binder itself, which holds the whole program
        warned, package = self.warned, self.program.package.name

        def watched(x: torch.Tensor, *, dtype: str) -> torch.Tensor:
            if not warned and x.numel():
                low, high = x.min().item(), x.max().item()
                if low < limits.min or high > limits.max:
                    warned.append(op.name)
                    warnings.warn(
                        f"cast {op.name!r} of {package}: values from "
                        f"{low:g} to {high:g} do not fit {declared} ({limits.min} to "
                        f"{limits.max}) and wrap around here; a Mac may keep them, so "
                        "compare there",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return function(x, dtype=dtype)

        return watched


def _mark_dead(body: Body) -> None:
    """Notes at each step which results of this block's steps are read for the last time
    there, or never."""
    results = {name for step in body.steps for name, _ in step.outputs}
    later = set(body.outputs)
    for step in reversed(body.steps):
        for inner in step.bodies:
            _mark_dead(inner)
        read = {*step.reads(), *(name for name, _ in step.outputs)}
        step.dead = sorted((read & results) - later)
        later |= read
