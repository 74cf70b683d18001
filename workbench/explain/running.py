"""Runs calls of packages on any runtime. On a device each package runs in a process of
its own, since a faulty one may end the process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench import process
from workbench.errors import InputError
from workbench.runtime import Model, Settings, is_device, load_package

# by the names of inputs, states and results in a package
Arrays = dict[str, np.ndarray]


def evaluate(model: Model, arrays: Arrays, hook: Callable | None = None) -> Arrays:
    """The outputs of a call with these inputs and states, and the states after it, in
    float32."""
    state = model.make_state()
    for name in model.program.states:
        state.write(name, arrays[name])
    inputs = {name: arrays[name] for name in model.program.inputs}
    outputs = model.predict(inputs, state, hook)
    after = {name: np.float32(state.read(name)) for name in model.program.states}
    return outputs | after


def evaluate_every_value(model: Model, arrays: Arrays) -> Arrays:
    """The result of every operation in a call on the portable runtime, in float32 or
    int32, and the states after it."""
    values = {}

    def record(op, results) -> None:
        for (name, _), x in zip(op.outputs, results):
            if isinstance(x, torch.Tensor):
                values[name] = (x if x.is_floating_point() else x.int()).numpy()

    return values | evaluate(model, arrays, record)


def evaluate_calls(
    runtime: str, units: str, package: Path, function: str | None, calls: list[Arrays]
) -> list[Arrays]:
    """Loads a package and evaluates each call (see `evaluate`). A function of the module,
    since `process.call` imports it by name in another process.

    Raises:
        InputError: a package that the runtime does not compile or load on `units`.
    """
    settings = Settings(runtime, compute_units=units)
    model = load_package(package, settings, function)
    return [evaluate(model, arrays) for arrays in calls]


@dataclass
class PackageRun:
    """The result of running calls of a package: the values of each call (see
    `evaluate`), or no values and the reason in words, `failure`."""

    values: list[Arrays]
    failure: str = ""


@dataclass
class Runner:
    """Runs each package in a process of its own; the portable runtime, which a package
    cannot crash, in this one.

    Attributes:
        stop: an event; once it is set, `process.Cancelled` is raised.
        report: called after every package with the number of packages so far.
        packages: that number.
    """

    runtime: str
    units: str
    stop: threading.Event | None = None
    report: Callable[[int], None] | None = None
    packages: int = 0

    def run(
        self, package: Path, function: str | None, calls: list[Arrays]
    ) -> PackageRun:
        """Runs all calls of one function of a package."""
        arguments = self.runtime, self.units, package, function, calls
        if self.stop and self.stop.is_set():
            raise process.Cancelled
        if is_device(self.runtime):
            outcome = process.call(evaluate_calls, *arguments, stop=self.stop)
        else:
            outcome = process.Outcome(evaluate_calls(*arguments))
        self.packages += 1
        if self.report:
            self.report(self.packages)
        if outcome.failure:
            return PackageRun([], outcome.failure)
        if outcome.invalid_reason:
            # Core ML could not compile for these units and went on without them
            problem = InputError(
                f"package {package.name}",
                outcome.invalid_reason,
                self.units,
                "try other --compute-units",
            )
            return PackageRun([], str(problem))
        return PackageRun(outcome.value)
