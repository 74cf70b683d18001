"""The interface between a shard and the runtime that executes it, and the checks that
all runtimes share.

NumPy arrays at the boundary, float32 in and out; states under their logical names
(`layers.3.k_state`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import miltorch
from workbench.bundle import Shard
from workbench.bundle.names import POS
from workbench.errors import InputError, check_choice

COMPUTE_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL")
UNKNOWN = miltorch.Type("")  # of an output that no operation computes
# the key of a function that takes every T
ANY_T = 0
# Called as on_call(model, inputs, state) before a package is called: the model of that
# package, its inputs by name, and its state as it is before the call.
OnCall = Callable[["Model", dict[str, np.ndarray], "State | None"], None]


@dataclass(frozen=True)
class Settings:
    """How packages are loaded and run. Each runtime reads the fields that apply to it.

    Args:
        runtime: `auto`, `portable`, `coreml`, `stand-in` or a plug-in's.
        precision, fast, reads, keeps_head: of the portable runtime; see
            `PortableModel`.
        compute_units, hints: of Core ML; see `CoreMLModel`.

    Raises:
        InputError: no such compute units.
    """

    runtime: str = "auto"
    precision: str = "declared"
    fast: bool = False
    reads: str = "used"
    compute_units: str = "CPU_AND_NE"
    hints: dict = field(default_factory=dict)
    keeps_head: bool = True

    def __post_init__(self):
        check_compute_units(self.compute_units)


def check_compute_units(name: str) -> None:
    """Raises an InputError unless the name is one of Core ML's compute units."""
    check_choice("compute units", name, COMPUTE_UNITS, "choose one")


@dataclass(frozen=True)
class Package:
    """One package to load.

    Args:
        path: the `.mlpackage`.
        shard: the shard of a bundle that the package is, whose manifest entry its
            interface must have (None: a package of no bundle, or one of several that
            another exporter's shard consists of; its states have the names of their
            tensors).
        t_max: the most tokens of a call of the shard.
        function: the one function to run. By default a shard that names functions runs
            each call with the function of its T, and any other package runs its own
            default function.
        compiled: where a device keeps the compiled package (None: only as long as the
            model).
    """

    path: Path
    shard: Shard | None = None
    t_max: int = 0
    function: str | None = None
    compiled: Path | None = None


class State(ABC):
    """The states of one model for one batch of sequences.

    A runtime implements `read_tensor` and `write_tensor`, which take whole tensors under
    the package's own names. Everyone else reads and writes by logical name.

    Args:
        shard: maps logical names (`layers.3.k_state`) to the names of tensors; None:
            the two are the same.
    """

    def __init__(self, shard: Shard | None):
        self.shard = shard

    def read(self, name: str) -> np.ndarray:
        """A copy of a state."""
        return np.array(self.read_tensor(self._tensor(name)))

    def write(self, name: str, value: np.ndarray) -> None:
        """Replaces a state; shape and dtype as `read` gives them."""
        self.write_tensor(self._tensor(name), value)

    @abstractmethod
    def read_tensor(self, tensor: str) -> np.ndarray:
        """A state tensor, or a view of it."""

    @abstractmethod
    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        """Replaces a state tensor."""

    def _tensor(self, name: str) -> str:
        return self.shard.states[name].tensor if self.shard else name


class Model(ABC):
    """One loaded package, with one function for every T, or one for each.

    Attributes:
        path: of the package.
        shard: see `Package`.
        functions: names by the T of the calls that they run, or one name by `ANY_T`.
        program: a function without its operations: the states that all functions have,
            the inputs and outputs of one.
        loading_ms: compile, cold_load, load, first_predict; None where it did not
            happen or is not known.
        is_device: whether its values depend on the hardware that runs it. Only models
            of other runtimes take hooks.
        shows_inner_layers: whether a hook sees every operation and may replace its
            value.
        last_native_ms: Core ML's own share of the last call; None where the runtime
            reports none.

    Raises:
        InputError: a function that the package lacks, or whose interface is not as the
            manifest says.
    """

    is_device = False
    shows_inner_layers = False
    last_native_ms: float | None = None
    loading_ms: dict[str, float | None]

    def __init__(self, package: Package, settings: Settings):
        self.path = package.path
        self.shard = package.shard
        self.settings = settings
        function_names = self.shard.functions if self.shard else {}
        self.functions: dict[int, str | None] = {ANY_T: package.function}
        if function_names and not package.function:
            self.functions = {T: name for name, T in function_names.items()}
        for T, name in self.functions.items():
            program = miltorch.read(self.path, name)
            if self.shard:
                t_max = T
                if T == ANY_T:
                    t_max = function_names.get(name, package.t_max)
                check_interface(self.shard, program, t_max)
            self.bind(T, program)
            # All functions have the same states: that of the last one stays, without its
            # operations, so that the file of its weights is mapped no longer.
            self.program = replace(program, block=None)

    def bind(self, T: int, program: miltorch.Program) -> None:  # noqa: B027
        """Called with the program of each function once its interface is checked: a
        runtime that executes programs itself overrides it, so that none is read twice."""

    def T_of(self, inputs: dict[str, np.ndarray]) -> int:
        """The T of the function that runs a call, a key of `functions`."""
        if ANY_T in self.functions:
            return ANY_T
        for name, shape in self.shard.inputs.items():
            if "T" in shape:
                return inputs[name].shape[shape.index("T")]
        raise AssertionError(f"shard {self.shard.name} has no input with an axis T")

    @property
    def packages(self) -> list["Model"]:
        """The models of the packages that it consists of: itself alone, except where
        several packages of another exporter are one shard."""
        return [self]

    @abstractmethod
    def make_state(self) -> State:
        """Fresh states, zeros, for this model alone."""

    @abstractmethod
    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None = None,
        hook: Callable | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the package once and advances `state`.

        Args:
            inputs: arrays by name, in the shapes that the manifest states.
            hook: called as hook(op, outputs) after each operation; a device takes none.

        Returns:
            float32 arrays by name.
        """

    def predict_observed(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None,
        hook: Callable | None,
        on_call: OnCall,
    ) -> dict[str, np.ndarray]:
        """`predict`, with `on_call` called before every call of a package."""
        on_call(self, inputs, state)
        return self.predict(inputs, state, hook)

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[State | None],
        hooks: Sequence[Callable | None],
    ) -> list[dict[str, np.ndarray]]:
        """What `predict` returns for each of several calls, which run in this order. A
        runtime overrides it where several calls at once cost less."""
        return [self.predict(*call) for call in zip(calls, states, hooks, strict=True)]


def interrupted(subject: str) -> InputError:
    """The error for states with which no call can continue."""
    actual = "states that an interrupted call has advanced in part"
    step = "begin again, or from a snapshot"
    return InputError(subject, actual, "states after all of its tokens", step)


def native_inputs(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as Core ML's binding takes them: contiguous and writeable, int32 as they
    are and all others in float32, which Core ML rounds once, to the float16 of its
    inputs. The portable runtime takes the same arrays, so that both round alike."""
    return {
        name: np.require(x, np.int32 if x.dtype == np.int32 else np.float32, "CW")
        for name, x in inputs.items()
    }


def check_outputs(
    shard: Shard, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Raises an InputError for outputs of another shape than the manifest states. Core
    ML was reported to return a batch of 1 without an error (coremltools issue 2730)."""
    sizes = {}  # of each axis, as the manifest names it
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
    logical_names = {entry.tensor: name for name, entry in shard.states.items()}
    for role, declared, packaged in (
        ("input", shard.inputs, program.inputs),
        ("output", shard.outputs, program.outputs),
        ("state", states, program.states),
    ):
        if declared.keys() != set(packaged):
            names = ", ".join(sorted(packaged)), ", ".join(sorted(declared))
            raise _disagreement(shard, f"{role}s", *names)
        for name, shape in declared.items():
            subject = f"{role} {logical_names.get(name, name)!r}"
            packaged_type = types.get(name, UNKNOWN)
            if role == "input":
                dtypes = ("INT32",) if name == POS else ("FLOAT16", "FLOAT32")
                if packaged_type.dtype not in dtypes:
                    needed = " or ".join(dtypes)
                    raise _disagreement(shard, subject, packaged_type.dtype, needed)
            sizes = list(packaged_type.shape)
            if flexible := ranges.get(name):
                # the type has None for a size that the description gives a range
                bounds = map(_bounds, flexible)
                sizes = [size or bound for size, bound in zip(sizes, bounds)]
            agrees = len(sizes) == len(shape) and all(
                _agrees(size, n, t_max, role) for size, n in zip(sizes, shape)
            )
            if not agrees:
                needed = f"{shape}, T from 1 to {t_max}"
                raise _disagreement(shard, subject, f"shape {sizes}", needed)


def _disagreement(
    shard: Shard, subject: str, packaged: object, declared: object
) -> InputError:
    return InputError(
        f"{subject} of shard {shard.name}",
        f"{packaged} in the package",
        f"{declared}, as bundle.json says",
        "export or copy the bundle again",
    )


def _bounds(axis) -> tuple[int, float]:
    """Lowest and highest size of a flexible axis of an input."""
    return axis.lowerBound, axis.upperBound if axis.upperBound >= 0 else math.inf


def _agrees(size, declared: int | str, t_max: int, role: str) -> bool:
    """Whether a size in a package is as declared: the same one, t_max for T, or a range
    that holds every T. An unknown size, None, agrees where it is an output's."""
    if isinstance(size, tuple):
        return declared == "T" and size[0] <= 1 and size[1] >= t_max
    expected = t_max if declared == "T" else declared
    return size == expected or (size is None and role == "output")
