"""Runs a `Program` on PyTorch, one operation after another.

Precision modes
    declared  float32 inside an operation, each result rounded once to the dtype that MIL
              declares for it; values of fp16 are held as torch.float16
    exact     float32 throughout; weights as stored (decompressed at their declared dtype)
    narrow    as declared, and sums that are declared fp16 are rounded to fp16 after
              every 32 terms: the pessimistic bound

A program that `miltorch.fuse` returned runs in `declared` alone.

One hook, called as `hook(op, outputs)` after each step with its results (floats in
float32), may replace them: taps, profiles, range traces and interventions are all this
hook. Without a hook no result is copied or widened."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from miltorch.checks import check_program
from miltorch.constants import Constants, torch_dtype, widened
from miltorch.errors import InputError, check_choice
from miltorch.ops import FUSED, MAX_ELEMENTS
from miltorch.ops.state import StateCell
from miltorch.precision import check_precision
from miltorch.program import Op, Program, operation_error
from miltorch.steps import Binder, Body, Step, run_time_dtype

Hook = Callable[[Op, list], list | None]


class Executable:
    """A program bound to a precision mode. Stateless: inputs and state cells in,
    outputs out.

    Args:
        program: as `miltorch.read` or `miltorch.fuse` returns it.
        precision: `declared`, `exact` or `narrow`; `declared` alone for fused programs.

    Raises:
        InputError: naming every unsupported operation at once, before anything runs.
    """

    def __init__(self, program: Program, precision: str = "declared"):
        check_precision(precision)
        check_program(program)
        if any(op.kind in FUSED for op in program.block.ops):
            check_choice("precision of fused steps", precision, ("declared",))
        self.program = program
        self.precision = precision
        self.constants = Constants(program)
        self.body = Binder(program, self.constants, precision).bind()

    def release(self) -> "Executable":
        """Forgets the program's operations and all constants that no step reads: the
        file of the weights is mapped no longer. Returns itself."""
        self.program, self.constants = replace(self.program, block=None), None
        return self

    def make_state(self) -> dict[str, StateCell]:
        """A fresh state: zeros."""
        return make_state(self.program, self.precision)

    @torch.inference_mode()
    def run(
        self,
        inputs: dict[str, torch.Tensor],
        state: dict[str, StateCell],
        hook: Hook | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs the program once; `state` is advanced, `inputs` are rounded to their
        declared dtype first. Outputs of fp16 come in float32.

        Raises:
            InputError: inputs or states that are missing or of another shape than
                declared, an operation that cannot take its operands; names what and
                where.
        """
        values = self.initial_values(inputs, state)
        self.run_body(self.body, values, hook)
        return self.outputs(values)

    def run_body(self, body: Body, values: dict, hook: Hook | None) -> list:
        """Runs the steps of a block one after another on `values`, by name, which they
        read and add to; returns the block's outputs."""
        for step in body.steps:
            self.run_step(step, values, hook)
        return [values[name] for name in body.outputs]

    def run_step(self, step: Step, values: dict, hook: Hook | None) -> None:
        """Runs one step, shows its results to the hook, and forgets the values that no
        later step reads."""
        # `operation_errors` written out: a context manager would take time at each step
        try:
            arguments = step.arguments(values)
            if step.bodies:
                arguments["blocks"] = [
                    partial(self.run_nested, body, values, hook) for body in step.bodies
                ]
            step.store(step.function(**arguments), values)
        # it names the operation and the cause already
        except InputError:
            raise
        # torch and NumPy raise many kinds where operands do not fit
        except Exception as problem:
            raise operation_error(self.program, step.op, problem) from problem
        if hook:
            show(step, values, hook)
        # the values of a whole prompt would not fit into memory together
        for name in step.dead:
            values.pop(name, None)

    def run_nested(self, body: Body, values: dict, hook: Hook | None, *inputs) -> list:
        """Runs a nested block: it reads the enclosing values, and its own stay inside."""
        # a copy: a loop's body runs many times and starts from the same values
        values = values | body.constants
        values.update(zip(body.inputs, inputs, strict=True))
        return self.run_body(body, values, hook)

    def initial_values(self, inputs: dict, state: dict) -> dict:
        """The values that exist before the first step: constants, inputs in their
        declared dtypes, and state cells, by name."""
        self._check_shapes(inputs, state)
        # cells, not tensors: a write must reach the caller's state
        values = self.body.constants | state
        for name, declared in self.program.inputs.items():
            values[name] = inputs[name].to(run_time_dtype(declared, self.precision))
        return values

    def outputs(self, values: dict) -> dict[str, torch.Tensor]:
        """The program's outputs by name, fp16 in float32."""
        return {name: widened(values[name]) for name in self.program.outputs}

    def _check_shapes(self, inputs: dict, state: dict) -> None:
        declared = self.program.inputs | self.program.states
        tensors = inputs | {name: cell.value for name, cell in state.items()}
        if missing := [name for name in declared if name not in tensors]:
            raise InputError(
                str(self.program.package),
                f"no {', '.join(missing)}",
                "every input and state",
                "give all of them",
            )
        for name, kind in declared.items():
            shape = tensors[name].shape
            if not kind.allows(shape):
                raise InputError(
                    f"{'state' if name in state else 'input'} {name!r}",
                    f"shape {list(shape)} where {list(kind.shape)} is declared",
                    "the declared shape",
                    "reshape it",
                )


def show(step: Step, values: dict, hook: Hook) -> bool:
    """Calls a hook with the results of a step; returns whether it replaced them."""
    results = [widened(values[name]) for name, _ in step.outputs]
    replacements = hook(step.op, results)
    if replacements:
        step.store(tuple(replacements), values)
    return bool(replacements)


def make_state(program: Program, precision: str = "declared") -> dict[str, StateCell]:
    """A fresh state: one cell of zeros per state tensor."""
    cells = {}
    for name, declared in program.states.items():
        # a damaged description may declare any size, which would take all memory
        if None in declared.shape or math.prod(declared.shape) > MAX_ELEMENTS:
            raise InputError(
                f"state {name!r}",
                f"shape {list(declared.shape)}",
                f"known sizes and at most {MAX_ELEMENTS} elements",
                "export the model again",
            )
        dtype = torch.float32 if precision == "exact" else torch_dtype(declared.dtype)
        cells[name] = StateCell(torch.zeros(declared.shape, dtype=dtype))
    return cells
