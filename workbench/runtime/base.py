"""The interface between a shard and the runtime that executes it, and the checks that
all runtimes share.

NumPy arrays at the boundary, float32 in and out; states under their logical names
(`layers.3.k_state`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import miltorch
from workbench.bundle import Shard
from workbench.bundle.names import POS
from workbench.errors import InputError

UNKNOWN = miltorch.Type("")  # of an output that no operation computes


class Model:
    """One loaded package, with one function for every T, or one for each.

    Args:
        shard: the shard that it is; None for a package of no bundle, whose states have
            the names of its tensors.
        t_max: the bundle's.
        function: the one function to run (default: of a shard that names functions,
            that of each call's T; of others, the package's own default).

    Attributes:
        functions: names by the T of the calls that they run; 0: every T.
        program: the interface of a function.
        loading_ms: compile, cold_load, load, first_predict; None where it did not
            happen or is not known.
        is_device: whether its values depend on the hardware that runs it. The models
            of other runtimes take hooks.
        shows_inner_layers: whether a hook sees every operation and may replace its
            value.
        last_native_ms: Core ML's own share of the last call; None where nothing says.

    Raises:
        InputError: a function that the package lacks, or whose interface is not as the
            manifest says.
    """

    is_device = shows_inner_layers = False
    last_native_ms: float | None = None
    loading_ms: dict[str, float | None]

    def __init__(
        self,
        package: Path,
        shard: Shard | None = None,
        t_max: int = 0,
        function: str | None = None,
    ):
        self.package, self.shard = package, shard
        named = shard.functions if shard else {}
        self.functions: dict[int, str | None] = {0: function}
        if named and not function:
            self.functions = {T: name for name, T in named.items()}
        for T, name in self.functions.items():
            program = miltorch.read(package, name)
            if shard:
                check_interface(shard, program, T or named.get(name, t_max))
            # without its operations, so that its weights are mapped no longer
            self.program = replace(program, block=None)

    def of_call(self, inputs: dict[str, np.ndarray]) -> int:
        """The T of the function that runs a call."""
        if 0 in self.functions:
            return 0
        shapes = self.shard.inputs.items()
        name, axis = next((name, s.index("T")) for name, s in shapes if "T" in s)
        return inputs[name].shape[axis]

    def make_state(self) -> "State":
        """Fresh state, zeros; it belongs to this model alone."""
        raise NotImplementedError

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: "State | None" = None,
        hook: Callable | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the package once and advances `state`. Unless it is a device, `hook` is
        called as hook(op, outputs) after each operation."""
        (outputs,) = self.predict_calls([inputs], [state], [hook])
        return outputs

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: "Sequence[State | None]",
        hooks: Sequence[Callable | None],
    ) -> list[dict[str, np.ndarray]]:
        """What `predict` returns for one call after another, each on its state and with
        a hook of its own. A runtime has one of the two."""
        return list(map(self.predict, calls, states, hooks))


class State:
    """Logical states of one model for one batch of sequences, over a runtime's `raw`
    state.

    A raw state has `read(tensor)` and `write(tensor, value)` for whole tensors under
    Core ML's names. `read(name)` copies a state out; `write(name, value)` replaces it
    (shape and dtype as `read` gives them)."""

    def __init__(self, shard: Shard | None, raw):
        self.shard, self.raw = shard, raw

    def read(self, name: str) -> np.ndarray:
        return np.array(self.raw.read(self._tensor(name)))

    def write(self, name: str, value: np.ndarray) -> None:
        self.raw.write(self._tensor(name), value)

    def _tensor(self, name: str) -> str:
        return self.shard.states[name].tensor if self.shard else name


def interrupted(subject: str) -> InputError:
    """What is raised for states that cannot be gone on with."""
    found = "states that an interrupted call has advanced in part"
    step = "begin again, or from a snapshot"
    return InputError(subject, found, "states after all of its tokens", step)


def typed(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as Core ML's binding takes them: contiguous, writeable, int32 as they are
    and all others in float32, which Core ML rounds to the float16 of its inputs,
    once."""
    return {
        name: np.require(x, np.int32 if x.dtype == np.int32 else np.float32, "CW")
        for name, x in inputs.items()
    }


def check_outputs(
    shard: Shard, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Raises an InputError for outputs of another shape than the manifest says. Core ML
    was reported to return a batch of 1 without an error (CT#2730)."""
    sizes = {}  # the size of each axis as the manifest names it
    for name, shape in shard.inputs.items():
        sizes.update(zip(shape, inputs[name].shape))
    for name, shape in shard.outputs.items():
        declared, actual = [sizes.get(n, n) for n in shape], [*outputs[name].shape]
        if actual == declared:
            continue
        text = f"shape {actual}"
        if actual[1:] == declared[1:]:
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
    types = program.inputs | program.states
    for op in program.block.ops:
        types.update(op.outputs)
    ranges = {
        value.name: value.type.multiArrayType.shapeRange.sizeRanges
        for value in getattr(program.description, "input", ())
    }
    states = {entry.tensor: entry.shape for entry in shard.states.values()}
    titles = {entry.tensor: name for name, entry in shard.states.items()}

    def check(agrees: bool, subject: str, packaged: object, declared: object) -> None:
        if not agrees:
            raise InputError(
                f"{subject} of shard {shard.name}",
                f"{packaged} in the package",
                f"{declared}, as bundle.json says",
                "export or copy the bundle again",
            )

    for what, declared, packaged in (
        ("input", shard.inputs, program.inputs),
        ("output", shard.outputs, program.outputs),
        ("state", states, program.states),
    ):
        names = ", ".join(sorted(packaged)), ", ".join(sorted(declared))
        check(declared.keys() == set(packaged), f"{what}s", *names)
        for name, shape in declared.items():
            subject, kind = (
                f"{what} {titles.get(name, name)!r}",
                types.get(name, UNKNOWN),
            )
            if what == "input":
                dtypes = ("INT32",) if name == POS else ("FLOAT16", "FLOAT32")
                check(kind.dtype in dtypes, subject, kind.dtype, " or ".join(dtypes))
            sizes = [_range(axis) for axis in ranges.get(name, ())] or [None] * 9
            sizes = [n or size for n, size in zip(kind.shape, sizes)]
            agrees = len(sizes) == len(shape) and all(
                _agrees(size, n, t_max, what) for size, n in zip(sizes, shape)
            )
            declaration = f"{shape}, T from 1 to {t_max}"
            check(agrees, subject, f"shape {sizes}", declaration)


def _range(axis) -> tuple[int, float]:
    """Lowest and highest size of a flexible axis of an input."""
    return axis.lowerBound, axis.upperBound if axis.upperBound >= 0 else math.inf


def _agrees(size, declared, t_max: int, what: str) -> bool:
    """Whether a size in a package is as declared: the same one, t_max for T, or a range
    that holds every T. One that is not known, None, agrees where it is an output's."""
    if isinstance(size, tuple):
        return declared == "T" and size[0] <= 1 and size[1] >= t_max
    wanted = t_max if declared == "T" else declared
    return size == wanted or (size is None and what == "output")
