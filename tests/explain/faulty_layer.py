"""A stand-in for Core ML's native layer that computes one operation wrongly, in every package
that contains the operation.

`layer_with(fault)` returns a class that a test puts in the place of
`workbench.runtime.standin.StandInModel.proxy_class`, or of the native layer by
`miltorch.shim.replaced`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from miltorch.shim import Proxy, _error
from miltorch.steps import Step

STATE_WRITES = ("write_state", "coreml_update_state")
Change = Callable[[torch.Tensor], torch.Tensor]
"""A result → the wrong result, of any dtype; `FaultyProxy` casts it to the result's."""
Effect = Literal["result", "compile", "kill", "lost", "late"]


def enlarge_by_half(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


@dataclass(frozen=True)
class Fault:
    """A fault of one operation in the stand-in.

    Attributes:
        op: name of the operation, or of its result; for the effects `lost` and `late`, of the
            state that the operation writes.
        effect: `result`: the operation's result is wrong;
            `compile`: a package with the operation does not compile;
            `kill`: a call of such a package fails;
            `lost`: a write to the state is left out;
            `late`: a write to the state takes effect in the next call.
        change: how a result is wrong, for the effect `result`.
        units: the compute units on which the fault shows; "": all.
        T: only calls of this number of tokens are wrong; 0: all.
        min_elements: only results of at least this number of elements are wrong.
        hidden_values: the fault shows only in packages that compute these values and do
            not output them, as if a compiler had fused the operations.
    """

    op: str
    change: Change = enlarge_by_half
    units: str = ""
    T: int = 0
    min_elements: int = 0
    hidden_values: tuple[str, ...] = ()
    effect: Effect = "result"


class FaultyProxy(Proxy):
    """A native layer with a fault. `layer_with` makes the subclass that has it.

    Attributes:
        fault: of the class.
        units: the compute units that the package was loaded for.
        sizes: what `flexible_sizes` returns for the present call.
        late_writes: the writes of this call that take effect in the next one.
    """

    fault: Fault

    def __init__(self, path, compute_units, *rest):
        super().__init__(path, compute_units, *rest)
        self.units = compute_units
        self.sizes: list[int] = []
        self.late_writes: list[Callable[[], object]] = []
        if not self.shows_fault():
            return
        for step in self.executable.body.steps:
            if has_fault(step, self.fault):
                if self.fault.effect == "compile":
                    raise _error("Failed to build the model execution plan: -14")
                step.function = partial(self.run_wrongly, step.function)

    def shows_fault(self) -> bool:
        """Whether the fault shows in this package on these compute units."""
        steps = self.executable.body.steps
        results = {name for step in steps for name, _ in step.outputs}
        inner_results = results - set(self.executable.program.outputs)
        are_hidden = set(self.fault.hidden_values) <= inner_results
        return are_hidden and self.fault.units in ("", self.units)

    def run_wrongly(self, original: Callable, **arguments):
        """Runs `original`, the function of a step, with the fault, in calls of the
        fault's T."""
        effect = self.fault.effect
        if effect == "kill":
            raise _error("the process died")
        if self.fault.T not in {0, *self.sizes}:
            return original(**arguments)
        if effect == "late":
            self.late_writes.append(partial(original, **arguments))
            return None
        if effect == "lost":
            return None
        result = original(**arguments)
        if isinstance(result, tuple):
            return tuple(map(self.change, result))
        return self.change(result)

    def change(self, result: torch.Tensor) -> torch.Tensor:
        """The wrong result in place of `result`, of its dtype."""
        if result.numel() < self.fault.min_elements:
            return result
        return self.fault.change(result).to(result.dtype)

    def predict(self, data, state=None):
        self.sizes = flexible_sizes(self.description, data)
        for write in self.late_writes:
            write()
        self.late_writes.clear()
        return super().predict(data, state)


def layer_with(fault: Fault) -> type[FaultyProxy]:
    """The native layer that has the fault."""
    return type("LayerWithFault", (FaultyProxy,), {"fault": fault})


def flexible_sizes(description, data: dict[str, np.ndarray]) -> list[int]:
    """The sizes of a call that may be its number of tokens: the one size that the package
    leaves open, or every size of every input where it leaves none open.

    Args:
        description: the protobuf message FunctionDescription of the package.
        data: the inputs of the call.
    """
    for feature in description.input:
        ranges = feature.type.multiArrayType.shapeRange.sizeRanges
        for axis, size_range in enumerate(ranges):
            if size_range.lowerBound != size_range.upperBound:
                return [np.shape(data[feature.name])[axis]]
    return [size for value in data.values() for size in np.shape(value)]


def has_fault(step: Step, fault: Fault) -> bool:
    """Whether the fault is one of this step's operation."""
    if step.op.kind in STATE_WRITES and fault.effect in ("lost", "late"):
        return fault.op in step.op.reads()
    results = [name for name, _ in step.outputs]
    return fault.op == step.op.name or fault.op in results


# --- changes of a result -----------------------------------------------------------------


def first_eighth_zero(x: torch.Tensor) -> torch.Tensor:
    """The first eighth of the elements, at least one, is zero."""
    y = x.clone(memory_format=torch.contiguous_format)
    y.view(-1)[: max(1, y.numel() // 8)] = 0
    return y


def second_row_twice(x: torch.Tensor) -> torch.Tensor:
    """The first row along the second-to-last axis is replaced by the second; an x with
    one row stays right."""
    if x.shape[-2] < 2:
        return x
    second_row, rows_but_first = x[..., 1:2, :], x[..., 1:, :]
    return torch.cat([second_row, rows_but_first], -2)


def rounded_to_four_bits(x: torch.Tensor) -> torch.Tensor:
    """Rounded to four significant bits."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def last_element_is(value: float) -> Change:
    """A change that sets the last element."""

    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        y.view(-1)[-1] = value
        return y

    return change
