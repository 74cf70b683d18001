"""Stand-ins for Core ML with a fault that was reported of Core ML: the shim's native layer with one
fault each, as runtimes (`stand-in-kill`) that this folder's entry points offer."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import miltorch
from miltorch.coremltools_import import coremltools
from miltorch.program import read_spec
from miltorch.shim import Proxy, StateProxy, _error
from workbench.runtime.coreml import DEVICE_UNITS
from workbench.runtime.standin import StandInModel


class Faulty(Proxy):
    """A layer whose `runtime` runs models over it."""

    def __init_subclass__(cls):
        cls.runtime = type(cls.__name__, (StandInModel,), {"proxy_class": cls})


class RejectedUnit(Faulty):
    """Models fail to load with error code -14 on CPU_AND_NE, as what the Neural Engine's
    compiler does not compile, and on no other compute units."""

    def __init__(self, path: str, compute_units: str, *rest):
        super().__init__(path, compute_units, *rest)
        if compute_units == "CPU_AND_NE":
            raise _error(
                "Failed to build the model execution plan using a model architecture file "
                f"'{Path(path) / 'model.mil'}' with error code: -14."
            )


class Kill(Faulty):
    """The first prediction kills the process (SIGKILL)."""

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        os.kill(os.getpid(), signal.SIGKILL)


class Chatter(Faulty):
    """Compiling writes a message to the standard output of the process."""

    @staticmethod
    def compileModel(path: str) -> str:
        sys.stdout.flush()
        os.write(
            1, b"coremlcompiler: note: compiled for MLComputeUnitsCPUAndNeuralEngine\n"
        )
        return Proxy.compileModel(path)


class OneOfBatch(Faulty):
    """Outputs hold the first sequence of a batch alone."""

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        return {name: value[:1] for name, value in super().predict(data, state).items()}


class RaisingPlan(Faulty):
    """Asking for the compute plan raises an error."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        raise _error("Failed to load the compute plan.")


class NoPlan(Faulty):
    """The compute plan is None."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        return None


class AbortingPlan(Faulty):
    """Asking for the compute plan aborts the process (SIGABRT)."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        os.abort()


class Fallback(Faulty):
    """The compute plan puts every operation on the CPU, none on the Neural Engine."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        return plan(path, "cpu")


class OnEngine(Faulty):
    """No fault, a simulated compute plan: every operation on the Neural Engine if the
    units have it, else on the CPU."""

    @staticmethod
    def get_compute_plan(path: str, compute_units: str):
        has_engine = compute_units in ("CPU_AND_NE", "ALL")
        return plan(path, "ane" if has_engine else "cpu")


class Plan:
    """A simulated compute plan with coremltools' names.

    Args:
        functions: name → operations, each as (kind, preferred unit or None, and a list of
            operations for every nested block).
    """

    def __init__(self, **functions: list):
        blocks = {
            name: SimpleNamespace(block=self.block(operations))
            for name, operations in functions.items()
        }
        program = SimpleNamespace(functions=blocks)
        self.model_structure = SimpleNamespace(program=program)

    def block(self, operations: list) -> SimpleNamespace:
        devices, listed = coremltools().models.compute_device, []
        names = {unit: name for name, unit in DEVICE_UNITS.items()}
        for kind, unit, *inside in operations:
            usage = None
            if unit:  # past the checks for native proxies
                device = object.__new__(getattr(devices, names[unit]))
                usage = SimpleNamespace(
                    preferred_compute_device=device, supported_compute_devices=[device]
                )
            operation = SimpleNamespace(operator_name=kind, usage=usage, outputs=[])
            operation.blocks = list(map(self.block, inside))
            listed.append(operation)
        return SimpleNamespace(operations=listed)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        return operation.usage


def plan(path: str, unit: str) -> Plan:
    """A compute plan that puts every operation on one unit."""

    def listed(block) -> list:
        computed = [op for op in block.ops if op.kind != "const"]
        return [(f"ios18.{op.kind}", unit, *map(listed, op.blocks)) for op in computed]

    names = read_spec(Path(path)).mlProgram.functions
    return Plan(**{name: listed(miltorch.read(path, name).block) for name in names})
