"""Runs the exported package itself on PyTorch, anywhere. See `miltorch` for the
arithmetic."""

import os
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.execute import Hook
from miltorch.quiet import messages
from workbench.bundle import Shard
from workbench.errors import InputError
from workbench.runtime.base import Model, State, typed


class Cells:
    """Raw state of the portable runtime: one replaceable cell per state tensor."""

    def __init__(self, cells: dict):
        self.cells = cells

    def read(self, tensor: str) -> np.ndarray:
        return self.cells[tensor].value.numpy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        cell = self.cells[tensor]
        cell.value = torch.tensor(value, dtype=cell.value.dtype)


class PortableModel(Model):
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

    shows_inner_layers = True

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
        self.sizes = _read_ahead(package)
        super().__init__(package, shard, t_max, function)
        self.precision, self.reads = precision, reads
        self.fast = fast and precision == "declared"
        self.executables: dict[tuple[int, bool], miltorch.Executable] = {}
        self.runs(min(self.functions), self.fast)
        load_ms = (time.perf_counter() - start) * 1e3
        self.loading_ms = {"compile": None, "load": load_ms, "first_predict": None}

    def runs(self, T: int, fused: bool) -> miltorch.Executable:
        """What runs calls of the function of T, made when it is first needed."""
        key = T, fused
        if key not in self.executables:
            program = miltorch.read(self.package, self.functions[T])
            made = miltorch.Executable(program, self.precision, fused, self.reads)
            self.executables[key] = made.release() if fused else made
        return self.executables[key]

    @property
    def executable(self) -> miltorch.Executable:
        """Of the function of the smallest T, nothing fused."""
        return self.runs(min(self.functions), False)

    def make_state(self) -> State:
        cells = miltorch.make_state(self.program, self.precision)
        return State(self.shard, Cells(cells))

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[State | None],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, np.ndarray]]:
        """Each weight is read once for all calls of a function that follow one
        another.

        Raises:
            InputError: a file of weights is no longer as long as when it was opened.
        """
        results = []
        called = zip(calls, states, hooks, strict=True)
        for T, group in groupby(called, lambda call: self.of_call(call[0])):
            each, own, hooks = zip(*group)
            tensors = [
                {name: torch.from_numpy(value) for name, value in typed(inputs).items()}
                for inputs in each
            ]
            cells = [state.raw.cells if state else {} for state in own]
            fused = self.fast and not any(hooks)
            if not fused:
                self._check_sizes()
            runs = self.runs(T, fused)
            for outputs in runs.run_calls(tensors, cells, hooks):
                results.append({n: value.numpy() for n, value in outputs.items()})
        return results

    def _check_sizes(self) -> None:
        """Plain steps read the mapped files: reading a part that was cut off would end
        the process."""
        for path, size in self.sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                step = "copy the bundle again, and open it again"
                needed = f"the {size} bytes that were there when it was opened"
                raise InputError(str(path), "a shorter file, or none", needed, step)


def _read_ahead(package: Path) -> dict[Path, int]:
    """Advises the operating system to read all weights ahead, where it supports this;
    page by page a disk takes twice as long. Returns the size of each file of them."""
    sizes = {}
    for path in filter(Path.is_file, package.rglob("*.bin")):
        sizes[path] = path.stat().st_size
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return sizes
