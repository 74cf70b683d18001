"""Tests which arrays and values coremltools' native layer accepts and returns, on one
shard on the CPU."""

import ctypes
import os
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from miltorch.quiet import coremltools
from workbench.bundle.names import K_STATE, X
from workbench.errors import one_line
from workbench.firstlight import rungs
from workbench.firstlight.job import Job

# name → conversion of a float32 array, and whether the binding accepts it by its source
# code (None: the source leaves it open); coremltools converts float16 inputs before
# they reach the binding
ARRAYS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool | None]] = {
    "float32": (np.copy, True),
    "float64": (np.float64, True),
    "int32": (np.int32, True),
    "float16": (np.float16, False),
    "int64": (np.int64, False),
    "int8": (np.int8, False),
    "uint8": (np.uint8, False),
    "bool": (lambda a: a > 0, False),
    "read-only": (lambda a: np.broadcast_to(a, a.shape), False),
    "strided": (lambda a: np.repeat(a, 2, -1)[..., ::2], None),
    "Fortran order": (np.asfortranarray, None),
}
SPECIAL = {
    "-0": -0.0,
    "subnormal": 2.0**-24,
    "largest subnormal": 2.0**-14 - 2.0**-24,
    "smallest normal": 2.0**-14,
    "65504": 65504.0,
    "65520, which rounds to inf": 65520.0,
    "inf": np.inf,
    "-inf": -np.inf,
    "NaN": np.nan,
}


def binding_cases() -> list[dict]:
    cases = []
    for to, name in product(BINDING, ARRAYS):
        cases.append({"case": f"{to} {name}", "to": to, "array": name})
    for name in SPECIAL:
        cases.append({"case": f"round trip {name}", "value": name})
    return [*cases, {"case": "output"}, {"case": "stdout of compile"}]


@cache
def _state_shard(job: Job):
    """Bundle, loaded model and state of the rung `state` on the CPU, its calls' first
    inputs."""
    bundle, shard = rungs.opened(rungs.ladder()["state"], job.folder)
    model = job.model(bundle, shard, "CPU_ONLY")
    inputs = rungs.call_inputs(bundle, shard, 1, 0, 1)
    return bundle, model, model.make_state(), inputs


def _write_state(model, state, inputs: dict, change: Callable) -> None:
    handle = state.raw.state
    handle.write_state(K_STATE, change(np.array(handle.read_state(K_STATE))))


def _predict(model, state, inputs: dict, change: Callable) -> None:
    model.model.predict(inputs | {X: change(inputs[X])}, state.raw.state)


BINDING = {"state": _write_state, "input": _predict}


def measure_binding(case: dict, job: Job) -> dict:
    """The result of one case: an array type, a round trip of a value, the output, or
    stdout."""
    bundle, model, state, inputs = _state_shard(job)
    if "array" in case:
        return _array_case(case, model, state, inputs)
    if "value" in case:
        return _round_trip(SPECIAL[case["value"]], state)
    if case["case"] == "output":
        outputs = model.model.predict(inputs, state.raw.state)
        (output,) = outputs.values()
        dtype, contiguous = str(output.dtype), output.flags.c_contiguous
        accepted = dtype == "float32" and contiguous
        return {"dtype": dtype, "contiguous": contiguous, "accepted": accepted}
    return _stdout_of_compile(bundle.package(model.shard), job)


def _array_case(case: dict, model, state, inputs: dict) -> dict:
    """Whether the binding accepts an array of a type, or the error that it raises."""
    change, expected = ARRAYS[case["array"]]
    if (case["to"], case["array"]) == ("input", "float16"):
        expected = True
    accepted, said = True, None
    try:
        BINDING[case["to"]](model, state, inputs, change)
    except Exception as problem:  # any error of the binding is a result
        accepted = False
        said = f"{type(problem).__name__}: {one_line(problem)}"
    return {"accepted": accepted, "expected": expected, "said": said}


def _round_trip(value: float, state) -> dict:
    """Whether a value that is written to a state is read back with the same fp16
    bits."""
    handle = state.raw.state
    array = np.array(handle.read_state(K_STATE))
    array.flat[0] = value
    handle.write_state(K_STATE, array)
    read = np.float32(handle.read_state(K_STATE).flat[0])
    with np.errstate(over="ignore"):
        halves = np.float32([value, read]).astype(np.float16)
    bits = [f"{half.view(np.uint16):#06x}" for half in halves]
    alike = bits[0] == bits[1] or (np.isnan(value) and np.isnan(read))
    return {
        "wrote": bits[0],
        "read": bits[1],
        "accepted": bool(alike),
        "expected": True,
    }


def _stdout_of_compile(package: Path, job: Job) -> dict:
    """The number of bytes that compiling a package writes to file descriptor 1."""
    target = job.folder / "binding.mlmodelc"
    with tempfile.TemporaryFile() as written:
        before = os.dup(1)
        os.dup2(written.fileno(), 1)
        try:
            with job.native_layer():
                coremltools().models.utils.compile_model(str(package), str(target))
        finally:
            ctypes.CDLL(None).fflush(None)  # writes C's buffers out
            os.dup2(before, 1)
            os.close(before)
        written.seek(0)
        return {"bytes_on_stdout": len(written.read())}
