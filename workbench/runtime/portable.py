"""Runs the exported package itself on PyTorch, anywhere. See `workbench.mil` for the arithmetic."""

import numpy as np
import torch

from workbench import mil
from workbench.bundle import Bundle, Shard

from .base import State, check_inputs


class Cells:
    """Raw state of the portable runtime: one replaceable cell per state tensor."""

    def __init__(self, cells: dict, half: bool):
        self.cells, self.half = cells, half

    def read(self, tensor: str) -> np.ndarray:
        value = self.cells[tensor].value.numpy()
        return value.astype(np.float16) if self.half else value.copy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        value = torch.from_numpy(np.array(value, np.float32))
        self.cells[tensor].value = value.half().float() if self.half else value


class PortableModel:
    """One shard, executed operation by operation.

    States hold fp16 values in `declared` and `narrow`, float32 in `exact`. `hook` (see `workbench.mil.interpret`) may
    be set at any time; None costs nothing.
    """

    def __init__(self, bundle: Bundle, shard: Shard, precision: str):
        self.shard, self.precision, self.hook = shard, precision, None
        self.t_max = bundle.manifest.options.t_max
        self.executable = mil.Executable(mil.read(bundle.package(shard)), precision)

    def make_state(self) -> State:
        return State(self.shard, Cells(self.executable.make_state(), half=self.precision != "exact"))

    def predict(self, inputs: dict[str, np.ndarray], state: State | None = None) -> dict[str, np.ndarray]:
        check_inputs(self.shard, inputs, self.t_max)
        tensors = {
            n: torch.from_numpy(v if v.dtype == np.int32 else np.asarray(v, np.float32)) for n, v in inputs.items()
        }  # fmt: skip
        outputs = self.executable.run(tensors, state.raw.cells if state else {}, self.hook)
        return {name: value.numpy() for name, value in outputs.items()}

    def constant(self, name: str) -> np.ndarray:
        """A weight as the package holds it, decompressed, float32."""
        return self.executable.constant(name).numpy()
