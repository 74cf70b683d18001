"""Runs a `Program` on PyTorch: a list of steps, each an operation bound to its rule.

Precision modes
    declared  float32 inside an operation, each result rounded once to the dtype that MIL
              declares for it; values of fp16 are held as torch.float16
    exact     float32 throughout; weights as stored (decompressed at their declared dtype)
    narrow    as declared, and sums that are declared fp16 are rounded to fp16 after
              every 32 terms: the pessimistic bound

With `fuse`, groups of operations become one step each (`miltorch.fuse`).

One hook, called as `hook(op, outputs)` after each step with its results (floats in
float32), may replace them: taps, profiles, range traces and interventions are all this
hook. None costs nothing."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, groupby

import numpy as np
import torch

from miltorch.blob import NUMPY
from miltorch.columns import (
    Joined,
    is_columnwise,
    is_matrix,
    join,
    operands,
    result_axis,
    separate,
)
from miltorch.errors import InputError, check_choice
from miltorch.fuse import fusions
from miltorch.ops import MAX_ELEMENTS, OPERATIONS, TUPLES, narrowed
from miltorch.ops.state import StateCell
from miltorch.program import Block, Op, Program, Ref, Type
from miltorch.steps import (
    Body,
    Constants,
    Step,
    failure,
    python_value,
    refusing,
    to_tensor,
    torch_dtype,
    widened,
)

PRECISIONS = ("declared", "exact", "narrow")
NARROW_INTEGERS = frozenset({"INT8", "INT16", "UINT8", "UINT16"})
# torch computes these on fp16 in float32 and rounds once, or picks values
NATIVE = frozenset(
    """abs add cast clip concat cos equal exp expand_dims gather greater greater_equal
    identity less less_equal maximum minimum mul read_state real_div reduce_max reduce_min
    relu reshape select sigmoid silu sin slice_by_index slice_update softmax split sqrt
    squeeze stack sub tanh tile transpose write_state coreml_update_state""".split()
)
TOGETHER = 1 << 20  # elements of inputs of calls that run together: bounds their memory
Hook = Callable[[Op, list], list | None]


class Executable:
    """A program bound to a precision mode. Stateless: inputs and state cells in,
    outputs out.

    Args:
        program: what to run.
        precision: `declared`, `exact` or `narrow`.
        fuse: whether groups of operations run as one step each; for `declared` alone.
        reads: with `fuse`, the rows of a cache that attention reads: `all` as the
            program does, or those that hold tokens (`used`).

    Attributes:
        unfused: with `fuse`, operations that no group took: name → why.

    Raises:
        InputError: naming every unsupported operation at once, before anything runs.
    """

    def __init__(
        self,
        program: Program,
        precision: str = "declared",
        fuse: bool = False,
        reads: str = "used",
    ):
        check_precision(precision)
        refuse_unknown(program)
        check_names(program, program.block, {*program.inputs, *program.states})
        self.program, self.precision = program, precision
        self.warned: list[str] = []  # casts that were seen to change a value
        self.constants = Constants(program)
        self.unfused: dict[str, str] = {}
        fused = {}
        if fuse:
            check_choice("precision of fused steps", precision, ("declared",))
            check_choice("reads", reads, ("all", "used"))
            fused, self.unfused = fusions(program, self.constants, reads)
        operands = [o for steps in fused.values() for s in steps for o in s.operands]
        # states that fused steps write in place
        self.cells = {name for parameter, name, _ in operands if parameter == "cell"}
        self.body = self._body(program.block, fused)
        if fuse:
            _drop_unread(self.body)
        _mark_dead(self.body)

    def release(self) -> "Executable":
        """Forgets the program's operations and all constants that no step reads: the
        file of the weights is mapped no longer. Returns itself."""
        self.program, self.constants = replace(self.program, block=None), None
        return self

    def make_state(self) -> dict[str, StateCell]:
        return make_state(self.program, self.precision)

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
        (outputs,) = self.run_calls([inputs], [state], [hook])
        return outputs

    @torch.inference_mode()
    def run_calls(
        self,
        calls: Sequence[dict[str, torch.Tensor]],
        states: Sequence[dict[str, StateCell]],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, torch.Tensor]]:
        """Results of `run` for one call's inputs after another, each on its state, which
        may be that of other calls, and with a hook of its own.

        Every step of every call, and the order in which a state is read and written, are
        those of `run`. Before and behind the steps that access states, a step computes
        the columns of several calls at once where no column depends on another
        (`miltorch.columns`), so that a weight is read once. Sums may add up in another
        order."""
        results, names = [], self.program.outputs
        totals = accumulate(sum(x.numel() for x in call.values()) for call in calls)
        each = zip(totals, calls, states, hooks, strict=True)
        for _, group in groupby(each, lambda call: call[0] // TOGETHER):
            _, own, cells, looks = zip(*group)
            values = list(map(self._values, own, cells))
            for outputs in self._run(self.body, values, looks):
                results.append(dict(zip(names, map(widened, outputs), strict=True)))
        return results

    def _values(self, inputs: dict, state: dict) -> dict:
        """What the steps of a call read, by name."""
        self._check(inputs, state)
        values = self.body.constants | state
        for name, declared in self.program.inputs.items():
            values[name] = inputs[name].to(self._dtype(declared))
        return values

    def _check(self, inputs: dict, state: dict) -> None:
        declared = self.program.inputs | self.program.states
        given = inputs | {name: cell.value for name, cell in state.items()}
        if missing := [name for name in declared if name not in given]:
            raise InputError(
                str(self.program.package),
                f"no {', '.join(missing)}",
                "every input and state",
                "give all of them",
            )
        for name, kind in declared.items():
            if not kind.allows(given[name].shape):
                raise InputError(
                    f"{'state' if name in state else 'input'} {name!r}",
                    f"shape {list(given[name].shape)} where {list(kind.shape)} is declared",
                    "the declared shape",
                    "reshape it",
                )

    def _run(self, body: Body, values: list[dict], hooks: Sequence) -> list[list]:
        """The outputs of a block for the values of each call."""
        joined = self._joined_inputs(values) if len(values) > 1 else {}
        for together, steps in _stages(body, self.program.states, len(values)):
            if together:
                self._run_steps(steps, values, hooks, joined)
                continue
            separate(joined, chain.from_iterable(s.reads() for s in steps), values)
            for own, hook in zip(values, hooks, strict=True):
                self._run_steps(steps, [own], [hook], {})
        separate(joined, body.outputs, values)
        return [[own[name] for name in body.outputs] for own in values]

    def _joined_inputs(self, values: list[dict]) -> dict[str, Joined]:
        """The inputs of which one axis may have any size, which are the columns."""
        joined = {}
        for name, declared in self.program.inputs.items():
            if declared.shape.count(None) == 1:
                axis = declared.shape.index(None) - len(declared.shape)
                joined[name] = join(values, name, axis)
        return {name: value for name, value in joined.items() if value}

    def _run_steps(
        self, steps: list[Step], values: list[dict], hooks, joined: dict[str, Joined]
    ) -> None:
        several = len(values) > 1
        for step in steps:
            try:
                shared = several and step.columnwise
                if not (shared and _run_joined(step, values, joined)):
                    if joined:
                        separate(joined, step.reads(), values)
                    for own, hook in zip(values, hooks):
                        self._run_step(step, own, hook)
            except InputError:
                raise
            # torch raises many kinds where operands do not fit
            except Exception as problem:
                raise failure(self.program, step.op, problem) from problem
            if any(hooks):
                _show(step, values, hooks, joined)
            for name in step.dead:
                for known in (joined, *values):
                    known.pop(name, None)

    def _run_step(self, step: Step, values: dict, hook: Hook | None) -> None:
        arguments = step.arguments(values)
        if step.bodies:
            arguments["blocks"] = [
                partial(self._call, b, values, hook) for b in step.bodies
            ]
        _store(step, step.function(**arguments), values)

    def _call(self, body: Body, values: dict, hook, *arguments) -> list:
        """Runs a nested block: it sees the enclosing values, and its own stay
        inside."""
        inputs = dict(zip(body.inputs, arguments, strict=True))
        (outputs,) = self._run(body, [values | body.constants | inputs], [hook])
        return outputs

    def _dtype(self, declared: Type) -> torch.dtype | None:
        if declared.kind != "tensor" or declared.dtype == "STRING":
            return None
        if self.precision == "exact" and declared.dtype == "FLOAT16":
            return torch.float32
        return torch_dtype(declared.dtype)

    def _body(self, block: Block, fused: dict) -> Body:
        body = Body([name for name, _ in block.inputs], outputs=block.outputs)
        for op in block.ops:
            if op.key in fused:
                body.steps += fused[op.key]
            elif not op.constant:
                with refusing(self.program, op):
                    body.steps.append(self._step(op, body))
        for name in block.outputs:
            self._name(name, body)
        return body

    def _step(self, op: Op, body: Body) -> Step:
        rule, kind = OPERATIONS[op.kind], op.outputs[0][1].dtype if op.outputs else ""
        function = rule.function
        if op.kind == "read_state" and not self.cells.isdisjoint(op.reads()):
            function = detached
        if op.kind == "cast" and kind in NARROW_INTEGERS:
            function = self._watched(op, function)
        if self.precision == "narrow" and kind == "FLOAT16" and not op.blocks:
            function = narrowed(function)
        step = Step(op, function, [(n, self._dtype(t)) for n, t in op.outputs])
        native, exact = op.kind in NATIVE, self.precision == "exact"
        step.wide = not native and not exact
        for parameter, source in op.inputs.items():
            if parameter in TUPLES and not isinstance(source, list):
                source = [source]
            value, attribute = self.constants.of(source), parameter in rule.attributes
            if value is None:
                names = self._names(source, body, f"{op.name}.{parameter}")
                step.operands.append((parameter, names, attribute))
            elif attribute:
                step.constants[parameter] = python_value(value)
            elif (native and not exact) or is_matrix(op, parameter, value):
                step.constants[parameter] = value
            else:
                step.constants[parameter] = widened(value)
        step.bodies = [self._body(b, {}) for b in op.blocks]
        step.columnwise = is_columnwise(step)
        return step

    def _watched(self, op: Op, function: Callable) -> Callable:
        """A cast to few bits that warns, once for this executable, where it changes a
        value. coremltools puts such casts around gathers. MIL wraps the value around; a
        Mac has been seen to keep 40000 (coremltools' issue 2222), so that the right
        value is open."""
        declared = op.outputs[0][1].dtype
        limits = np.iinfo(NUMPY[declared])
        # not the executable itself, which a cycle would keep in memory
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

    def _names(self, source, body: Body, where: str):
        """What a value is called at run time, or each of a list; a literal among names
        becomes a constant of the block."""
        if isinstance(source, list):
            return [self._names(s, body, f"{where}.{i}") for i, s in enumerate(source)]
        if isinstance(source, Ref):
            return self._name(source.name, body)
        body.constants[where] = self._runtime(to_tensor(source))
        return where

    def _name(self, name: str, body: Body) -> str:
        if name in self.constants.ops:
            body.constants[name] = self._runtime(self.constants[name])
        return name

    def _runtime(self, value):
        """A constant as values of this precision are held."""
        return widened(value) if self.precision == "exact" else value


def _run_joined(step: Step, values: list[dict], joined: dict[str, Joined]) -> bool:
    """Runs a columnwise step for all calls at once; returns whether it could."""
    found = operands(step, values, joined)
    if not found:
        return False
    first = next(iter(found.values()))
    axis = result_axis(step, first.value.shape, first.axis)
    if axis is None:
        return False
    arguments = step.arguments({name: each.value for name, each in found.items()})
    own = {}
    _store(step, step.function(**arguments), own)
    for name, value in own.items():
        joined[name] = Joined(value, axis, first.sizes)
    return True


def _show(step: Step, values: list[dict], hooks, joined: dict[str, Joined]) -> None:
    """Calls the hooks with the results of a step, which they may replace."""
    names = [name for name, _ in step.outputs]
    separate(joined, names, values)
    for own, hook in zip(values, hooks):
        if hook is None:
            continue
        if replaced := hook(step.op, [widened(own[name]) for name in names]):
            _store(step, tuple(replaced), own)
            for name in names:
                joined.pop(name, None)


def _stages(body: Body, states: dict, count: int) -> list[tuple[bool, list[Step]]]:
    """The steps in their order, and whether calls run together there: between the first
    and the last access of a state, a call must not begin before the earlier call ends."""
    if count == 1:
        return [(True, body.steps)]
    accessed = [states.keys() & set(step.reads()) for step in body.steps]
    last = {name: i for i, names in enumerate(accessed) for name in names}
    busy_until, free = -1, []
    for index, names in enumerate(accessed):
        busy_until = max([busy_until, *(last[name] for name in names)])
        free.append(index > busy_until)
    groups = groupby(zip(free, body.steps), lambda pair: pair[0])
    return [(together, [step for _, step in group]) for together, group in groups]


def _store(step: Step, result, values: dict) -> None:
    """Puts the result of a step, or a tuple of results, into `values`, in their declared
    dtypes; raises a ValueError for too few, and a TypeError for fractions that are
    declared as integers, where nothing casts them."""
    results = result if isinstance(result, tuple) else (result,)
    if len(results) < len(step.outputs):
        raise ValueError(f"{len(results)} results of {len(step.outputs)}")
    # an operation may have no result
    for (name, dtype), value in zip(step.outputs, results):
        if dtype is not None and value.dtype is not dtype:
            given, value = value, value.to(dtype)
            floats = given.is_floating_point() and not dtype.is_floating_point
            if floats and step.op.kind != "cast" and not torch.equal(given, value):
                raise TypeError(f"{name} has fractions, and {dtype} is declared")
        values[name] = value


def detached(input):
    """The value of a state, which a fused step may write in place: a copy."""
    return input.value.clone()


def check_precision(precision: str) -> None:
    """Raises an InputError unless `precision` is one of `PRECISIONS`."""
    check_choice("precision", precision, PRECISIONS, "choose one of these")


def make_state(program: Program, precision: str = "declared") -> dict[str, StateCell]:
    """A fresh state: one cell of zeros per state tensor."""
    cells = {}
    for name, declared in program.states.items():
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


def refuse_unknown(program: Program) -> None:
    """Raises an InputError that names every operation of `program` without a rule, or a
    state that holds no floats (iOS 26 has some)."""
    kinds = {op.kind for op in program.block.walk()}
    missing = kinds - OPERATIONS.keys() - {"const"}
    if missing:
        raise InputError(
            str(program.package),
            f"operations without a rule: {', '.join(sorted(missing))}",
            "operations the portable runtime knows",
            "run it on a Mac, or add rules in miltorch/ops",
        )
    for name, kind in program.states.items():
        if not kind.dtype.startswith("FLOAT"):
            raise InputError(
                f"state {name!r} of {program.package}",
                f"dtype {kind.dtype}",
                "a state of floats",
                "run it on a Mac, or export it with float16 states",
            )


def check_names(program: Program, block: Block, known: set[str]) -> None:
    """Raises an InputError for a value that is read and that nothing before computes,
    or that is computed twice. `known`: the names that the block sees from around it."""
    known = known | dict(block.inputs).keys()
    for op in block.ops:
        _refuse_names(program, set(op.reads()) - known)
        for inner in op.blocks:
            check_names(program, inner, known)
        results = dict(op.outputs).keys()
        _refuse_names(program, results & known, "are computed twice")
        known |= results
    _refuse_names(program, set(block.outputs) - (known - program.states.keys()))


def _refuse_names(
    program: Program, names: set[str], fault: str = "nothing before them computes"
) -> None:
    if names:
        raise InputError(
            str(program.package),
            f"values {sorted(names)} that {fault}",
            "a whole program",
            "export the model again",
        )


def _drop_unread(body: Body) -> None:
    """Leaves out the steps whose results nothing reads and that write no state, and
    constants that no step reads by name."""
    needed, kept = set(body.outputs), []
    for step in reversed(body.steps):
        names = dict(step.outputs).keys()
        may_write = step.op.kind == "coreml_update_state" or step.bodies
        if not names or names & needed or may_write:
            needed.update(step.reads())
            kept.append(step)
    body.steps = kept[::-1]
    body.constants = {n: v for n, v in body.constants.items() if n in needed}


def _mark_dead(body: Body) -> None:
    """Notes at each step which results of this block's steps are read for the last time
    there, or never."""
    results = {name for step in body.steps for name, _ in step.outputs}
    later = set(body.outputs)
    for step in reversed(body.steps):
        for inner in step.bodies:
            _mark_dead(inner)
        read = {*step.reads(), *dict(step.outputs)}
        step.dead = sorted((read & results) - later)
        later |= read
