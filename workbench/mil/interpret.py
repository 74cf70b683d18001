"""Runs a `Program` on PyTorch: every operation by its rule, every result rounded as the precision mode says.

Precision modes
    declared  compute in float32, round each result once to the dtype MIL declares for it
    exact     float32 throughout; weights as stored (decompressed at their declared dtype)
    narrow    as declared, and sums are rounded to fp16 after every 32 products: the pessimistic bound

One hook, called as `hook(op, outputs)` after each operation, sees every intermediate and may replace it: taps,
profiles, range traces and interventions are all this hook. None costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from workbench.errors import InputError

from .ops import RULES
from .ops.state import Cell
from .program import Block, Op, Program, Ref, Type

PRECISIONS = ("declared", "exact", "narrow")
Hook = Callable[[Op, list], list | None]
_INTEGER = {"INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "UINT8": torch.uint8,
            "UINT16": torch.int32, "UINT32": torch.int64, "BOOL": torch.bool, "INT4": torch.int8}  # fmt: skip


def _tensor(array) -> torch.Tensor | object:
    """A literal as rules take it: floats in float32, unsigned types torch lacks one size up, strings as they are."""
    if isinstance(array, (list, str, dict)):
        return array
    if array.dtype == np.float16 or array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def _plain(value):
    """A value as an attribute: Python numbers, bools, strings, or lists of them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@dataclass
class Step:
    """An operation made ready: its function, its constant arguments, and where the others come from."""

    op: Op
    function: Callable
    constants: dict
    arrays: list[tuple[str, object]]  # parameter, name or list of names
    attributes: list[tuple[str, str]]
    outputs: list[tuple[str, Type]]
    blocks: list["Body"]


@dataclass
class Body:
    inputs: list[tuple[str, Type]]
    steps: list[Step]
    outputs: list[str]


class Executable:
    """A program bound to a precision mode. Stateless: inputs and state cells in, outputs out.

    Args:
        program: what to run.
        precision: `declared`, `exact` or `narrow`.

    Raises:
        InputError: naming every unsupported operation at once, before anything runs.
    """

    def __init__(self, program: Program, precision: str = "declared"):
        if precision not in PRECISIONS:
            raise InputError("precision", repr(precision), f"one of {', '.join(PRECISIONS)}", "choose one of these")
        missing = sorted({op.kind for op in program.block.walk() if op.kind not in RULES and op.kind != "const"})
        if missing:
            raise InputError(str(program.package), f"operations without a rule: {', '.join(missing)}",
                             "operations the portable runtime knows", "run it on a Mac, or add rules in mil/ops")  # fmt: skip
        self.program, self.precision = program, precision
        self.constants: dict[str, object] = {}
        self.body = self._prepare(program.block)

    def constant(self, name: str) -> torch.Tensor:
        """A constant of the program, decompressed, float32."""
        return self.constants[name]

    def make_state(self) -> dict[str, Cell]:
        """A fresh state: one cell of zeros per state tensor."""
        return {name: Cell(torch.zeros(t.shape)) for name, t in self.program.states.items()}

    @torch.inference_mode()
    def run(self, inputs: dict[str, torch.Tensor], state: dict[str, Cell], hook: Hook | None = None) -> dict:
        """Runs the program once; `state` is advanced, `inputs` are rounded to their declared dtype first."""
        values = {name: self.round(inputs[name], t) for name, t in self.program.inputs.items() if name in inputs}
        values.update(state)
        return dict(zip(self.program.outputs, self._run(self.body, values, hook), strict=True))

    def _run(self, body: Body, values: dict, hook: Hook | None) -> list:
        constants = self.constants
        for step in body.steps:
            arguments = dict(step.constants)
            for parameter, source in step.arrays:
                arguments[parameter] = (
                    [values[n] if n in values else constants[n] for n in source]
                    if isinstance(source, list)
                    else (values[source] if source in values else constants[source])
                )
            for parameter, source in step.attributes:
                arguments[parameter] = _plain(values[source])
            if step.blocks:
                arguments["blocks"] = [lambda *a, b=b: self._call(b, a, values, hook) for b in step.blocks]
            try:
                result = step.function(**arguments)
            except InputError:
                raise
            except Exception as problem:
                raise self._failure(step, problem) from problem
            results = list(result) if isinstance(result, (tuple, list)) and len(step.outputs) > 1 else [result]
            results = [self.round(r, t) for r, (_, t) in zip(results, step.outputs, strict=False)]
            if hook is not None:
                results = hook(step.op, results) or results
            for (name, _), value in zip(step.outputs, results, strict=False):
                values[name] = value
        return [values[n] if n in values else constants[n] for n in body.outputs]

    def _call(self, body: Body, arguments, values: dict, hook):
        """Runs a nested block: it sees the enclosing values, and its own stay inside."""
        inner = dict(values)
        inner.update(zip((name for name, _ in body.inputs), arguments, strict=True))
        return self._run(body, inner, hook)

    def _failure(self, step: Step, problem: Exception) -> InputError:
        return InputError(f"{step.op.kind} {step.op.name!r}", f"{type(problem).__name__}: {problem}",
                          "operands this operation accepts",
                          f"check the inputs given to {self.program.package.name}")  # fmt: skip

    def round(self, value, declared: Type):
        """A result in the dtype the program declares, as this precision mode keeps it."""
        if not isinstance(value, torch.Tensor) or declared.kind != "tensor":
            return value
        if declared.dtype == "FLOAT16" and self.precision != "exact":
            return value.half().float()
        return value.to(_INTEGER.get(declared.dtype, torch.float32))

    def _prepare(self, block: Block) -> Body:
        steps = []
        for op in block.ops:
            if op.kind == "const":
                self.constants[op.outputs[0][0]] = _tensor(op.inputs["val"])
            else:
                step = self._step(op)
                if op.kind.startswith("constexpr_"):
                    self._fold(step)
                else:
                    steps.append(step)
        return Body(block.inputs, steps, block.outputs)

    def _step(self, op: Op) -> Step:
        rule = RULES[op.kind]
        function = rule.narrow if self.precision == "narrow" and rule.narrow else rule.function
        constants, arrays, attributes = {}, [], []
        for parameter, source in op.inputs.items():
            value = self._literal(source)
            if parameter in rule.attributes:
                if value is None:
                    attributes.append((parameter, source.name))
                else:
                    constants[parameter] = _plain(value)
            elif value is None:
                arrays.append((parameter, [s.name for s in source] if isinstance(source, list) else source.name))
            else:
                constants[parameter] = value
        blocks = [self._prepare(b) for b in op.blocks]
        return Step(op, function, constants, arrays, attributes, op.outputs, blocks)

    def _literal(self, source):
        """The value of an argument when it is already known, else None."""
        if isinstance(source, Ref):
            return self.constants.get(source.name)
        if isinstance(source, list) and any(isinstance(s, Ref) for s in source):
            known = [self._literal(s) for s in source]
            return None if any(k is None for k in known) else known
        return _tensor(source)

    def _fold(self, step: Step) -> None:
        """Decompresses a weight once, at load, and rounds it to its declared dtype in every mode."""
        (name, declared), value = step.outputs[0], step.function(**step.constants)
        self.constants[name] = value.half().float() if declared.dtype == "FLOAT16" else value.float()
