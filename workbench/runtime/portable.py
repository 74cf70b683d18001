"""Runs the exported package itself on PyTorch, anywhere. See `miltorch` for the
arithmetic."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.execute import Hook
from miltorch.quiet import messages
from workbench.bundle import Shard
from workbench.runtime.base import Functions, State


class Cells:
    """Raw state of the portable runtime: one replaceable cell per state tensor."""

    def __init__(self, cells: dict):
        self.cells = cells

    def read(self, tensor: str) -> np.ndarray:
        return self.cells[tensor].value.numpy().copy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        cell = self.cells[tensor]
        value = torch.from_numpy(np.require(value, requirements="CW"))
        cell.value = value.to(cell.value.dtype, copy=True)


class PortableModel(Functions):
    """A package, executed operation by operation.

    Args:
        precision: `declared`, `exact` or `narrow`. States are float16, in `exact`
            float32.
        fast: whether groups of operations run as one step each (`miltorch.fuse`) in
            `declared` and without a hook, which needs every operation.
        reads: with `fast`, the rows of a cache that attention reads: `all` as the
            program does, or those that hold tokens (`used`).

    Raises:
        InputError: a program that cannot run.
    """

    is_device = False
    shows_inner_layers = True
    last_native_ms = None

    def __init__(
        self,
        package: Path,
        shard: Shard | None = None,
        t_max: int = 0,
        function: str | None = None,
        *,
        precision: str = "declared",
        fast: bool = False,
        reads: str = "used",
    ):
        messages("Model_pb2")  # import first, so that the load time excludes it
        start = time.perf_counter()
        _read_ahead(package)
        super().__init__(package, shard, function, t_max)
        self.precision, self.reads = precision, reads
        self.fast = fast and precision == "declared"
        self.executables: dict[tuple[int, bool], miltorch.Executable] = {}
        self.program = self.runs(min(self.functions), self.fast).program
        load_ms = (time.perf_counter() - start) * 1e3
        self.loading_ms = {"compile": None, "load": load_ms, "first_predict": None}

    def runs(self, T: int, fused: bool) -> miltorch.Executable:
        """What runs calls of the function of T, made when it is first needed."""
        key = T, fused
        if key not in self.executables:
            program = miltorch.read(self.package, self.functions[T])
            if fused:
                made = miltorch.Executable(program, fuse=True, reads=self.reads)
                self.executables[key] = made.release()
            else:
                self.executables[key] = miltorch.Executable(program, self.precision)
        return self.executables[key]

    @property
    def executable(self) -> miltorch.Executable:
        """Of the function of the smallest T, nothing fused."""
        return self.runs(min(self.functions), False)

    def make_state(self) -> State:
        cells = miltorch.make_state(self.program, self.precision)
        return State(self.shard, Cells(cells))

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None = None,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        (outputs,) = self.predict_calls([inputs], [state], [hook])
        return outputs

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[State | None],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, np.ndarray]]:
        """What `predict` returns for one call after another, each on its state and with
        a hook of its own; each weight is read once for all of them."""
        Ts = set(map(self.of_call, calls))
        if len(Ts) > 1:
            return list(map(self.predict, calls, states, hooks))
        runs = self.runs(Ts.pop(), self.fast and not any(hooks))
        tensors = list(map(_tensors, calls))
        cells = [state.raw.cells if state else {} for state in states]
        return [
            {name: value.numpy() for name, value in outputs.items()}
            for outputs in runs.run_calls(tensors, cells, hooks)
        ]

    def constant(self, name: str) -> np.ndarray:
        """A weight as the package holds it, decompressed, float32."""
        return self.executable.constants[name].float().numpy()


def _tensors(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, value in inputs.items():
        if value.dtype != np.float32 and value.dtype != np.int32:
            value = value.astype(np.float32)
        tensors[name] = torch.from_numpy(value)
    return tensors


def _read_ahead(package: Path) -> None:
    """Advises the operating system to read all weights ahead, where it supports this;
    page by page a disk takes twice as long."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in package.rglob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
