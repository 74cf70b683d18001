"""Tests whether Core ML works on this machine: imports its binding, lists its devices,
and runs a small model with a state twice. Each test is a function of JSON that runs in
a process of its own, because Core ML may end the process."""

import tempfile
from pathlib import Path

import numpy as np

from miltorch.quiet import coremltools, frozen, quiet
from workbench.errors import InputError, one_line
from workbench.runtime import model_class
from workbench.runtime.coreml import KINDS

SHAPE = (1, 32, 1, 4)


def compute_devices() -> list[dict]:
    """The devices that Core ML has: their kind (ane, gpu, cpu) and, of a Neural Engine,
    its cores.

    Raises:
        InputError: coremltools has no native layer for this Python or system.
    """
    ct = coremltools()
    _native_layer()
    return [
        {
            "kind": KINDS.get(type(device).__name__, type(device).__name__),
            "cores": getattr(device, "total_core_count", None),
        }
        for device in ct.models.compute_device.MLComputeDevice.get_all_compute_devices()
    ]


def stateful_predict(argument: dict) -> None:
    """Adds ones to a state twice, on the units ``compute_units`` of the ``runtime``
    coreml or a stand-in.

    Raises:
        InputError: there is no native layer, Core ML refuses the model, or the values
            are others.
    """
    units, ct = argument["compute_units"], coremltools()
    native_layer = model_class(argument["runtime"]).native_layer
    with native_layer(), tempfile.TemporaryDirectory() as folder:
        _native_layer()
        path, compiled = (
            str(Path(folder) / f"counter.ml{kind}") for kind in ("package", "modelc")
        )
        needed, step = f"a stateful model that runs on {units}", "see the message"
        try:
            with quiet():
                _counter(ct).save(path)
            ct.models.utils.compile_model(path, compiled)
            model = ct.models.CompiledMLModel(compiled, ct.ComputeUnit[units])
            state, ones = model.make_state(), np.ones(SHAPE, np.float32)
            sums = [
                float(model.predict({"x": ones}, state)["y"].mean()) for _ in range(2)
            ]
        except RuntimeError as problem:
            raise InputError("Core ML", one_line(problem), needed, step) from problem
    if sums != [1.0, 2.0]:
        raise InputError(
            "Core ML", f"{sums} from a state that counts", "[1.0, 2.0]", step
        )


def _counter(ct):
    """A model whose state is the sum of its inputs so far, which it returns."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    specs = [mb.TensorSpec(SHAPE, types.fp16), mb.StateTensorSpec(SHAPE, types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x, count):
        total = mb.add(x=mb.read_state(input=count), y=x)
        return mb.identity(x=mb.coreml_update_state(state=count, value=total), name="y")

    target = ct.target.iOS18
    with frozen():
        return ct.convert(
            program, minimum_deployment_target=target, skip_model_load=True
        )


def _native_layer() -> None:
    """Raises an InputError if coremltools has no native layer here."""
    try:
        from coremltools.libcoremlpython import _MLModelProxy  # noqa: F401
    except ImportError as problem:
        raise InputError(
            "coremltools",
            f"no native layer ({problem})",
            "a wheel of coremltools for macOS and this Python",
            "install Python 3.11 to 3.13 and make the environment again",
        ) from None
