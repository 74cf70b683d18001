"""The interface between a shard and the runtime that executes it, and the checks that
all runtimes share.

NumPy arrays at the boundary, float32 in and out; states under their logical names
(`layers.3.k_state`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

import miltorch
from workbench.bundle import Shard
from workbench.bundle.names import POS
from workbench.errors import InputError

UNKNOWN = miltorch.Type("")  # of an output that no operation computes


class Model(Protocol):
    """One loaded package.

    Attributes:
        shard: the shard that it is; None for a package of no bundle, whose states have
            the names of its tensors.
        loading_ms: compile, cold_load, load, first_predict; None where it did not
            happen or is not known.
        is_device: whether its values depend on the hardware that runs it. The models
            of other runtimes take hooks.
        shows_inner_layers: whether a hook sees every operation and may replace its
            value.
        last_native_ms: Core ML's own share of the last call; None where nothing says.
    """

    shard: Shard | None
    loading_ms: dict[str, float | None]
    is_device: bool
    shows_inner_layers: bool
    last_native_ms: float | None

    def make_state(self) -> "State":
        """Fresh state, zeros; it belongs to this model alone."""
        ...

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: "State | None" = None,
        hook: Callable | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the package once and advances `state`. Unless it is a device, `hook` is
        called as hook(op, outputs) after each operation."""
        ...


class Functions:
    """The functions of a package, by the T of the calls that they run; 0: every T. A
    shard of several functions has one for each T, unless one is named.

    Attributes:
        program: the interface of the function of the smallest T.

    Raises:
        InputError: a function that the package lacks, or whose interface is not as the
            manifest says.
    """

    def __init__(self, package: Path, shard: Shard | None, function: str | None, t_max):
        self.package, self.shard = package, shard
        self.functions: dict[int, str | None] = {0: function}
        if shard and shard.functions:
            named = {T: name for name, T in shard.functions.items()}
            t_max = shard.functions.get(function, t_max)
            self.functions = self.functions if function else dict(sorted(named.items()))
        self.t_max, self.program = t_max, None
        for T, name in self.functions.items():
            program = miltorch.read(package, name)
            if shard:
                check_interface(shard, program, T or t_max)
            # without its operations, so that its weights are mapped no longer
            self.program = self.program or replace(program, block=None)

    def of_call(self, inputs: dict[str, np.ndarray]) -> int:
        """The T of the function that runs a call."""
        if 0 in self.functions:
            return 0
        T = min(self.functions)
        for name, shape in self.shard.inputs.items():
            if "T" in shape and np.ndim(inputs.get(name)) == len(shape):
                T = inputs[name].shape[shape.index("T")]
                break
        if T not in self.functions:
            raise InputError(
                f"inputs of shard {self.shard.name}",
                f"T = {T}",
                f"T of {', '.join(map(str, self.functions))}",
                "pad the call",
            )
        return T


class State:
    """Logical states of one model for one batch of sequences, over a runtime's `raw`
    state.

    A raw state has `read(tensor)` and `write(tensor, value)` for whole tensors under
    Core ML's names. `read(name)` copies a state out; `write(name, value)` replaces it
    (shape and dtype as `read` gives them)."""

    def __init__(self, shard: Shard | None, raw):
        self.shard, self.raw = shard, raw

    def _tensor(self, name: str) -> str:
        if self.shard is None:
            return name
        if name not in self.shard.states:
            raise InputError(
                f"state {name!r}",
                f"no such state in shard {self.shard.name}",
                f"one of {', '.join(self.shard.states)}",
                "name one of these",
            )
        return self.shard.states[name].tensor

    def read(self, name: str) -> np.ndarray:
        return np.array(self.raw.read(self._tensor(name)))

    def write(self, name: str, value: np.ndarray) -> None:
        tensor = self._tensor(name)
        if self.shard and list(value.shape) != self.shard.states[name].shape:
            raise InputError(
                f"state {name!r}",
                f"shape {list(value.shape)}",
                f"{self.shard.states[name].shape}",
                "reshape the array",
            )
        self.raw.write(tensor, value)


def typed(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as Core ML's binding takes them: contiguous, writeable, int32 as they are
    and all others in float32, which Core ML rounds to the float16 of its inputs,
    once."""
    arrays = {}
    for name, value in inputs.items():
        dtype = np.float32
        if value.dtype == np.int32:
            dtype = np.int32
        arrays[name] = np.require(value, dtype, "CW")
    return arrays


def check_inputs(shard: Shard, inputs: dict[str, np.ndarray], t_max: int) -> None:
    """Raises an InputError for missing or unknown inputs, wrong shapes, and axes T that
    disagree or exceed t_max. Core ML checks each input by itself; inputs of different T
    give undefined results there."""
    if inputs.keys() != shard.inputs.keys():
        raise InputError(
            f"inputs of shard {shard.name}",
            ", ".join(sorted(inputs)),
            ", ".join(sorted(shard.inputs)),
            "give exactly these",
        )
    T = None
    for name, shape in shard.inputs.items():
        actual = inputs[name].shape
        fits = len(actual) == len(shape)
        for declared, size in zip(shape, actual) if fits else ():
            if declared == "T":
                T = T or size
                if size != T or size > t_max or not size:
                    raise InputError(
                        f"input {name!r} of shard {shard.name}",
                        f"T = {size}",
                        f"one T for all inputs, 1 to {t_max}",
                        "split the call",
                    )
            elif size != declared:
                fits = False
        if not fits:
            raise InputError(
                f"input {name!r} of shard {shard.name}",
                f"shape {list(actual)}",
                f"{shape}",
                "reshape it",
            )


def check_outputs(
    shard: Shard, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Raises an InputError for outputs that are missing or have another shape than the
    manifest says. Core ML was reported to return a batch of 1 without an error
    (CT#2730)."""
    sizes: dict = {"T": None}  # the size of each axis as the manifest names it
    for name, shape in shard.inputs.items():
        sizes.update(zip(shape, inputs[name].shape))
    for name, shape in shard.outputs.items():
        declared, text = [sizes.get(n, n) for n in shape], "no such output"
        if name in outputs:
            actual = list(outputs[name].shape)
            if actual == declared:
                continue
            text = f"shape {actual}"
            if actual and actual[0] < declared[0] and actual[1:] == declared[1:]:
                text += f", the batch of {declared[0]} collapsed to {actual[0]}"
        raise InputError(
            f"output {name!r} of shard {shard.name}",
            text,
            f"{declared}, as bundle.json says",
            "run it with the portable runtime, or export with --batch 1",
        )


def check_interface(shard: Shard, program: miltorch.Program, t_max: int) -> None:
    """Compares the inputs, states and outputs of a shard in the manifest with those of
    its package.

    Compared are the names of inputs, outputs and states, every size, the dtypes that
    the contract says (`pos` int32, floats for all else), and whether the axis T takes 1
    to t_max tokens, or t_max alone where the package fixes it.

    Raises:
        InputError: names the first value that differs.
    """
    types = dict(program.inputs)
    for op in program.block.ops:
        types.update(op.outputs)
    ranges = {
        value.name: value.type.multiArrayType.shapeRange.sizeRanges
        for value in getattr(program.description, "input", ())
    }

    def check(agrees: bool, subject: str, packaged: object, declared: object) -> None:
        if not agrees:
            raise InputError(
                f"{subject} of shard {shard.name}",
                f"{packaged} in the package",
                f"{declared}, as bundle.json says",
                "export or copy the bundle again",
            )

    for what, declared, packaged in (
        ("inputs", shard.inputs.keys(), program.inputs),
        ("outputs", shard.outputs.keys(), program.outputs),
        ("states", {entry.tensor for entry in shard.states.values()}, program.states),
    ):
        names = ", ".join(sorted(packaged)), ", ".join(sorted(declared))
        check(declared == set(packaged), what, *names)
    for name, declared in shard.inputs.items():
        subject, kind = f"input {name!r}", program.inputs[name]
        dtypes = ("INT32",) if name == POS else ("FLOAT16", "FLOAT32")
        check(kind.dtype in dtypes, subject, kind.dtype, " or ".join(dtypes))
        shape = _sizes(kind.shape, ranges.get(name, ()))
        declaration = f"{declared}, T from 1 to {t_max}"
        check(_agree(shape, declared, t_max), subject, f"shape {shape}", declaration)
    for name, declared in shard.outputs.items():
        shape, subject = list(types.get(name, UNKNOWN).shape), f"output {name!r}"
        check(_agree(shape, declared, t_max), subject, f"shape {shape}", declared)
    for name, entry in shard.states.items():
        shape = list(program.states[entry.tensor].shape)
        packaged = f"shape {shape} of {entry.tensor}"
        check(shape == entry.shape, f"state {name!r}", packaged, f"{entry.shape}")


def _sizes(shape: tuple, ranges) -> list:
    """The sizes of an input of a package; of a flexible axis its range (low, high), or
    "?" where the package describes none."""
    sizes = list(shape)
    for axis, n in enumerate(shape):
        if n is not None:
            continue
        sizes[axis] = "?"
        if ranges:
            low, high = ranges[axis].lowerBound, ranges[axis].upperBound
            if high < 0:
                high = math.inf
            sizes[axis] = low, high
    return sizes


def _agree(shape: list, declared: list, t_max: int) -> bool:
    """Whether every axis of a package's shape is as declared: the size itself, t_max
    for T, a range (low, high) that holds every T; None, for an output, takes any."""
    return len(shape) == len(declared) and all(
        _axis_agrees(size, n, t_max) for size, n in zip(shape, declared)
    )


def _axis_agrees(size, declared, t_max: int) -> bool:
    if declared != "T":
        return size in (None, declared)
    if isinstance(size, tuple):
        return size[0] <= 1 and size[1] >= t_max
    return size in (None, t_max)
