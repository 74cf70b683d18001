"""Runs calls of packages on any runtime, each package in a process of its own, and keeps
the answers."""

import hashlib
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from miltorch.program import spec_path
from workbench import process
from workbench.check.hf import Values
from workbench.errors import InputError
from workbench.files import load_arrays, save_arrays
from workbench.runtime import Model, is_device, open_model


@dataclass(frozen=True)
class Call:
    """One call of a package: inputs and, by tensor, the states before it."""

    inputs: Values
    states: Values
    where: dict = field(default_factory=dict)


def evaluate(model: Model, call: Call, hook: Callable | None = None) -> Values:
    """The outputs of a call, and what the states hold after it, in float32."""
    state = model.make_state()
    states = model.program.states
    for name in states:
        state.raw.write(name, call.states[name])
    inputs = {name: call.inputs[name] for name in model.program.inputs}
    found = model.predict(inputs, state, hook)
    return found | {name: np.float32(state.raw.read(name)) for name in states}


def recompute(model: Model, call: Call, known: Values) -> Values:
    """Every value of a call on the portable runtime, and the states after it, computed
    from the `known` values where they are."""
    found = {}

    def keep(op, outputs):
        replaced = []
        for (name, _), x in zip(op.outputs, outputs):
            if isinstance(x, torch.Tensor):
                found[name] = x.numpy()
            if name in known:
                x = torch.tensor(known[name]).reshape(x.shape)
            replaced.append(x)
        return replaced

    after = evaluate(model, call, keep)
    return found | {name: after[name] for name in model.program.states}


def predict(runtime: str, units: str, package: Path, function, calls: list) -> Values:
    """What `evaluate` gives for each call of one loaded package, as "0/hidden"; an
    importable function for `process.call`.

    Raises:
        InputError: a package that the runtime does not compile, load or run on `units`.
    """
    model = open_model(package, runtime, compute_units=units, function=function)
    found = {}
    for index, call in enumerate(calls):
        values = evaluate(model, call).items()
        found |= {f"{index}/{name}": value for name, value in values}
    messages = process.core_ml_messages() if is_device(runtime) else []
    if refused := process.invalidating(messages):
        step = "try other --compute-units"
        raise InputError(f"package {package.name}", refused[0], units, step)
    return found


@dataclass
class Runner:
    """Runs each package in a process of its own; the portable runtime, which cannot
    crash it, in this one. Answers are kept in `store`, where the same question finds
    them.

    Attributes:
        stop: an event; once it is set, `process.Cancelled` is raised.
        report: called after every package with the number so far, `packages`.
    """

    runtime: str
    units: str
    store: Path
    stop: threading.Event | None = None
    report: Callable[[int], None] = lambda count: None
    packages: int = 0

    def __call__(
        self, package: Path, function: str | None, calls: list[Call]
    ) -> tuple[list[Values], str]:
        """The values of each call (see `evaluate`), and why there are none."""
        job = self.runtime, self.units, function, calls
        digest = hashlib.sha256(pickle.dumps(job) + spec_path(package).read_bytes())
        file = self.store / f"{digest.hexdigest()[:32]}.safetensors"
        if file.exists():
            arrays, about = load_arrays(file)
            failure = about["failure"]
        elif self.stop and self.stop.is_set():
            raise process.Cancelled
        else:
            question = self.runtime, self.units, package, function, calls
            if is_device(self.runtime):
                outcome = process.call(predict, *question, stop=self.stop)
            else:
                outcome = process.Outcome(predict(*question))
            arrays = outcome.value or {}
            failure = outcome.failure or ""
            with suppress(OSError):  # a folder that cannot be written
                self.store.mkdir(parents=True, exist_ok=True)
                save_arrays(file, arrays, {"failure": failure})
        self.packages += 1
        self.report(self.packages)
        values = [{} for _ in calls]
        for key, value in arrays.items():
            index, _, name = key.partition("/")
            values[int(index)][name] = value
        return values, failure
