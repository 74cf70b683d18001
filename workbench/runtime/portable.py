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
from miltorch.checks import check_program
from miltorch.coremltools_import import protobuf_module
from miltorch.joined import run_calls
from workbench.bundle import Shard
from workbench.errors import InputError
from workbench.runtime.base import (
    LOADING_STAGES,
    Hook,
    Package,
    PackageModel,
    Settings,
    State,
    native_inputs,
)


class PortableState(State):
    """One replaceable cell of `miltorch` per state tensor."""

    def __init__(self, shard: Shard | None, cells: dict):
        super().__init__(shard)
        self.cells = cells

    def read_tensor(self, tensor: str) -> np.ndarray:
        return self.cells[tensor].value.numpy()

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        cell = self.cells[tensor]
        cell.value = torch.tensor(value, dtype=cell.value.dtype)


class PortableModel(PackageModel):
    """A package, executed operation by operation.

    Of the settings it reads:
        precision: `declared`, `exact` or `narrow`. States are float16, in `exact`
            float32.
        fast: whether groups of operations run as one step each (`miltorch.fuse`) in
            `declared` and without a hook, which needs every operation.
        reads: with `fast`, the rows of a cache that attention reads: `all` as the
            program does, or those that hold tokens (`used`).
        keeps_head: whether a slice of the head keeps its weights between calls.
            Otherwise each call of `predict_calls` reads and drops them, so that a large
            vocabulary is never in memory whole.

    Attributes:
        executables: what runs a call, by the T of its function and whether groups of
            operations are fused; built when a call first needs it.
        weight_bytes: the size of each file of weights when the package was loaded.

    Raises:
        InputError: a program that cannot run.
    """

    shows_inner_layers = True

    def __init__(self, package: Package, settings: Settings):
        protobuf_module("Model_pb2")  # import first, so that the load time excludes it
        start = time.perf_counter()
        super().__init__(package, settings)
        self.weight_bytes = _read_ahead(package.path)
        self.precision = settings.precision
        self.reads = settings.reads
        self.fast = settings.fast and self.precision == "declared"
        is_head = self.shard is not None and self.shard.kind == "head"
        self.keeps_weights = settings.keeps_head or not is_head
        self.executables: dict[tuple[int, bool], miltorch.Executable] = {}
        self.read_programs(self._prepare)
        load_ms = (time.perf_counter() - start) * 1e3
        self.loading_ms = dict.fromkeys(LOADING_STAGES) | {"load": load_ms}

    def _prepare(self, T: int, program: miltorch.Program) -> None:
        """Builds the executable of the smallest T while its program is at hand, so that
        the program is not read again; the others are built when they are first needed. A
        model that keeps no weights builds none."""
        if not self.keeps_weights:
            check_program(program)
        elif T == self.smallest_T:
            self.executables[T, self.fast] = self.build(program, self.fast)

    def executable_for(self, T: int, fused: bool) -> miltorch.Executable:
        """The executable of the function of T, built when it is first needed."""
        key = T, fused
        if key not in self.executables:
            program = miltorch.read(self.path, self.function_names[T])
            self.executables[key] = self.build(program, fused)
        return self.executables[key]

    def build(self, program: miltorch.Program, fused: bool) -> miltorch.Executable:
        """The executable of a program, with fused groups of operations or without."""
        if not fused:
            return miltorch.Executable(program, self.precision)
        executable = miltorch.Executable(
            miltorch.fuse(program, self.reads), self.precision
        )
        # fused steps hold copies of their weights: the file is mapped no longer
        return executable.release()

    @property
    def executable(self) -> miltorch.Executable:
        """The executable of the function of the smallest T, nothing fused."""
        return self.executable_for(self.smallest_T, False)

    def make_state(self) -> PortableState:
        cells = miltorch.make_state(self.program, self.precision)
        return PortableState(self.shard, cells)

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: PortableState | None = None,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        (outputs,) = self.predict_calls([inputs], [state], [hook])
        return outputs

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[PortableState | None],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, np.ndarray]]:
        """Reads each weight once for all calls of a function that follow one another.

        Raises:
            InputError: a file of weights is no longer as long as when it was opened.
        """
        results = []
        arguments = zip(calls, states, hooks, strict=True)
        for T, group in groupby(arguments, lambda call: self.T_of(call[0])):
            tensors, cells, group_hooks = [], [], []
            for inputs, state, hook in group:
                arrays = native_inputs(inputs)
                tensors.append({n: torch.from_numpy(x) for n, x in arrays.items()})
                cells.append(state.cells if state else {})
                group_hooks.append(hook)
            # a hook needs every operation by itself
            fused = self.fast and not any(group_hooks)
            if not fused:
                self._check_weight_files()
            executable = self.executable_for(T, fused)
            for outputs in run_calls(executable, tensors, cells, group_hooks):
                results.append({n: value.numpy() for n, value in outputs.items()})
        if not self.keeps_weights:
            self.executables.clear()
        return results

    def _check_weight_files(self) -> None:
        """Raises an InputError for a weight file that is shorter than it was. Plain
        steps read the mapped files: reading a part that was cut off would end the
        process."""
        for path, size in self.weight_bytes.items():
            if not path.is_file() or path.stat().st_size < size:
                step = "copy the bundle again, and open it again"
                needed = f"the {size} bytes that were there when it was opened"
                raise InputError(str(path), "a shorter file, or none", needed, step)


def _read_ahead(package: Path) -> dict[Path, int]:
    """Advises the operating system to read all weights ahead, where it supports this;
    page by page a disk takes twice as long. Returns the size of each weight file."""
    sizes = {}
    for path in filter(Path.is_file, package.rglob("*.bin")):
        sizes[path] = path.stat().st_size
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return sizes
