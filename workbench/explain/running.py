"""Runs calls of packages on any runtime, each package in a process of its own."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench import process
from workbench.check.hf import Values
from workbench.errors import InputError
from workbench.runtime import Model, Settings, is_device, load_package


def evaluate(model: Model, arrays: Values, hook: Callable | None = None) -> Values:
    """The outputs of a call with these inputs and states, and what the states hold
    after it, in float32."""
    state = model.make_state()
    for name in model.program.states:
        state.write(name, arrays[name])
    inputs = {name: arrays[name] for name in model.program.inputs}
    found = model.predict(inputs, state, hook)
    after = {name: np.float32(state.read(name)) for name in model.program.states}
    return found | after


def every_value(model: Model, arrays: Values) -> Values:
    """Every value of a call on the portable runtime, in float32 or int32, and the states
    after it."""
    found = {}

    def keep(op, outputs) -> None:
        for (name, _), x in zip(op.outputs, outputs):
            if isinstance(x, torch.Tensor):
                found[name] = (x if x.is_floating_point() else x.int()).numpy()

    return found | evaluate(model, arrays, keep)


def predict(
    runtime: str, units: str, package: Path, function: str | None, calls: list[Values]
) -> list[Values]:
    """What `evaluate` gives for each call of one loaded package; an importable function
    for `process.call`.

    Raises:
        InputError: a package that the runtime does not compile or load on `units`.
    """
    settings = Settings(runtime, compute_units=units)
    model = load_package(package, settings, function)
    return [evaluate(model, arrays) for arrays in calls]


@dataclass
class Runner:
    """Runs each package in a process of its own; the portable runtime, which cannot
    crash it, in this one.

    Attributes:
        stop: an event; once it is set, `process.Cancelled` is raised.
        report: called after every package with the number so far, `packages`.
    """

    runtime: str
    units: str
    stop: threading.Event | None = None
    report: Callable[[int], None] = lambda count: None
    packages: int = 0

    def __call__(
        self, package: Path, function: str | None, calls: list[Values]
    ) -> tuple[list[Values], str]:
        """The values of each call (see `evaluate`), and why there are none."""
        question = self.runtime, self.units, package, function, calls
        if self.stop and self.stop.is_set():
            raise process.Cancelled
        if is_device(self.runtime):
            outcome = process.call(predict, *question, stop=self.stop)
        else:
            outcome = process.Outcome(predict(*question))
        self.packages += 1
        self.report(self.packages)
        failure, refused = outcome.failure or "", process.invalidating(outcome)
        if refused and not failure:
            found = f"package {package.name}", refused, self.units
            failure = str(InputError(*found, "try other --compute-units"))
        return [] if failure else outcome.value, failure
