"""Steps that run once for several calls.

A token is a column: one entry along one axis of a value. Axes are counted from the end.
Where every column of a result comes from the same column of the operands alone, a step
computes the columns of several calls, one call behind another."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from miltorch.ops import elementwise
from miltorch.ops.registry import rules, window
from miltorch.program import Op
from miltorch.steps import Step

# but for those that take vectors over the channels
POINTWISE = rules(elementwise).keys() - {"prelu", "softplus_parametric"}
ALONG = {"concat", "softmax", "split"}  # one axis
KINDS = POINTWISE | ALONG | {"reduce_max", "reduce_mean", "reduce_sum"}
KINDS |= {"reshape", "slice_by_index", "transpose"}
NO_VALUE = torch.zeros(())
ENDLESS = 1 << 40  # columns


class Joined(NamedTuple):
    """The values of several calls along `axis`; `sizes`: columns of each."""

    value: torch.Tensor
    axis: int
    sizes: tuple[int, ...]


def join(values: list[dict], name: str, axis: int) -> Joined | None:
    """The values that calls know by `name`; None where they differ in another axis."""
    parts = [own[name] for own in values]
    if min(p.dim() for p in parts) < -axis:
        return None
    if len({p.movedim(axis, 0).shape[1:] for p in parts}) > 1:
        return None
    return Joined(torch.cat(parts, axis), axis, tuple(p.shape[axis] for p in parts))


def separate(
    joined: dict[str, Joined], names: Iterable[str], values: list[dict]
) -> None:
    """Gives every call its own columns of the joined values `names`, unless it has
    them."""
    for name in names:
        if name not in joined or name in values[0]:
            continue
        value, axis, sizes = joined[name]
        for own, part in zip(values, value.split(sizes, axis), strict=True):
            own[name] = part


def operands(step: Step, values: list[dict], joined: dict) -> dict[str, Joined] | None:
    """What a step reads, joined along one axis, that of a joined value or the first
    spatial axis of a convolution; None where that cannot be."""
    names = list(step.reads())
    known = [joined[name] for name in names if name in joined]
    if step.op.kind == "conv" and not known:
        known = [join(values, names[0], 2 - values[0][names[0]].dim())]
    if not known or known[0] is None:
        return None
    found, axis = {}, known[0].axis
    for name in names:
        own = joined.get(name) or join(values, name, axis)
        if own is None or own[1:] != known[0][1:]:
            return None
        found[name] = own
    return found


def is_matrix(op: Op, parameter: str, value) -> bool:
    """Whether a constant is the weight of a 1×1 convolution, which stays as stored."""
    return (
        (op.kind, parameter) == ("conv", "weight")
        and value.dim() > 2
        and value.shape[2:].numel() == 1
    )


def is_columnwise(step: Step) -> bool:
    """Whether `result_axis` knows the operation: one of `KINDS`, or a 1×1 convolution
    with a constant weight."""
    constants = step.constants
    if any(attribute for *_, attribute in step.operands):
        return False
    return step.op.kind in KINDS or (
        [parameter for parameter, *_ in step.operands] == ["x"]
        and is_matrix(step.op, "weight", constants.get("weight", NO_VALUE))
        and max(constants.get("strides") or [1]) == 1
        and constants.get("groups", 1) == 1
        and not any(constants.get("pad") or [])
    )


def result_axis(step: Step, shape: torch.Size, axis: int) -> int | None:
    """Where the columns of a step's results are, whose first operand has this shape and
    all theirs at `axis`; None where a result may mix columns."""
    kind, given, place = step.op.kind, step.constants, axis + len(shape)
    if kind == "transpose":
        return [p % len(shape) for p in given["perm"]].index(place) - len(shape)
    if kind == "reshape":
        return _reshaped(given["shape"], shape, place)
    if kind == "conv":
        keeps = place != 1
    elif kind in POINTWISE:
        tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
        keeps = all(v.dim() < -axis or v.shape[axis] == 1 for v in tensors)
    elif kind == "slice_by_index":
        index = window(**given)
        keeps = all(isinstance(each, slice) for each in index)
        keeps = keeps and index[place].indices(ENDLESS) == (0, ENDLESS, 1)
    else:
        over = given.get("axes") or [given.get("axis", axis)]
        keeps = {axis, place}.isdisjoint(over)
        keeps = keeps and (kind in ALONG or given.get("keep_dims"))
    return axis if keeps else None


def _reshaped(sizes: list[int], shape: torch.Size, place: int) -> int | None:
    """The axis of unknown size, where a reshape of `shape` to `sizes` keeps what stands
    before and behind `place`."""
    if -1 not in sizes:
        return None
    new = sizes.index(-1)
    products = math.prod(sizes[:new]), math.prod(sizes[new + 1 :])
    same = products == (shape[:place].numel(), shape[place + 1 :].numel())
    return new - len(sizes) if same else None
