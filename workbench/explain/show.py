"""Runs a reduced package with coremltools alone, and prints what it computes beside what
it should compute. `reduced.reduce` copies this file beside the package that it writes,
where `reduced.mlpackage` and the arrays are."""

import sys
from pathlib import Path

import coremltools as ct
import numpy as np


def main(units: str) -> None:
    """Runs the package on Core ML's compute units `units`."""
    folder = Path(__file__).parent
    inputs, states, expected = (
        dict(np.load(folder / f"{name}.npz"))
        for name in ("inputs", "states", "expected")
    )
    path = str(folder / "reduced.mlpackage")
    model = ct.models.MLModel(path, compute_units=ct.ComputeUnit[units])
    state = model.make_state() if states else None
    for name, value in states.items():
        state.write_state(name, value)
    outputs = model.predict(inputs, state)
    for name, value in expected.items():
        actual = outputs[name] if name in outputs else state.read_state(name)
        print(name, "expected", value.ravel()[:8], "found", actual.ravel()[:8])
        print("largest difference", np.abs(actual.reshape(value.shape) - value).max())


if __name__ == "__main__":
    main(*sys.argv[1:] or ["CPU_AND_NE"])
