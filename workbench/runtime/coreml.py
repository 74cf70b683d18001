"""Runs a shard through coremltools and Core ML (macOS 15 or later). Off a Mac this code
runs over the shim alone, never on a device.

Shards are compiled once and stored beside the bundle, under a hash of their files,
coremltools and macOS; every later process loads the compiled model."""

import ctypes
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miltorch.coremltools_import import coremltools
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, check_choice, one_line
from workbench.files import check_free_space
from workbench.runtime.base import (
    LOADING_STAGES,
    Package,
    PackageModel,
    Settings,
    State,
    check_outputs,
    native_inputs,
)

# hint → coremltools' enumeration; None: a bool
HINTS = {
    "reshapeFrequency": "ReshapeFrequency",
    "specializationStrategy": "SpecializationStrategy",
    "allowLowPrecisionAccumulationOnGPU": None,
}
# coremltools' class of a device → the compute unit
DEVICE_UNITS = {
    "MLNeuralEngineComputeDevice": "ane",
    "MLGPUComputeDevice": "gpu",
    "MLCPUComputeDevice": "cpu",
}
# A shard that runs is on the disk twice besides its package: as the compiled model, and as
# the program that Core ML makes of this for a device.
COMPILED_COPIES = 2


@dataclass(frozen=True)
class PlacedOperation:
    """One compute operation of a compute plan.

    Args:
        op: the kind of operation, such as `conv`.
        name: of its first output.
        preferred: the unit that Core ML prefers: `ane`, `gpu` or `cpu`; None if the plan
            does not state it.
        supported: the units that could run it.
    """

    op: str
    name: str
    preferred: str | None
    supported: tuple[str, ...]


@contextmanager
def core_ml_errors(subject: str, needed: str, next_step: str) -> Iterator[None]:
    """Context manager that turns errors of Core ML's binding, which are RuntimeErrors of
    several lines, and errors of the disk into one InputError with their text."""
    try:
        yield
    except (RuntimeError, OSError) as problem:
        raise InputError(subject, one_line(problem), needed, next_step) from problem


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Context manager that redirects what native code writes from the standard output
    of the process to its standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # C's own buffers still hold text that belongs to the standard error, too
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


class CoreMLState(State):
    """coremltools' MLState: float16, as Core ML holds it.

    The binding reads states as float32, and writes neither float16 nor read-only
    arrays. An MLState works only with the loaded function that made it.

    Args:
        T: of the calls of the function that makes the MLState; see `move_to`.
    """

    def __init__(self, model: "CoreMLModel", T: int):
        super().__init__(model.shard)
        self.model, self.T = model, T
        with model.core_ml_errors():
            self.mlstate = model.loaded_functions[T].make_state()

    def read_tensor(self, tensor: str) -> np.ndarray:
        with self.model.core_ml_errors():
            return self.mlstate.read_state(tensor).astype(np.float16)

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        with self.model.core_ml_errors():
            self.mlstate.write_state(tensor, np.require(value, np.float32, "CW"))

    def move_to(self, T: int) -> None:
        """Copies every state into a new MLState of the function of T."""
        if self.T == T:
            return
        target = CoreMLState(self.model, T)
        for tensor in self.model.program.states:
            target.write_tensor(tensor, self.read_tensor(tensor))
        self.mlstate, self.T = target.mlstate, T


class CoreMLModel(PackageModel):
    """A package as a `CompiledMLModel` for each function, loaded when a call first needs
    it; a call of another T than the last begins by copying every state.

    Of the settings it reads:
        compute_units: a name of coremltools' ComputeUnit.
        hints: optimization hints by Core ML's names, values as their enumerations spell
            them.

    Attributes:
        compiled_path: of the compiled package.
        was_compiled: whether it was there before this model.
        plan_source: what a log says of the compute plans of this runtime.
        loaded_functions: coremltools' `CompiledMLModel` of every function that is
            loaded, by the T of its calls.

    Raises:
        InputError: a package that Core ML does not compile, load or run, with Core ML's
            own message in one line; a hint that it does not know.
    """

    is_device = True
    plan_source = "measured"

    @classmethod
    @contextmanager
    def native_layer(cls) -> Iterator[None]:
        """Context manager for every call of coremltools that compiles, loads or plans a
        package; callers of `compile_package` and `compute_plan` enter it. Here it changes
        nothing. A stand-in replaces coremltools' native layer in it."""
        yield

    def __init__(self, package: Package, settings: Settings):
        super().__init__(package, settings)
        self.read_programs()
        ct = coremltools()
        self.units = ct.ComputeUnit[settings.compute_units]
        self.hints = _hints(ct, settings.hints)
        self.loading_ms = dict.fromkeys(LOADING_STAGES)
        self.loaded_functions: dict[int, object] = {}
        self.compiled_path = package.compiled_path
        if self.compiled_path is None:
            folder = Path(tempfile.mkdtemp(prefix="workbench-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.compiled_path = folder / f"{package.path.stem}.mlmodelc"
        with self.core_ml_errors(), self.native_layer():
            compile_ms = compile_package(package.path, self.compiled_path)
        self.was_compiled = compile_ms is None
        self.loading_ms["compile"] = compile_ms
        # `make_state` needs a loaded function
        self._load_function(self.smallest_T)

    def core_ml_errors(self) -> AbstractContextManager[None]:
        """Context manager that turns errors of Core ML's binding into InputErrors."""
        subject = f"package {self.path.name}"
        if self.shard:
            subject = f"shard {self.shard.name}"
        return core_ml_errors(
            subject,
            f"a model that Core ML runs on {self.units.name}",
            "see the message; try other --compute-units, or a copy of the bundle in a "
            "folder that can be written",
        )

    def _load_function(self, T: int):
        """The function of T, loaded when it is first needed.

        An empty file beside the compiled package records that it was loaded with these
        settings: Core ML stores the program that it then makes for the device, so that
        later loads are faster."""
        if T in self.loaded_functions:
            return self.loaded_functions[T]
        function_name = self.function_names[T]
        loaded_with = self.units, function_name, sorted(self.hints.items())
        key = hashlib.sha256(repr(loaded_with).encode()).hexdigest()[:8]
        mark = self.compiled_path.with_suffix(f".{key}.loaded")
        was_loaded = self.was_compiled and mark.exists()
        path = str(self.compiled_path)
        start = time.perf_counter()
        with self.core_ml_errors(), self.native_layer():
            self.loaded_functions[T] = coremltools().models.CompiledMLModel(
                path, self.units, function_name, self.hints or None
            )
        self._add_ms("load" if was_loaded else "cold_load", start)
        with suppress(OSError):  # a folder that cannot be written
            mark.touch()
        return self.loaded_functions[T]

    def _add_ms(self, stage: str, start: float) -> None:
        """Adds the time since `start` to a stage of loading, of all functions."""
        ms = (time.perf_counter() - start) * 1e3
        self.loading_ms[stage] = (self.loading_ms[stage] or 0.0) + ms

    def make_state(self) -> CoreMLState:
        return CoreMLState(self, min(self.loaded_functions))

    def predict(
        self, inputs: dict[str, np.ndarray], state: CoreMLState | None = None, hook=None
    ) -> dict[str, np.ndarray]:
        T = self.T_of(inputs)
        mlstate = None
        loads_function = T not in self.loaded_functions
        is_first_call = self.loading_ms["first_predict"] is None
        function = self._load_function(T)
        if state and self.program.states:
            state.move_to(T)
            mlstate = state.mlstate
        start = time.perf_counter()
        with self.core_ml_errors():
            outputs = function.predict(native_inputs(inputs), mlstate)
        if loads_function or is_first_call:
            self._add_ms("first_predict", start)
        # coremltools keeps Core ML's own time in its native object alone
        native = function._proxy.get_last_predict_duration_in_nano_seconds()
        self.last_native_ms = None if native is None else native / 1e6
        if self.shard:
            check_outputs(self.shard, inputs, outputs)
        return {name: np.asarray(value, np.float32) for name, value in outputs.items()}


def compile_package(package: Path, target: Path) -> float | None:
    """Compiles a package into `target`, whole or not at all, unless it is there. Returns
    the milliseconds that it took (None: it was there). Core ML's messages go to the
    standard error."""
    if target.exists():
        return None
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    check_free_space(
        target.parent, COMPILED_COPIES * size, f"compiled copy of shard {package.stem}"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own, because several processes may compile the same shard
    temporary = target.with_name(f"{target.stem}.{secrets.token_hex(4)}.mlmodelc")
    start, ms = time.perf_counter(), None
    try:
        with stdout_to_stderr():
            coremltools().models.utils.compile_model(str(package), str(temporary))
        ms = (time.perf_counter() - start) * 1e3
        os.rename(temporary, target)
    except OSError:
        if not target.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ms


def compute_plan(
    package: Path, compiled: Path, compute_units: str, function: str = "main"
) -> list[PlacedOperation]:
    """Where Core ML plans to run every compute operation of a package, nested blocks
    included; constants are left out. The package is compiled at `compiled` unless it is
    there. Core ML may abort the process that calls this.

    Raises:
        InputError: Core ML compiles no such model, or gives no plan.
    """
    ct, subject = coremltools(), f"plan of {package.stem}"
    needed = "Core ML's MLComputePlan, from macOS 14.4 on"
    next_step = "see the message; timings alone say where it ran"
    with core_ml_errors(subject, needed, next_step):
        compile_package(package, compiled)
        load = ct.models.compute_plan.MLComputePlan.load_from_path
        try:
            plan = load(str(compiled), ct.ComputeUnit[compute_units])
        except ValueError as problem:  # coremltools' error where a system has none
            actual = one_line(problem)
            raise InputError(subject, actual, needed, next_step) from problem
        if plan is None:
            raise InputError(subject, str(plan), needed, next_step)
        functions = plan.model_structure.program.functions
        return list(_placed_operations(plan, functions[function].block))


def compiled_path(bundle: Bundle, shard: Shard, package: Path | None = None) -> Path:
    """Path of the compiled model of a shard, or of one of its packages, beside the
    bundle; its name has a hash of the package's files and of the versions of coremltools
    and macOS."""
    package = package or bundle.package(shard)
    versions = coremltools().__version__, platform.mac_ver()[0], platform.version()
    files = [f for f in shard.files if package in (bundle.root / f.path).parents]
    sources = [sorted((f.path, f.sha256) for f in files), *versions]
    key = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]
    folder = bundle.root.with_name(f".{bundle.root.name}.compiled")
    return folder / f"{package.stem}-{key}.mlmodelc"


def _hints(ct, hints: dict) -> dict:
    """Optimization hints with coremltools' enumerations as values; refuses unknown names
    and values."""
    values = {}
    for name, value in hints.items():
        check_choice("optimization hint", name, HINTS)
        members = {"True": True, "False": False}
        if HINTS[name]:
            members = getattr(ct, HINTS[name]).__members__
        check_choice(f"optimization hint {name}", str(value), members, "choose one")
        values[name] = members[str(value)]
    return values


def _placed_operations(plan, block) -> Iterator[PlacedOperation]:
    """The compute operations of a block of coremltools' plan, nested blocks included."""

    def unit(device) -> str | None:
        return DEVICE_UNITS.get(type(device).__name__)

    for op in block.operations:
        name = op.operator_name.rpartition(".")[2]
        if name != "const" and not name.startswith("constexpr_"):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            devices = getattr(usage, "supported_compute_devices", ())
            yield PlacedOperation(
                op=name,
                name=next((output.name for output in op.outputs), ""),
                preferred=unit(getattr(usage, "preferred_compute_device", None)),
                supported=tuple(filter(None, map(unit, devices))),
            )
        for inner in op.blocks:
            yield from _placed_operations(plan, inner)
