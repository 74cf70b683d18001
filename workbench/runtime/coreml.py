"""Runs a shard through coremltools and Core ML (macOS 15 or later). Nothing of this is measured off a Mac."""

import numpy as np

from workbench.bundle import Bundle, Shard
from workbench.quiet import coremltools

from .base import State, check_inputs


class Handle:
    """Raw state over coremltools' MLState."""

    def __init__(self, state):
        self.state = state

    def read(self, tensor: str) -> np.ndarray:
        return self.state.read_state(tensor)

    def write(self, tensor: str, value: np.ndarray) -> None:
        self.state.write_state(tensor, value)


class CoreMLModel:
    """One shard as an `MLModel`; `compute_units` is a name of coremltools' ComputeUnit."""

    def __init__(self, bundle: Bundle, shard: Shard, compute_units: str):
        ct = coremltools()

        self.shard, self.t_max = shard, bundle.manifest.options.t_max
        self.model = ct.models.MLModel(str(bundle.package(shard)), compute_units=ct.ComputeUnit[compute_units])

    def make_state(self) -> State:
        return State(self.shard, Handle(self.model.make_state()))

    def predict(self, inputs: dict[str, np.ndarray], state: State | None = None) -> dict[str, np.ndarray]:
        check_inputs(self.shard, inputs, self.t_max)
        typed = {n: v if v.dtype == np.int32 else v.astype(np.float16) for n, v in inputs.items()}
        outputs = self.model.predict(typed, state.raw.state) if state else self.model.predict(typed)
        return {name: np.asarray(value, np.float32) for name, value in outputs.items()}
