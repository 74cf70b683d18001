"""Stand-ins for Core ML that go wrong as it was seen to: the shim's native layer with one fault
each, as runtimes (`stand-in-kill`) that this folder's entry points offer."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import miltorch
from miltorch.program import read_spec
from miltorch.quiet import coremltools
from miltorch.shim import Proxy, StateProxy, _error
from workbench.runtime.standin import StandInModel

SMALLEST_NORMAL = 2.0**-14  # of float16; anything smaller but 0 is subnormal


class _Rejecting(Proxy):
    """A layer that loads some models no more than the Neural Engine's compiler compiles
    them."""

    def __init__(self, path: str, compute_units: str, *rest):
        super().__init__(path, compute_units, *rest)
        if self.rejects(compute_units):
            raise _error(
                "Failed to build the model execution plan using a model architecture file "
                f"'{Path(path) / 'model.mil'}' with error code: -14."
            )


class RejectedStates(_Rejecting):
    """Models with states fail to load with error code -14, whatever the compute
    units."""

    def rejects(self, compute_units: str) -> bool:
        return bool(self.executable.program.states)


def _flexible(description) -> bool:
    """Whether any input of a model has a flexible shape."""
    return any(
        size.lowerBound != size.upperBound
        for feature in description.input
        for size in feature.type.multiArrayType.shapeRange.sizeRanges
    )


class RejectedRanges(_Rejecting):
    """Models with a flexible input shape fail to load with error code -14, whatever the
    compute units."""

    def rejects(self, compute_units: str) -> bool:
        return _flexible(self.description)


class RejectedUnit(_Rejecting):
    """Models fail to load with error code -14 on CPU_AND_NE, and on no other compute
    units."""

    def rejects(self, compute_units: str) -> bool:
        return compute_units == "CPU_AND_NE"


class HiddenNaN(Proxy):
    """A NaN in an output comes out as 0."""

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        outputs = super().predict(data, state)
        return {
            name: np.where(np.isnan(v), np.float32(0), v) for name, v in outputs.items()
        }


def _flushed(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.abs() < SMALLEST_NORMAL, torch.zeros_like(value), value)


class _FlushedState(StateProxy):
    def write_state(self, name: str, value) -> None:
        super().write_state(name, value)
        self.flush()

    def flush(self) -> None:
        for cell in self.cells.values():
            cell.value = _flushed(cell.value)


class Flush(Proxy):
    """Subnormal float16 values of states and outputs become 0."""

    def newState(self) -> StateProxy:
        return _FlushedState(self.executable)

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        outputs = super().predict(data, state)
        if state is not None:
            state.flush()
        return {
            name: _flushed(torch.from_numpy(v)).numpy() for name, v in outputs.items()
        }


class Kill(Proxy):
    """The first prediction kills the process (SIGKILL)."""

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        os.kill(os.getpid(), signal.SIGKILL)


class Chatter(Proxy):
    """Compiling writes a message to the standard output of the process."""

    @staticmethod
    def compileModel(path: str) -> str:
        sys.stdout.flush()
        os.write(
            1, b"coremlcompiler: note: compiled for MLComputeUnitsCPUAndNeuralEngine\n"
        )
        return Proxy.compileModel(path)


class OneOfBatch(Proxy):
    """Outputs hold the first sequence of a batch alone."""

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        return {name: value[:1] for name, value in super().predict(data, state).items()}


class RaisingPlan(Proxy):
    """Asking for the compute plan raises an error."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        raise _error("Failed to load the compute plan.")


class NoPlan(Proxy):
    """The compute plan is None."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        return None


class AbortingPlan(Proxy):
    """Asking for the compute plan aborts the process (SIGABRT)."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        os.abort()


class Fallback(Proxy):
    """The compute plan puts every operation on the CPU, none on the Neural Engine."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        return plan(path, "cpu")


class OnEngine(Proxy):
    """No fault, a simulated compute plan: every operation on the Neural Engine if the
    units have it, else on the CPU."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        if compute_units in ("CPU_AND_NE", "ALL"):
            return plan(path, "ane")
        return plan(path, "cpu")


class SimulatedMac(OnEngine):
    """No fault, a simulated Mac: durations are made up, and flexible shapes are planned
    on the CPU."""

    # by whether the compute units have the Neural Engine
    DISPATCH_MS = {True: 2.0, False: 0.1}
    BYTES_PER_MS = {True: 60e6, False: 20e6}

    def __init__(self, path: str, compute_units: str, *rest):
        super().__init__(path, compute_units, *rest)
        flexible = _flexible(self.description)
        engine = compute_units in ("CPU_AND_NE", "ALL") and not flexible
        weights = sum(file.stat().st_size for file in Path(path).rglob("*.bin"))
        self.ms = self.DISPATCH_MS[engine] + weights / self.BYTES_PER_MS[engine]

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        if _flexible(read_spec(Path(path)).description):
            compute_units = "CPU_ONLY"
        return OnEngine.get_compute_plan(path, compute_units)

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        start = time.perf_counter()
        outputs = super().predict(data, state)
        time.sleep(max(0, self.ms / 1e3 - (time.perf_counter() - start)))
        self.last_predict_ns = int(self.ms * 1e6)
        return outputs


def plan(path: str, device: str) -> SimpleNamespace:
    """A simulated compute plan with coremltools' names, which puts every operation on
    one device; it could run on the CPU, too."""
    kinds = coremltools().models.compute_device
    cpu = object.__new__(kinds.MLCPUComputeDevice)
    unit = cpu if device == "cpu" else object.__new__(kinds.MLNeuralEngineComputeDevice)
    names = read_spec(Path(path)).mlProgram.functions
    programs = {name: miltorch.read(path, name) for name in names}
    usage = SimpleNamespace(
        preferred_compute_device=unit,
        supported_compute_devices=list(dict.fromkeys([unit, cpu])),
    )

    def of_block(block) -> SimpleNamespace:
        operations = [
            SimpleNamespace(
                operator_name=op.kind if op.kind == "const" else f"ios18.{op.kind}",
                outputs=[SimpleNamespace(name=name) for name, _ in op.outputs],
                blocks=[of_block(inner) for inner in op.blocks],
            )
            for op in block.ops
        ]
        return SimpleNamespace(operations=operations)

    functions = {
        name: SimpleNamespace(block=of_block(program.block))
        for name, program in programs.items()
    }
    structure = SimpleNamespace(program=SimpleNamespace(functions=functions))
    return SimpleNamespace(
        source="simulated",
        model_structure=structure,
        get_compute_device_usage_for_mlprogram_operation=lambda op: usage,
    )


FAULTS: dict[str, type[Proxy]] = {
    "load14-state": RejectedStates,
    "load14-range": RejectedRanges,
    "load14-ne": RejectedUnit,
    "fallback": Fallback,
    "nan-hidden": HiddenNaN,
    "flush": Flush,
    "kill": Kill,
    "chatter": Chatter,
    "plan-raises": RaisingPlan,
    "plan-none": NoPlan,
    "plan-aborts": AbortingPlan,
    "batch-one": OneOfBatch,
    "plan-ane": OnEngine,
    "mac": SimulatedMac,
}

for _layer in FAULTS.values():
    _layer.runtime = type(_layer.__name__, (StandInModel,), {"layer": _layer})
