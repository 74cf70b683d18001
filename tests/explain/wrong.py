"""A stand-in for Core ML that computes one operation wrongly, in every package that has
it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from miltorch.shim import Proxy, _error

WRITES = ("write_state", "coreml_update_state")


@dataclass(frozen=True)
class Fault:
    """A fault of one operation.

    Attributes:
        op: name of the operation, or of its result; for a write, of its state.
        change: the result → the wrong result.
        units: the compute units that are wrong; "": all.
        T: tokens of the calls that are wrong; 0: all.
        above: elements of the smallest result that is wrong.
        fused: the fault shows only in packages that compute these values and do not
            output them.
        effect: `result`: a wrong result; `compile`: the package does not compile;
            `kill`: the call fails; for a state `lost` or `late`: a write is left out, or
            takes effect in the next call.
    """

    op: str
    change: Callable = lambda x: x * 1.5
    units: str = ""
    T: int = 0
    above: int = 0
    fused: tuple[str, ...] = ()
    effect: str = "result"


class FaultyProxy(Proxy):
    """A native layer with a fault. Subclasses have it in the attribute `fault`.

    Attributes:
        T: the flexible sizes of the present call.
        late_writes: calls of writes that take effect in the next call.
    """

    fault: Fault

    def __init__(self, path, compute_units, *rest):
        super().__init__(path, compute_units, *rest)
        self.units, self.late_writes = compute_units, []
        if not self.shows_fault():
            return
        for step in self.executable.body.steps:
            if has_fault(step, self.fault):
                if self.fault.effect == "compile":
                    raise _error("Failed to build the model execution plan: -14")
                step.function = partial(self.run_wrongly, step.function)

    def shows_fault(self) -> bool:
        """Whether this package on this compute unit has the fault."""
        steps = self.executable.body.steps
        results = {name for step in steps for name, _ in step.outputs}
        inner_results = results - set(self.executable.program.outputs)
        is_inside = set(self.fault.fused) <= inner_results
        return is_inside and self.fault.units in ("", self.units)

    def run_wrongly(self, original: Callable, **arguments):
        """Runs the function of a step with the fault, in calls of the fault's T."""
        effect = self.fault.effect
        if effect == "kill":
            raise _error("the process died")
        if self.fault.T not in {0, *self.T}:
            return original(**arguments)
        if effect == "late":
            self.late_writes.append(partial(original, **arguments))
        if effect in ("late", "lost"):
            return None
        y = original(**arguments)
        return tuple(map(self.change, y)) if isinstance(y, tuple) else self.change(y)

    def change(self, y: torch.Tensor) -> torch.Tensor:
        """The wrong result in place of y."""
        if y.numel() < self.fault.above:
            return y
        return self.fault.change(y).to(y.dtype)

    def predict(self, data, state=None):
        self.T = tokens(self.description, data)
        for write in self.late_writes:
            write()
        self.late_writes.clear()
        return super().predict(data, state)


def layer_of(fault: Fault) -> type[FaultyProxy]:
    """The native layer that has the fault."""
    return type("LayerWithFault", (FaultyProxy,), {"fault": fault})


def tokens(description, data) -> list[int]:
    """The flexible size of a call; of a package without one, all sizes."""
    sizes = [n for value in data.values() for n in np.shape(value)]
    for feature in description.input:
        ranges = feature.type.multiArrayType.shapeRange.sizeRanges
        for axis, size in enumerate(ranges):
            if size.lowerBound != size.upperBound:
                return [np.shape(data[feature.name])[axis]]
    return sizes


def has_fault(step, fault: Fault) -> bool:
    if step.op.kind in WRITES and fault.effect in ("lost", "late"):
        return fault.op in step.op.reads()
    return step.op.name == fault.op or any(n == fault.op for n, _ in step.outputs)


def first_row_zero(x: torch.Tensor) -> torch.Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    y.view(-1)[: max(1, y.numel() // 8)] = 0
    return y


def second_row_twice(x: torch.Tensor) -> torch.Tensor:
    """The first row holds the second's; a single row is right."""
    return torch.cat([x[..., 1:2, :], x[..., 1:, :]], -2) if x.shape[-2] > 1 else x


def coarse(x: torch.Tensor) -> torch.Tensor:
    """Rounded to four significant bits."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def last_is(value: float) -> Callable:
    """A change that sets the last element."""

    def change(x):
        y = x.clone(memory_format=torch.contiguous_format)
        y.view(-1)[-1] = value
        return y

    return change
