"""What this machine can do: versions, Core ML, memory, and what a Mac would add. Core ML
is tried in child processes, because it may crash."""

import platform
import tempfile

import numpy as np

from miltorch.coremltools_import import coremltools, frozen_gc, quiet
from workbench import log, plugins, process, runtime
from workbench.errors import InputError, one_line
from workbench.log.machine import hardware
from workbench.runtime.coreml import DEVICE_UNITS

UNITS = ("CPU_ONLY", "CPU_AND_NE")
TIMEOUT_S = 120
SHAPE = (1, 32, 1, 4)  # of the state of the model that Core ML is tried with


def examine(name: str = "coreml") -> dict:
    """The JSON of `workbench doctor`. An unknown value is None.

    ``compute_devices`` lists the devices of Core ML. ``stateful_predict`` has, for each of
    `UNITS`, ``ok`` if a model with a state ran there, else the reason why it did not.
    ``coreml_available`` says whether the model ran on the CPU.

    Args:
        name: the runtime to try: coreml, or a stand-in for it, which has no devices.
    """
    machine = log.environment() | hardware()
    versions = machine["versions"]
    can_try = name != "coreml" or runtime.coreml_available()
    devices = None
    # compute units → why the model did not run there
    failures: dict[str, str | None] = {}
    if can_try:
        if name == "coreml":
            devices = process.call(compute_devices, timeout_s=TIMEOUT_S).value
        for units in UNITS:
            outcome = process.call(stateful_predict, name, units, timeout_s=TIMEOUT_S)
            failures[units] = outcome.failure
    runs_on_cpu = can_try and failures["CPU_ONLY"] is None
    results = {units: failure or "ok" for units, failure in failures.items()}
    # every Mac with Apple silicon has a Neural Engine; Core ML's own list is better
    has_engine = platform.machine() == "arm64"
    if devices is not None:
        has_engine = "ane" in {device["kind"] for device in devices}
    packages = [entry.dist for entry in plugins.find_plugins("targets").values()]
    return {
        "platform": machine["platform"],
        "python": versions["python"],
        "macos": platform.mac_ver()[0] or None,
        "chip": machine["chip"],
        "memory_bytes": machine["memory_bytes"],
        "coremltools": versions["coremltools"],
        "torch": versions["torch"],
        "plugins": {package.name: package.version for package in packages},
        "coreml_available": runs_on_cpu,
        "ane_available": runs_on_cpu and has_engine,
        "compute_devices": devices,
        "stateful_predict": results if can_try else None,
        "default_runtime": runtime.resolve(),
        "notes": _notes(failures),
    }


def _notes(failures: dict[str, str | None]) -> list[str]:
    """What the user should know, in sentences.

    Args:
        failures: compute units → why a model with a state did not run there, None where it
            ran; empty without Core ML.
    """
    failed = {units: reason for units, reason in failures.items() if reason}
    if failed:
        words = "A model with a state did not run on"
        return [
            *(f"{words} {units}: {reason}" for units, reason in failed.items()),
            "Name compute units on which it ran with --compute-units, or take --runtime portable.",
        ]
    if failures:
        return [
            "Core ML runs here: decode, sweep and validate use it unless told --runtime portable.",
            "Times are this Mac's. A plan is a preference; timing each T shows the actual unit.",
            "Write cool_down_s: 15 into a sweep's run: a warm chip is slower, and the Neural "
            "Engine is reported to need as long after a failed compilation.",
            "Exports, goldens and logs of other machines can be used here as they are.",
        ]
    system = platform.system()
    if mac := platform.mac_ver()[0]:
        system = f"macOS {mac}"
    return [
        f"No Core ML here ({system}; it needs macOS 15), so the portable runtime runs the "
        "packages.",
        "Works here: export, validate, explain, generate, sweep, report, all notebooks "
        "and tests.",
        "Its values validate the exported program itself; its times are this machine's, never the "
        "Neural Engine's.",
        "A Mac adds, from the same bundles and goldens: device values, placement on the Neural "
        "Engine, its tok/s.",
    ]


def compute_devices() -> list[dict]:
    """The devices that Core ML can use: their kind (ane, gpu, cpu), and the number of cores
    of a Neural Engine.

    Raises:
        InputError: coremltools has no native layer for this Python or system.
    """
    ct = coremltools()
    check_native_layer()
    return [
        {
            "kind": DEVICE_UNITS.get(type(device).__name__, type(device).__name__),
            "cores": getattr(device, "total_core_count", None),
        }
        for device in ct.models.compute_device.MLComputeDevice.get_all_compute_devices()
    ]


def stateful_predict(name: str, units: str) -> None:
    """Adds ones to a state twice, on compute units of the runtime coreml or of a stand-in.

    Raises:
        InputError: there is no native layer, Core ML refuses the model, or the results are
            not 1 and 2.
    """
    ct, native_layer = coremltools(), runtime.model_class(name).native_layer
    needed, step = f"a stateful model that runs on {units}", "see the message"
    with native_layer(), tempfile.TemporaryDirectory() as folder:
        check_native_layer()
        package, compiled = f"{folder}/counter.mlpackage", f"{folder}/counter.mlmodelc"
        try:
            with quiet():
                _counter(ct).save(package)
            ct.models.utils.compile_model(package, compiled)
            model = ct.models.CompiledMLModel(compiled, ct.ComputeUnit[units])
            # the second call shows whether the state keeps what the first one wrote
            state, ones = model.make_state(), np.ones(SHAPE, np.float32)
            sums = [
                float(model.predict({"x": ones}, state)["y"].mean()) for _ in range(2)
            ]
        except RuntimeError as problem:
            raise InputError("Core ML", one_line(problem), needed, step) from problem
    if sums != [1.0, 2.0]:
        actual = f"{sums} from a state that counts"
        raise InputError("Core ML", actual, "[1.0, 2.0]", step)


def _counter(ct):
    """A Core ML model that adds its input to a state and returns the sum."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    specs = [mb.TensorSpec(SHAPE, types.fp16), mb.StateTensorSpec(SHAPE, types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x, count):
        total = mb.add(x=mb.read_state(input=count), y=x)
        return mb.identity(x=mb.coreml_update_state(state=count, value=total), name="y")

    target = ct.target.iOS18
    with frozen_gc():
        return ct.convert(
            program, minimum_deployment_target=target, skip_model_load=True
        )


def check_native_layer() -> None:
    """Raises an InputError if coremltools has no native layer here."""
    try:
        # coremltools itself imports without it and fails later, at the first model
        from coremltools.libcoremlpython import _MLModelProxy  # noqa: F401
    except ImportError as problem:
        raise InputError(
            "coremltools",
            f"no native layer ({problem})",
            "a wheel of coremltools for macOS and this Python",
            "install Python 3.11 to 3.13 and make the environment again",
        ) from None
