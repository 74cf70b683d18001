"""Runs a `Program` on PyTorch: every operation by its rule, every result rounded as the
precision mode says.

Precision modes
    declared  compute in float32, round each result once to the dtype MIL declares for it
    exact     float32 throughout; weights as stored (decompressed at their declared dtype)
    narrow    as declared, and sums that are declared fp16 are rounded to fp16 after every 32 terms:
              the pessimistic bound

One hook, called as `hook(op, outputs)` after each operation, sees every intermediate
and may replace it: taps, profiles, range traces and interventions are all this hook.
None costs nothing."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from miltorch.errors import InputError, check_choice
from miltorch.ops import MAX_ELEMENTS, OPERATIONS, TUPLES
from miltorch.ops.compression import half_by_rows
from miltorch.ops.state import StateCell
from miltorch.program import NUMPY, Block, Op, Program, Ref, Type, refs

PRECISIONS = ("declared", "exact", "narrow")
# change no value
MOVES = {
    "reshape",
    "transpose",
    "slice_by_index",
    "concat",
    "split",
    "squeeze",
    "expand_dims",
    "identity",
}
# each element of a result is one of an operand's, or its magnitude: rounded already
PICKS = MOVES | {"abs", "reduce_max", "reduce_min", "slice_update"}
Hook = Callable[[Op, list], list | None]
# for unsigned types, which torch hardly supports
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
# declared dtype → dtype of the torch tensor, for booleans and integers
_INTEGER = {
    name: getattr(torch, _WIDER.get(np.dtype(dtype).name, np.dtype(dtype).name))
    for name, dtype in NUMPY.items()
    if np.dtype(dtype).kind in "biu"
}


def _to_tensor(literal) -> object:
    """A literal as rules take it: floats in float32, strings as they are, lists element
    by element."""
    if isinstance(literal, list):
        return [_to_tensor(v) for v in literal]
    if not isinstance(literal, np.ndarray):
        return literal
    if literal.dtype.kind == "f":
        literal = literal.astype(np.float32)
    elif literal.dtype.kind == "u" and literal.dtype.itemsize > 1:
        literal = literal.astype(np.int64)
    else:  # a view of one number would keep the whole file of weights mapped
        literal = literal.copy()
    return torch.from_numpy(literal)


def _python_value(value):
    """A value as an attribute: Python numbers, bools, strings, or lists of them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_python_value(v) for v in value]
    return value


@dataclass
class Step:
    """An operation bound to its rule: its constant arguments, the names of the others,
    and how to store its results."""

    op: Op
    function: Callable
    # name, what brings a result to its declared type
    outputs: list[tuple[str, Callable]]
    constants: dict[str, object] = field(default_factory=dict)
    # parameter, value name(s), is attribute
    operands: list[tuple[str, str | list[str], bool]] = field(default_factory=list)
    bodies: list["Body"] = field(default_factory=list)
    # values that nothing after this step reads
    dead: list[str] = field(default_factory=list)


@dataclass
class Body:
    """The steps of a block. `constants` are its own; it also sees the values of the
    blocks around it."""

    inputs: list[str]
    steps: list[Step] = field(default_factory=list)
    constants: dict[str, object] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


class Executable:
    """A program bound to a precision mode. Stateless: inputs and state cells in,
    outputs out.

    Args:
        program: what to run.
        precision: `declared`, `exact` or `narrow`.
        builder: turns blocks into bodies, with the executable as its one argument
            (default: `Builder`).

    Raises:
        InputError: naming every unsupported operation at once, before anything runs.
    """

    def __init__(
        self,
        program: Program,
        precision: str = "declared",
        builder: Callable | None = None,
    ):
        check_precision(precision)
        refuse_unknown(program)
        self.program, self.precision = program, precision
        self.fits = {name: self._fit(t) for name, t in program.inputs.items()}
        self.body = (builder or Builder)(self).body(
            program.block, dict.fromkeys([*program.inputs, *program.states])
        )

    def constant(self, name: str) -> torch.Tensor:
        """A constant of the program, decompressed, float32."""
        return self.body.constants[name].float()

    def make_state(self) -> dict[str, StateCell]:
        return make_state(self.program)

    @torch.inference_mode()
    def run(
        self,
        inputs: dict[str, torch.Tensor],
        state: dict[str, StateCell],
        hook: Hook | None = None,
    ) -> dict:
        """Runs the program once; `state` is advanced, `inputs` are rounded to their
        declared dtype first.

        Raises:
            InputError: inputs or states that are missing or of another shape than
                declared, an operation that cannot take its operands; names what and
                where.
        """
        values = self.body.constants | state | self.operands(inputs, state)
        return dict(
            zip(self.program.outputs, self._run(self.body, values, hook), strict=True)
        )

    def operands(
        self, inputs: dict[str, torch.Tensor], state: dict[str, StateCell]
    ) -> dict[str, torch.Tensor]:
        """The inputs in their declared types.

        Raises:
            InputError: an input or a state is missing, or has another shape than the
                program declares.
        """
        missing = [n for n in self.fits if n not in inputs]
        missing += [n for n in self.program.states if n not in state]
        if missing:
            raise InputError(
                str(self.program.package),
                f"no {', '.join(missing)}",
                "every input and state",
                "give all of them",
            )
        values = {}
        for name, fit in self.fits.items():
            try:
                values[name] = fit(inputs[name])
            except ValueError as problem:
                raise InputError(
                    f"input {name!r}", str(problem), "the declared shape", "reshape it"
                ) from problem
        for name, declared in self.program.states.items():
            shape = state[name].value.shape
            if shape != declared.shape:
                raise InputError(
                    f"state {name!r}",
                    f"shape {list(shape)}",
                    f"{list(declared.shape)}",
                    "pass a state from make_state of this program",
                )
        return values

    def _run(self, body: Body, values: dict, hook: Hook | None) -> list:
        self.run_steps(body.steps, values, hook)
        return [values[name] for name in body.outputs]

    def run_steps(self, steps: Sequence[Step], values: dict, hook: Hook | None) -> None:
        """Runs `steps` on `values` by name, in place."""
        for step in steps:
            try:
                arguments = step.constants.copy()
                for parameter, source, attribute in step.operands:
                    value = (
                        values[source]
                        if source.__class__ is str
                        else [values[n] for n in source]
                    )
                    arguments[parameter] = _python_value(value) if attribute else value
                if step.bodies:
                    arguments["blocks"] = [
                        partial(self._call, b, values, hook) for b in step.bodies
                    ]
                result = step.function(**arguments)
                results = result if result.__class__ is tuple else (result,)
                if len(results) < len(step.outputs):
                    raise ValueError(f"{len(results)} results of {len(step.outputs)}")
                # an operation may have no result
                for (name, fit), value in zip(step.outputs, results):
                    values[name] = fit(value)
            except InputError:
                raise
            # torch raises many kinds where operands do not fit
            except Exception as problem:
                raise failure(self.program, step.op, problem) from problem
            finish(step, values, hook)

    def _call(self, body: Body, values: dict, hook, *arguments) -> list:
        """Runs a nested block: it sees the enclosing values, and its own stay
        inside."""
        inputs = dict(zip(body.inputs, arguments, strict=True))
        return self._run(body, values | body.constants | inputs, hook)

    def _fit(
        self, declared: Type, rounded: bool = False, loose: bool = False
    ) -> Callable:
        """What brings a value to its declared type as this mode keeps it, unless it is
        `rounded` to it already; a wrong shape raises ValueError unless the declared one
        is `loose` (see `loose_shapes`)."""
        if declared.kind != "tensor" or declared.dtype == "STRING":
            return lambda value: value
        half = declared.dtype == "FLOAT16" and self.precision != "exact" and not rounded
        dtype = _INTEGER.get(declared.dtype, torch.float32)
        shape = declared.shape
        # no size is known: results of any rank pass
        unknown = loose or (len(shape) > 0 and set(shape) == {None})

        # a call meets the same few shapes again and again
        accepted: set[torch.Size] = set()

        def fit(value: torch.Tensor) -> torch.Tensor:
            if not unknown and value.shape not in accepted:
                if not _agrees(value.shape, shape):
                    raise ValueError(
                        f"shape {list(value.shape)} where {list(shape)} is declared"
                    )
                accepted.add(value.shape)
            if half:
                return value.half().float()
            if value.dtype is dtype:
                return value
            return value.to(dtype)

        return fit


def _agrees(shape: torch.Size, declared: tuple[int | None, ...]) -> bool:
    """Whether a shape has the declared rank, and the declared sizes where they are
    known."""
    return len(shape) == len(declared) and all(
        size in (None, n) for n, size in zip(shape, declared, strict=True)
    )


def check_precision(precision: str) -> None:
    """Raises an InputError unless `precision` is one of `PRECISIONS`."""
    check_choice("precision", precision, PRECISIONS, "choose one of these")


def make_state(program: Program) -> dict[str, StateCell]:
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
        cells[name] = StateCell(torch.zeros(declared.shape))
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


class Builder:
    """Turns the blocks of one executable into bodies: decompresses constants, checks
    names, notes the last read of values."""

    def __init__(self, executable: Executable):
        self.executable = executable
        self.half = _matrices(executable.program.block)
        self.loose = loose_shapes(executable.program)

    def body(self, block: Block, scope: dict) -> Body:
        """`scope`: the values that the block sees from around it, constants with their
        value, others as None."""
        body = Body([name for name, _ in block.inputs], outputs=block.outputs)
        scope = scope | dict.fromkeys(body.inputs)
        for op in block.ops:
            try:
                self._add(op, scope, body)
            except InputError:
                raise
            except Exception as problem:  # whatever a damaged operation leads to
                raise failure(self.executable.program, op, problem) from problem
            for name, _ in op.outputs:
                scope.setdefault(name)
        self._check(scope.keys() - self.executable.program.states.keys(), block.outputs)
        _mark_dead(body)
        return body

    def _add(self, op: Op, scope: dict, body: Body) -> None:
        if op.kind == "const":
            (name, _), value = op.outputs[0], op.inputs["val"]
            if name in self.half and value.dtype == np.float16:
                value = torch.from_numpy(np.array(value))
            else:
                value = _to_tensor(value)
            scope[name] = body.constants[name] = value
        elif op.constant:
            self._fold(self._step(op, scope, body), scope, body)
        else:
            body.steps.append(self._step(op, scope, body))

    def _check(self, names, reads) -> None:
        unknown = [name for name in reads if name not in names]
        if unknown:
            raise InputError(
                str(self.executable.program.package),
                f"values {unknown} that nothing before them computes",
                "a whole program",
                "export the model again",
            )

    def _step(self, op: Op, scope: dict, body: Body) -> Step:
        rule = OPERATIONS[op.kind]
        function = rule.function
        narrow = self.executable.precision == "narrow" and rule.narrow
        if narrow and op.outputs[0][1].dtype == "FLOAT16":
            function = rule.narrow
        outputs = [
            (name, self.executable._fit(t, op.kind in PICKS, name in self.loose))
            for name, t in op.outputs
        ]
        step = Step(op, function, outputs)
        for parameter, source in op.inputs.items():
            if parameter in TUPLES and not isinstance(source, list):
                source = [source]
            value, attribute = _literal(source, scope), parameter in rule.attributes
            if value is None:
                names = self._names(source, scope, body, f"{op.name}.{parameter}")
                step.operands.append((parameter, names, attribute))
            elif attribute:
                step.constants[parameter] = _python_value(value)
            else:
                step.constants[parameter] = value
        step.bodies = [self.body(b, scope) for b in op.blocks]
        return step

    def _names(self, source, scope: dict, body: Body, where: str) -> str | list[str]:
        """What a value is called at run time; a literal among names becomes a constant
        of the block."""
        if isinstance(source, list):
            return [
                self._names(s, scope, body, f"{where}.{i}")
                for i, s in enumerate(source)
            ]
        if isinstance(source, Ref):
            self._check(scope, [source.name])
            return source.name
        body.constants[where] = _to_tensor(source)
        return where

    def _fold(self, step: Step, scope: dict, body: Body) -> None:
        """Decompresses a weight once, at load, and rounds it to its declared dtype in
        every mode."""
        result = half_by_rows(step.op, step.function, step.constants)
        if result is None:
            result = step.function(**step.constants)
        results = result if isinstance(result, tuple) else (result,)
        for (name, declared), value in zip(step.op.outputs, results, strict=True):
            if declared.dtype == "FLOAT16":
                value = value.half()
            if name not in self.half:
                value = self.executable._fit(declared)(value.float())
            scope[name] = body.constants[name] = value


class ConstantsBuilder(Builder):
    """Makes the constants of a program and leaves its steps out."""

    def _add(self, op: Op, scope: dict, body: Body) -> None:
        if op.kind == "const" or op.constant:
            super()._add(op, scope, body)


def loose_shapes(program: Program) -> set[str]:
    """Results whose declared shape is not the one that they have when they run.

    coremltools 9.0 declares the shape of a `select` to be that of its branches,
    whatever that of its condition, which broadcasts: `torch.where(condition, 0.0,
    -1e4)` with sizes that vary is declared a scalar. What is computed from such a
    result is declared too small as well, up to an operation with another operand of the
    declared shape."""
    types, loose, constants = program.inputs | program.states, set(), set()

    def shape(source) -> tuple:
        if not isinstance(source, Ref):
            return np.shape(source)
        if source.name in types:
            return types[source.name].shape
        return ()

    for op in program.block.walk():
        operands = set(op.reads())
        sure = (operands - loose - constants) & types.keys()
        for name, declared in op.outputs:
            if op.kind == "select":
                shapes = [shape(op.inputs.get(x)) for x in ("cond", "a", "b")]
                small = any(_exceeds(other, declared.shape) for other in shapes)
            else:
                shapes = [types[other].shape for other in sure]
                small = bool(operands & loose) and declared.shape not in shapes
            if small:
                loose.add(name)
            if op.constant:
                constants.add(name)
        types.update(op.outputs)
        for block in op.blocks:
            types.update(block.inputs)
    return loose


def _exceeds(shape: tuple, declared: tuple) -> bool:
    """Whether a shape does not broadcast to a declared one: more axes, or a size where
    1 is said."""
    pairs = zip(reversed(shape), reversed(declared))
    return len(shape) > len(declared) or any(m == 1 != n for n, m in pairs)


def _matrices(block: Block) -> set[str]:
    """fp16 constants that only convolutions of 1×1 read, as their weights: they stay
    fp16, whatever computes with them."""
    small, weights, others = set(), set(), set(block.outputs)
    for op in block.walk():
        for name, kind in op.outputs:
            if kind.dtype == "FLOAT16" and set(kind.shape[2:]) == {1}:
                small.add(name)
        for parameter, source in op.inputs.items():
            names = {ref.name for ref in refs(source)}
            if (op.kind, parameter) == ("conv", "weight"):
                weights |= names
            else:
                others |= names
        for inner in op.blocks:
            others.update(inner.outputs)
    return small & (weights - others)


def finish(step: Step, values: dict, hook: Hook | None) -> None:
    """Calls the hook after a step whose results are in `values`, and releases values
    that nothing reads any more."""
    if hook is not None:
        results = hook(step.op, [values[name] for name, _ in step.outputs])
        for (name, _), value in zip(step.outputs, results or (), strict=bool(results)):
            values[name] = value
    for name in step.dead:
        del values[name]


def failure(program: Program, op: Op, problem: Exception) -> InputError:
    """The error of an operation that cannot take its operands."""
    return InputError(
        f"{op.kind} {op.name!r}",
        f"{type(problem).__name__}: {problem}",
        "operands this operation accepts",
        f"check the inputs, then export {program.package.name} again",
    )


def _literal(source, scope: dict):
    """The value of a constant argument, else None."""
    if isinstance(source, Ref):
        return scope.get(source.name)
    if not refs(source):
        return _to_tensor(source)
    values = [_literal(s, scope) for s in source]
    if any(value is None for value in values):
        return None
    return values


def read_names(body: Body) -> Iterator[str]:
    """Every name that running `body` looks up."""
    yield from body.outputs
    for step in body.steps:
        for _, source, _ in step.operands:
            yield from [source] if isinstance(source, str) else source
        for inner in step.bodies:
            yield from read_names(inner)


def _mark_dead(body: Body) -> None:
    """Notes at each step which results of this block's steps are read for the last time
    there, or never."""
    results = {name for step in body.steps for name, _ in step.outputs}
    later = set(body.outputs)
    for step in reversed(body.steps):
        read = set(read_names(Body([], [step]))) | {name for name, _ in step.outputs}
        step.dead = sorted((read & results) - later)
        later |= read
