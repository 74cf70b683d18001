"""Runs one program for several calls that are known from the start, such as those of a
prompt.

Most operations of a transformer compute each token's column from that column alone:
products with a weight, norms, rotary embedding, the MLP. Such a step runs once for the
columns of all calls together, so that a weight is read once. Steps that access a state,
and all that are not known to be columnwise, run for one call after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch

from miltorch.interpret import Body, Executable, Hook, Step, loose_shapes, read_names
from miltorch.ops.state import StateCell

COLUMNS = 256  # of all calls that run together: bounds the memory of their values
ELEMENTWISE = set(
    """abs add cast clip cos exp gelu identity inverse log maximum minimum mul pow
real_div relu rsqrt sigmoid silu sin softplus sqrt square sub tanh""".split()
)


def run_calls(
    executable: Executable,
    calls: Sequence[dict[str, torch.Tensor]],
    states: Sequence[dict[str, StateCell]],
    hooks: Sequence[Hook | None],
) -> list[dict[str, torch.Tensor]]:
    """Results of `executable.run` for one call's inputs after another, each on its
    state, which may be that of other calls, and with a hook of its own.

    Every call's operations, roundings and hooks are those of `run`, and so is the order
    of all reads and writes of a state. Sums over more columns at once may add up their
    terms in another order."""
    if len(calls) > 1 and executable not in _STAGES:
        _STAGES[executable] = _stages(executable)
    stages = _STAGES[executable] if len(calls) > 1 else []
    if not any(stage.axes for stage in stages):
        return list(map(executable.run, calls, states, hooks))
    results = []
    while len(results) < len(calls):
        first, columns = len(results), 0
        group = []
        for inputs in calls[first:]:
            columns += _columns(executable, inputs)
            if group and columns > COLUMNS:
                break
            group.append(inputs)
        own = slice(first, first + len(group))
        results += _run_together(executable, stages, group, states[own], hooks[own])
    return results


@dataclass
class _Stage:
    """Steps that follow each other. `axes`: the axis of columns, counted from the end,
    of every value that columnwise steps read or compute; None for steps that run call
    by call."""

    steps: list[Step]
    reads: set[str]
    axes: dict[str, int] | None


# of executables that have run several calls
_STAGES: WeakKeyDictionary[Executable, list[_Stage]] = WeakKeyDictionary()


class _Values:
    """Values of several calls by name: `each` of one call, `joined` of all of them, one
    behind another along the axis of columns."""

    def __init__(self, executable: Executable, calls, states, axes: dict[str, int]):
        self.each = []
        for inputs, state in zip(calls, states, strict=True):
            operands = executable.operands(inputs, state)
            self.each.append(executable.body.constants | state | operands)
        self.joined, self.axes = dict(executable.body.constants), axes
        self.counts = [_columns(executable, inputs) for inputs in calls]

    def cat(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, self.axes[name])

    def split(self, name: str, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The part of each call. A call's share of the columns is that of its tokens,
        also where each token has several columns (one per head)."""
        per_token = value.shape[self.axes[name]] // sum(self.counts)
        return value.split([n * per_token for n in self.counts], self.axes[name])

    def join(self, names: set[str]) -> None:
        for name in names - self.joined.keys():
            self.joined[name] = self.cat(name, [values[name] for values in self.each])

    def separate(self, names: set[str]) -> None:
        for name in names & self.joined.keys() - self.each[0].keys():
            parts = self.split(name, self.joined[name])
            for values, part in zip(self.each, parts, strict=True):
                values[name] = part

    def release(self, names: set[str]) -> None:
        for values in (self.joined, *self.each):
            for name in names & values.keys():
                del values[name]

    def hook(self, hooks: Sequence[Hook | None]) -> Hook | None:
        """A hook of joined values that calls each call's own with that call's part."""

        def of_all(op, outputs: list) -> list | None:
            names = [name for name, _ in op.outputs]
            parts = list(zip(*map(self.split, names, outputs), strict=True))
            replaced = False
            for i, own_hook in enumerate(hooks):
                values = own_hook and own_hook(op, list(parts[i]))
                if values:
                    parts[i], replaced = values, True
            if not replaced:
                return None
            return list(map(self.cat, names, zip(*parts, strict=True)))

        return of_all if any(hooks) else None


@torch.inference_mode()
def _run_together(
    executable: Executable,
    stages: list[_Stage],
    calls: Sequence[dict[str, torch.Tensor]],
    states: Sequence[dict[str, StateCell]],
    hooks: Sequence[Hook | None],
) -> list[dict[str, torch.Tensor]]:
    axes = next(stage.axes for stage in stages if stage.axes)
    values = _Values(executable, calls, states, axes)
    for stage in stages:
        if stage.axes:
            values.join(stage.reads)
            executable.run_steps(stage.steps, values.joined, values.hook(hooks))
        else:
            values.separate(stage.reads)
            for own_values, own_hook in zip(values.each, hooks, strict=True):
                executable.run_steps(stage.steps, own_values, own_hook)
        values.release({name for step in stage.steps for name in step.dead})
    outputs = executable.body.outputs
    values.separate(set(outputs))
    results = []
    for own_values in values.each:
        tensors = [own_values[name] for name in outputs]
        results.append(dict(zip(executable.program.outputs, tensors, strict=True)))
    return results


def _columns(executable: Executable, inputs: dict[str, torch.Tensor]) -> int:
    """Columns of a call: the size of the flexible axis of its inputs."""
    for name, declared in executable.program.inputs.items():
        if None in declared.shape:
            return inputs[name].shape[declared.shape.index(None)]
    return 1


def _stages(executable: Executable) -> list[_Stage]:
    """The steps of a program in their order.

    Between the first and the last access of a state, steps run call by call: there a
    call must not begin before the earlier call ends."""
    body, program = executable.body, executable.program
    shapes = _shapes(executable)
    axes = {name: _axis(shape) for name, shape in shapes.items()}
    accessed = [program.states.keys() & _reads([step]) for step in body.steps]
    last = {name: i for i, names in enumerate(accessed) for name in names}
    together, busy_until = [], -1
    for index, (step, names) in enumerate(zip(body.steps, accessed, strict=True)):
        busy_until = max([busy_until, *(last[name] for name in names)])
        together.append(index > busy_until and _is_columnwise(step, shapes, body))
    stages = []
    for columnwise, group in groupby(zip(together, body.steps), lambda pair: pair[0]):
        steps = [step for _, step in group]
        stages.append(_Stage(steps, _reads(steps), axes if columnwise else None))
    return stages


def _reads(steps: list[Step]) -> set[str]:
    """Names that `steps` look up before one of them computes them."""
    computed, names = set(), set()
    for step in steps:
        names |= set(read_names(Body([], [step]))) - computed
        computed.update(dict(step.outputs))
    return names


def _shapes(executable: Executable) -> dict[str, tuple[int | None, ...]]:
    """The declared shape of every value that has columns: one axis of flexible size."""
    program = executable.program
    types = program.inputs | dict(o for op in program.block.ops for o in op.outputs)
    loose = loose_shapes(program)
    return {
        name: kind.shape
        for name, kind in types.items()
        if kind.kind == "tensor" and kind.shape.count(None) == 1 and name not in loose
    }


def _is_columnwise(step: Step, shapes: dict[str, tuple], body: Body) -> bool:
    """Whether a step computes each column of its results from that column of its
    variable operands alone."""
    results = [name for name, _ in step.outputs]
    variable = []
    for _, source, attribute in step.operands:
        names = [source] if isinstance(source, str) else source
        variable += [name for name in names if name not in body.constants]
        if attribute:
            return False
    if step.bodies or not variable or not shapes.keys() >= {*variable, *results}:
        return False
    kind = step.op.kind
    if kind in ELEMENTWISE or kind == "concat":
        axes = {_axis(shapes[name]) for name in (*variable, *results)}
        if len(axes) > 1:
            return False
    x, y = shapes[variable[0]], shapes[results[0]]
    return kind in ELEMENTWISE or (kind in RULES and RULES[kind](step.constants, x, y))


def _axis(shape: tuple[int | None, ...]) -> int:
    """The axis of columns, counted from the end, as broadcasting does."""
    return shape.index(None) - len(shape)


# Rules: the constant operands, the declared shapes of `x` and of the first result →
# whether the operation is columnwise.


def _conv(constants: dict, x: tuple, y: tuple) -> bool:
    """A 1×1 convolution is a product of a weight with every column."""
    weight = constants.get("weight")
    return (
        weight is not None
        and weight.shape[2:].numel() == 1
        and x.index(None) >= 2
        and constants.get("groups", 1) == 1
        and max(constants.get("strides") or [1]) == 1
        and constants.get("pad_type", "valid") == "valid"
    )


def _along(constants: dict, x: tuple, y: tuple) -> bool:
    """Sums, softmax, concat and split along other axes than the columns'."""
    along = constants.get("axes", constants.get("axis"))
    along = [along] if isinstance(along, int) else along
    if not along or not constants.get("keep_dims", len(x) == len(y)):
        return False
    return all(axis % len(x) != x.index(None) for axis in along)


def _slice(constants: dict, x: tuple, y: tuple) -> bool:
    """A slice of every column."""
    axis = x.index(None)
    masks = [constants.get(f"{name}_mask") for name in ("begin", "end", "squeeze")]
    begin, end, squeeze = (mask or [False] * len(x) for mask in masks)
    return (
        (begin[axis] or constants["begin"][axis] == 0)
        and end[axis]
        and (constants.get("stride") or [1] * len(x))[axis] == 1
        and not any(squeeze)
    )


def _transpose(constants: dict, x: tuple, y: tuple) -> bool:
    return constants["perm"][y.index(None)] % len(x) == x.index(None)


def _reshape(constants: dict, x: tuple, y: tuple) -> bool:
    """A reshape that regroups axes before the columns' and axes behind it apart."""
    before, after = x.index(None), y.index(None)
    return (
        constants["shape"][after] == -1
        and math.prod(x[:before]) == math.prod(y[:after])
        and math.prod(x[before + 1 :]) == math.prod(y[after + 1 :])
    )


REDUCTIONS = dict.fromkeys(("reduce_max", "reduce_mean", "reduce_sum"), _along)
RULES = REDUCTIONS | {
    "concat": _along,
    "conv": _conv,
    "reshape": _reshape,
    "slice_by_index": _slice,
    "softmax": _along,
    "split": _along,
    "transpose": _transpose,
}
