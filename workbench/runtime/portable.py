"""Runs the exported package itself on PyTorch, anywhere. See `workbench.mil` for the arithmetic."""

import os
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from workbench import mil
from workbench.bundle import Bundle, Shard
from workbench.quiet import coremltools

from .base import State, check_inputs


class Cells:
    """Raw state of the portable runtime: one replaceable cell per state tensor."""

    def __init__(self, cells: dict, half: bool):
        self.cells, self.half = cells, half

    def read(self, tensor: str) -> np.ndarray:
        value = self.cells[tensor].value
        return (value.half() if self.half else value.clone()).numpy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        value = torch.from_numpy(np.require(value, requirements="CW"))
        self.cells[tensor].value = (value.half() if self.half else value).to(torch.float32, copy=True)


class PortableModel:
    """One shard, executed operation by operation.

    States hold fp16 values in `declared` and `narrow`, float32 in `exact`. `hook` (see `workbench.mil.interpret`) may
    be set at any time; None costs nothing. With `fast`, `declared` calls take the decode path (`workbench.mil.fast`)
    unless a hook is set; the literal graph is made ready when first needed, and runs what the decode path does not take.
    """

    def __init__(self, bundle: Bundle, shard: Shard, precision: str, fast: bool):
        self.shard, self.precision, self.hook = shard, precision, None
        self.t_max = bundle.manifest.options.t_max
        coremltools()  # its import is nobody's loading time
        start = time.perf_counter()
        self.package = bundle.package(shard)
        _read_ahead(self.package)
        program = mil.read(self.package)
        self.fast = self._fast(program) if fast and precision == "declared" else None
        self.program = self.fast.program if self.fast else program
        if self.fast is None:
            self.executable  # noqa: B018  (refuses now what it cannot run, not at the first call)
        self.loading_ms = {"compile": None, "load": (time.perf_counter() - start) * 1e3, "first_predict": None}

    def _fast(self, program: mil.Program):
        from workbench.mil import fast, kernels  # numba takes a moment to import

        return fast.ready(program, lambda: self.executable) if kernels.available() else None

    @cached_property
    def executable(self) -> mil.Executable:
        return mil.Executable(self.program if self.program.block else mil.read(self.package), self.precision)

    def make_state(self) -> State:
        return State(self.shard, Cells(mil.make_state(self.program), half=self.precision != "exact"))

    def predict(self, inputs: dict[str, np.ndarray], state: State | None = None) -> dict[str, np.ndarray]:
        check_inputs(self.shard, inputs, self.t_max)
        tensors = {n: torch.from_numpy(v if v.dtype == np.int32 else np.asarray(v, np.float32)) for n, v in inputs.items()}
        cells = state.raw.cells if state else {}
        if self.fast and self.hook is None:
            outputs = self.fast.run(tensors, cells)
        else:
            outputs = self.executable.run(tensors, cells, self.hook)
        return {name: value.numpy() for name, value in outputs.items()}

    def constant(self, name: str) -> np.ndarray:
        """A weight as the package holds it, decompressed, float32."""
        return self.executable.constant(name).numpy()


def _read_ahead(package: Path) -> None:
    """Tells the system, where it listens, that all weights will be read: page by page a disk takes twice as long."""
    for path in package.rglob("*.bin") if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
