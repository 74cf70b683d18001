"""One function of any package, without a bundle: the same runtimes, the tensors by the
names that the package gives them."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.interpret import Hook
from miltorch.quiet import coremltools
from workbench.runtime import check_compute_units, named, resolve
from workbench.runtime.base import typed
from workbench.runtime.coreml import Handle, one_message, stdout_to_stderr
from workbench.runtime.portable import Cells
from workbench.runtime.standin import installed


class PortablePackage:
    """A function of a package on the portable runtime; `program` is what it runs. Where
    they are set, `fed` is called with the inputs of every call, `hook` after every
    operation."""

    def __init__(self, path: Path, function: str | None, precision: str):
        self.program = miltorch.read(path, function)
        self.executable = miltorch.Executable(self.program, precision)
        self.hook: Hook | None = None
        self.fed: Callable[[dict], None] | None = None

    def make_state(self) -> Cells:
        half = {kind.dtype for kind in self.program.states.values()} == {"FLOAT16"}
        exact = self.executable.precision == "exact"
        return Cells(self.executable.make_state(), half=half and not exact)

    def predict(
        self, inputs: dict[str, np.ndarray], state: Cells | None
    ) -> dict[str, np.ndarray]:
        tensors = {
            name: torch.from_numpy(np.array(value)) for name, value in inputs.items()
        }
        if self.fed:
            self.fed(tensors)
        own = {
            name: state.cells[name]
            for name in self.program.states
            if name in state.cells
        }
        outputs = self.executable.run(tensors, own, self.hook)
        return {name: value.numpy() for name, value in outputs.items()}


class CoreMLPackage:
    """The same through coremltools and Core ML, or through its stand-in."""

    def __init__(
        self, path: Path, function: str | None, compute_units: str, standin: str | None
    ):
        self.program, self.name = miltorch.read(path, function), path.name
        units, native_layer = coremltools().ComputeUnit[compute_units], nullcontext()
        if standin is not None:
            native_layer = installed(standin)
        with self._one_message(), native_layer:
            self.compiled = _compiled(path, path.stat().st_mtime_ns)
            compiled = str(self.compiled.path)
            self.model = coremltools().models.CompiledMLModel(compiled, units, function)

    def _one_message(self):
        return one_message(
            f"package {self.name}", "a model that Core ML runs", "see the message"
        )

    def make_state(self) -> Handle:
        with self._one_message():
            return Handle(self.model.make_state(), self.name)

    def predict(
        self, inputs: dict[str, np.ndarray], state: Handle | None
    ) -> dict[str, np.ndarray]:
        mlstate = None
        if state and self.program.states:
            mlstate = state.state
        with self._one_message():
            outputs = self.model.predict(typed(inputs), mlstate)
        return {name: np.asarray(value) for name, value in outputs.items()}


def load_package(
    path: Path,
    function: str | None = None,
    runtime: str = "auto",
    *,
    precision: str = "declared",
    compute_units: str = "CPU_AND_NE",
) -> PortablePackage | CoreMLPackage:
    """Loads one function (default: the package's own default).

    Raises:
        InputError: no such package or function, an operation or a state that is not
            known here.
    """
    name, fault = named(resolve(runtime))
    if name == "portable":
        return PortablePackage(path, function, precision)
    check_compute_units(compute_units)
    standin = None
    if name == "stand-in":
        standin = fault
    return CoreMLPackage(path, function, compute_units, standin)


class _Compiled:
    """A package compiled into a folder that lasts as long as this object."""

    def __init__(self, path: Path):
        folder = Path(tempfile.mkdtemp(prefix="workbench-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / f"{path.stem}.mlmodelc"
        with stdout_to_stderr():
            coremltools().models.utils.compile_model(str(path), str(self.path))


@lru_cache(maxsize=8)
def _compiled(path: Path, changed: int) -> _Compiled:
    """One for all functions of a package, as long as its modification time is
    `changed`."""
    return _Compiled(path)
