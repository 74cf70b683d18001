"""Runs the exported package itself on PyTorch, anywhere. See `miltorch` for the
arithmetic."""

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.calls import run_calls
from miltorch.interpret import Hook
from miltorch.quiet import messages
from workbench.bundle import Bundle, Shard
from workbench.runtime.base import State, attribute, check_inputs, check_interface


class Cells:
    """Raw state of the portable runtime: one replaceable cell per state tensor."""

    def __init__(self, cells: dict, half: bool):
        self.cells, self.half = cells, half

    def read(self, tensor: str) -> np.ndarray:
        value = self.cells[tensor].value
        if self.half:
            return value.half().numpy()
        return value.clone().numpy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        value = torch.from_numpy(np.require(value, requirements="CW"))
        if self.half:
            value = value.half()
        self.cells[tensor].value = value.to(torch.float32, copy=True)


class PortableModel:
    """One shard, executed operation by operation.

    States hold fp16 values in `declared` and `narrow`, float32 in `exact`. `hooked`
    sets a hook (see `miltorch.interpret`); without one nothing is called. With `fast`,
    `declared` calls take the decode path (`miltorch.fast.program`) unless a hook is
    set; the literal graph is made ready when first needed, and runs what the decode
    path does not take."""

    last_native_ms = None

    def __init__(
        self,
        bundle: Bundle,
        shard: Shard,
        precision: str,
        fast: bool,
        function: str | None,
    ):
        self.shard, self.precision, self._hook = shard, precision, None
        self.function = function
        self.t_max = shard.functions.get(function, bundle.manifest.options.t_max)
        messages("Model_pb2")  # import first, so that the load time excludes it
        start = time.perf_counter()
        self.package = bundle.package(shard)
        _read_ahead(self.package)
        program = miltorch.read(self.package, function)
        check_interface(shard, program, self.t_max)
        self.program, self.fast = program, None
        if fast and precision == "declared":
            self.fast = self._fast(program)
        if self.fast:
            self.program = self.fast.program
        else:
            # a program that cannot run is refused now, not at the first call
            self.executable  # noqa: B018
        self.loading_ms = {
            "compile": None,
            "load": (time.perf_counter() - start) * 1e3,
            "first_predict": None,
        }

    @property
    def hook(self) -> Hook | None:
        """The hook that is set, or None."""
        return self._hook

    def hooked(self, hook: Hook | None) -> AbstractContextManager:
        """Context manager inside which `hook` is called after each operation of the
        literal graph (None: no hook)."""
        return attribute(self, "_hook", hook)

    def literal(self) -> AbstractContextManager:
        """Context manager inside which calls execute the literal graph, as with
        `fast=False`."""
        return attribute(self, "fast", None)

    def _fast(self, program: miltorch.Program):
        from miltorch.fast import kernels  # numba takes a moment to import
        from miltorch.fast import program as fast

        if not kernels.available():
            return None
        this = weakref.ref(self)  # a dropped model gives its memory back at once
        return fast.ready(program, lambda: this().executable)

    @cached_property
    def executable(self) -> miltorch.Executable:
        program = self.program
        if program.block is None:
            program = miltorch.read(self.package, self.function)
        return miltorch.Executable(program, self.precision)

    def make_state(self) -> State:
        cells = miltorch.make_state(self.program)
        return State(self.shard, Cells(cells, half=self.precision != "exact"))

    def predict(
        self, inputs: dict[str, np.ndarray], state: State | None = None
    ) -> dict[str, np.ndarray]:
        (outputs,) = self.predict_calls([inputs], [state])
        return outputs

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[State | None] | None = None,
        hooks: Sequence[Hook | None] | None = None,
    ) -> list[dict[str, np.ndarray]]:
        """What `predict` returns for one call after another, each on its state (default:
        none) and with a hook of its own (default: the one that is set); see
        `miltorch.calls`."""
        hooks = hooks or [self.hook] * len(calls)
        for inputs in calls:
            check_inputs(self.shard, inputs, self.t_max)
        tensors = [_tensors(inputs) for inputs in calls]
        cells = [s.raw.cells if s else {} for s in states or [None] * len(calls)]
        if self.fast and not any(hooks):
            results = list(map(self.fast.run, tensors, cells))
        else:
            results = run_calls(self.executable, tensors, cells, hooks)
        return [
            {name: value.numpy() for name, value in outputs.items()}
            for outputs in results
        ]

    def constant(self, name: str) -> np.ndarray:
        """A weight as the package holds it, decompressed, float32."""
        return self.executable.constant(name).numpy()


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
