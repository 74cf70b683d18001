"""Several calls of one program, run so that each weight is read once for all of them.

A token is a column: one entry along one axis of a value. Axes are counted from the end.
Where every column of a result comes from the same column of the operands alone, one step
computes the columns of several calls, one call behind another."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch

from miltorch.execute import Executable, Hook, show
from miltorch.ops import elementwise
from miltorch.ops.registry import rules, window
from miltorch.ops.state import StateCell
from miltorch.program import Program, operation_errors
from miltorch.steps import Body, Step, is_pointwise_weight

# elementwise operations, without the two that take a vector over the channels
POINTWISE = rules(elementwise).keys() - {"prelu", "softplus_parametric"}
NO_VALUE = torch.zeros(())
MORE_THAN_ANY_SIZE = 1 << 40
# elements of the inputs of the calls of a batch, approximately: bounds their memory
BATCH_ELEMENTS = 1 << 20


class Call(NamedTuple):
    """One run of a program."""

    inputs: dict[str, torch.Tensor]
    state: dict[str, StateCell]
    hook: Hook | None


class JoinedValue(NamedTuple):
    """The values of several calls, one behind another along `axis`; `sizes` has the number of
    columns of each call."""

    value: torch.Tensor
    axis: int
    sizes: tuple[int, ...]

    def has_columns_of(self, other: "JoinedValue") -> bool:
        """Whether the columns of both lie along one axis and belong to the same calls."""
        return (self.axis, self.sizes) == (other.axis, other.sizes)


@torch.inference_mode()
def run_calls(
    executable: Executable,
    inputs: Sequence[dict[str, torch.Tensor]],
    states: Sequence[dict[str, StateCell]],
    hooks: Sequence[Hook | None],
) -> list[dict[str, torch.Tensor]]:
    """The results of `executable.run` for one call after another, each on its state,
    which may be that of other calls, and with a hook of its own.

    Every step of every call, and the order in which a state is read and written, are
    those of `run`. Before and behind the steps that access states, a step computes the
    columns of several calls at once where no column depends on another, so that a
    weight is read once. Sums may add up in another order."""
    every_call = [Call(*parts) for parts in zip(inputs, states, hooks, strict=True)]
    results = []
    for calls in _batches(every_call):
        if len(calls) == 1:
            results.append(executable.run(*calls[0]))
        else:
            results += JoinedCalls(executable, calls).run()
    return results


def _batches(calls: list[Call]) -> Iterator[list[Call]]:
    """The calls that run together, in order."""
    # Calls stay in their order, because each may read a state that the one before wrote. A
    # batch ends where the sum over all calls so far passes a multiple of BATCH_ELEMENTS. It
    # may be larger than that by its first call, because no call is split.
    batch, batch_number, total = [], 0, 0
    for call in calls:
        total += sum(x.numel() for x in call.inputs.values())
        number = total // BATCH_ELEMENTS
        if batch and number > batch_number:
            yield batch
            batch = []
        batch_number = number
        batch.append(call)
    if batch:
        yield batch


class JoinedCalls:
    """Calls that run together.

    Attributes:
        values: what the steps of each call read, by name.
        joined: values of all calls as one, by name.
    """

    def __init__(self, executable: Executable, calls: list[Call]):
        self.executable = executable
        self.hooks = [call.hook for call in calls]
        self.values = [
            executable.initial_values(call.inputs, call.state) for call in calls
        ]
        self.joined: dict[str, JoinedValue] = {}
        for name, declared in executable.program.inputs.items():
            # the axis that may have any size is that of the columns
            if declared.shape.count(None) == 1:
                axis = declared.shape.index(None) - len(declared.shape)
                if value := self.join(name, axis):
                    self.joined[name] = value

    def run(self) -> list[dict[str, torch.Tensor]]:
        """The outputs of every call."""
        body = self.executable.body
        for stage in _stages(body, self.executable.program):
            if stage.is_joint:
                for step in stage.steps:
                    self.run_step(step)
                continue
            # a call must read what the one before it wrote: all steps of one, then the next
            self.separate(chain.from_iterable(step.reads() for step in stage.steps))
            for values, hook in zip(self.values, self.hooks):
                for step in stage.steps:
                    self.executable.run_step(step, values, hook)
        self.separate(body.outputs)
        return list(map(self.executable.outputs, self.values))

    def run_step(self, step: Step) -> None:
        """Runs a step for all calls at once; where that is impossible, for one call after
        another."""
        with operation_errors(self.executable.program, step.op):
            ran_jointly = is_columnwise(step) and self.run_columnwise(step)
        if ran_jointly:
            self.show(step)
        else:
            self.separate(step.reads())
            for values, hook in zip(self.values, self.hooks):
                self.executable.run_step(step, values, hook)
        for name in step.dead:
            for values in (self.joined, *self.values):
                values.pop(name, None)

    def run_columnwise(self, step: Step) -> bool:
        """Runs a step on the columns of all calls; returns whether it could."""
        operands = self.operands(step)
        if not operands:
            return False
        first = next(iter(operands.values()))
        axis = result_axis(step, first.value.shape, first.axis)
        if axis is None:
            return False
        arguments = {name: operand.value for name, operand in operands.items()}
        results = {}
        step.store(step.function(**step.arguments(arguments)), results)
        for name, value in results.items():
            self.joined[name] = JoinedValue(value, axis, first.sizes)
        return True

    def operands(self, step: Step) -> dict[str, JoinedValue] | None:
        """The operands of a step, joined along one axis, that of a joined value or the
        first spatial axis of a convolution; None where they cannot be joined."""
        names = list(step.reads())
        first = next((self.joined[name] for name in names if name in self.joined), None)
        if first is None and step.op.kind == "conv":
            rank = self.values[0][names[0]].dim()
            first = self.join(names[0], 2 - rank)
        if first is None:
            return None
        operands = {}
        for name in names:
            operand = self.joined.get(name) or self.join(name, first.axis)
            if operand is None or not operand.has_columns_of(first):
                return None
            operands[name] = operand
        return operands

    def join(self, name: str, axis: int) -> JoinedValue | None:
        """The values of all calls by a name; None where they differ in another axis."""
        parts = [values[name] for values in self.values]
        if min(part.dim() for part in parts) < -axis:
            return None
        if len({part.movedim(axis, 0).shape[1:] for part in parts}) > 1:
            return None
        sizes = tuple(part.shape[axis] for part in parts)
        return JoinedValue(torch.cat(parts, axis), axis, sizes)

    def separate(self, names: Iterable[str]) -> None:
        """Gives every call its own columns of the joined values `names`, unless it has
        them."""
        for name in names:
            if name not in self.joined or name in self.values[0]:
                continue
            value, axis, sizes = self.joined[name]
            parts = value.split(sizes, axis)
            for values, part in zip(self.values, parts, strict=True):
                values[name] = part

    def show(self, step: Step) -> None:
        """Calls the hooks with the results of a step, which they may replace."""
        if not any(self.hooks):
            return
        names = [name for name, _ in step.outputs]
        self.separate(names)
        for values, hook in zip(self.values, self.hooks):
            if hook and show(step, values, hook):
                for name in names:
                    self.joined.pop(name, None)


class Stage(NamedTuple):
    """Steps that follow one another.

    Attributes:
        is_joint: whether each step may run for all calls at once. Otherwise a call runs all
            of these steps before the next call begins.
    """

    is_joint: bool
    steps: list[Step]


def _stages(body: Body, program: Program) -> Iterator[Stage]:
    """The steps in their order. From the first to the last access of a state they are not
    joint: there a call must read what the call before it wrote."""
    # for each step, the states that it accesses
    accessed = [program.states.keys() & set(step.reads()) for step in body.steps]
    last = {name: index for index, names in enumerate(accessed) for name in names}
    # the last step that accesses any of the states which steps so far access
    busy_until = -1
    is_joint = []
    for index, names in enumerate(accessed):
        busy_until = max([busy_until, *(last[name] for name in names)])
        is_joint.append(index > busy_until)
    pairs = zip(is_joint, body.steps)
    for stage_is_joint, stage_pairs in groupby(pairs, lambda pair: pair[0]):
        yield Stage(stage_is_joint, [step for _, step in stage_pairs])


def is_columnwise(step: Step) -> bool:
    """Whether `result_axis` knows the operation and its attributes are constant. A
    convolution must be a 1×1 one with a constant weight."""
    kind = step.op.kind
    if any(operand.is_attribute for operand in step.operands):
        return False
    if kind != "conv":
        return kind in POINTWISE or kind in AXIS_AFTER
    constants = step.constants
    return (
        [operand.parameter for operand in step.operands] == ["x"]
        and is_pointwise_weight(step.op, "weight", constants.get("weight", NO_VALUE))
        and max(constants.get("strides") or [1]) == 1
        and constants.get("groups", 1) == 1
        and not any(constants.get("pad") or [])
    )


def result_axis(step: Step, shape: torch.Size, axis: int) -> int | None:
    """The axis of the columns of a step's results; None where a result may mix columns.

    Column i of a result must be computed from column i of every operand alone.

    Args:
        shape: of the first operand.
        axis: of the columns of every operand, from the end.
    """
    if step.op.kind in POINTWISE:
        return _axis_after_pointwise(step.constants, shape, axis)
    return AXIS_AFTER[step.op.kind](step.constants, shape, axis)


def _axis_after_pointwise(constants: dict, shape: torch.Size, axis: int) -> int | None:
    # a constant operand may have one value for all columns, not one for each
    tensors = [v for v in constants.values() if isinstance(v, torch.Tensor)]
    serves_all = all(v.dim() < -axis or v.shape[axis] == 1 for v in tensors)
    return axis if serves_all else None


def _axis_after_transpose(constants: dict, shape: torch.Size, axis: int) -> int:
    order = [p % len(shape) for p in constants["perm"]]
    return order.index(axis + len(shape)) - len(shape)


def _axis_after_reshape(constants: dict, shape: torch.Size, axis: int) -> int | None:
    """The axis of unknown size, where a reshape keeps the elements before and behind the
    axis of the columns."""
    sizes = constants["shape"]
    if -1 not in sizes:
        return None
    axis_from_front = axis + len(shape)
    before, behind = shape[:axis_from_front], shape[axis_from_front + 1 :]
    new = sizes.index(-1)
    products = math.prod(sizes[:new]), math.prod(sizes[new + 1 :])
    return new - len(sizes) if products == (before.numel(), behind.numel()) else None


def _axis_after_convolution(
    constants: dict, shape: torch.Size, axis: int
) -> int | None:
    # axis 1 has the channels, which a convolution mixes
    return axis if axis + len(shape) != 1 else None


def _axis_after_slice(constants: dict, shape: torch.Size, axis: int) -> int | None:
    index = window(**constants)
    # an index in place of a slice drops its axis, and the others move
    if not all(isinstance(piece, slice) for piece in index):
        return None
    window_of_columns = index[axis + len(shape)].indices(MORE_THAN_ANY_SIZE)
    takes_every_column = window_of_columns == (0, MORE_THAN_ANY_SIZE, 1)
    return axis if takes_every_column else None


def _axis_after_operation_along(
    constants: dict, shape: torch.Size, axis: int
) -> int | None:
    along = constants.get("axis", axis)
    return None if along in (axis, axis + len(shape)) else axis


def _axis_after_reduction(constants: dict, shape: torch.Size, axis: int) -> int | None:
    # without axes a reduction is over all of them, the columns' too
    over = constants.get("axes") or [axis]
    if not {axis, axis + len(shape)}.isdisjoint(over):
        return None
    # a reduction that drops its axes moves the others
    return axis if constants.get("keep_dims") else None


# kind → the axis of the columns of the results, given the constant arguments, the shape of
# the first operand and the axis of the operands' columns
AXIS_AFTER: dict[str, Callable[[dict, torch.Size, int], int | None]] = {
    "transpose": _axis_after_transpose,
    "reshape": _axis_after_reshape,
    "conv": _axis_after_convolution,
    "slice_by_index": _axis_after_slice,
    **dict.fromkeys(("concat", "softmax", "split"), _axis_after_operation_along),
    **dict.fromkeys(("reduce_max", "reduce_mean", "reduce_sum"), _axis_after_reduction),
}
