"""The interface between a shard and the runtime that executes it.

`Settings` and `Package` say what to load and how. `State` and `Model` are what callers
use: a `Model` runs one shard, a `State` holds what the shard keeps between calls.
`PackageModel` is the base of the models that consist of one Core ML package.

NumPy arrays at the boundary, float32 in and out; states under their logical names
(`layers.3.k_state`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import miltorch
from workbench.bundle import Shard
from workbench.errors import InputError, check_choice
from workbench.runtime.interface import check_interface

COMPUTE_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL")
# What `Model.loading_ms` times: compiling the package; loading it for the first time with
# these settings, and any later time; the first call of the first function that is called,
# and of every function that a call has loaded.
LOADING_STAGES = ("compile", "cold_load", "load", "first_predict")
# stands for the T of a function that takes every T; below all others
ANY_T = 0
# Called as hook(op, outputs) after each operation; may return outputs that replace them.
Hook = Callable[[object, list], list | None]
# Called as on_call(model, inputs, state) before a package is called: the model of that
# package, its inputs by name, and its state as it is before the call.
OnCall = Callable[["PackageModel", dict[str, np.ndarray], "State | None"], None]


@dataclass(frozen=True)
class Settings:
    """How packages are loaded and run. Each runtime reads the fields that apply to it.

    Args:
        runtime: `auto`, `portable`, `coreml`, `stand-in` or a plug-in's.
        precision, fast, reads, keeps_head: of the portable runtime; see
            `PortableModel`.
        fast: for another exporter's packages, on any runtime, also
            `skips_missing_logits` of `ForeignModel`.
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
        shard: the shard of a bundle that the package is, with the interface that it
            must have. None: a package outside of a bundle, or one of several that are
            another exporter's shard. Its states are then called by their tensors' names.
        t_max: the most tokens of a call of the shard.
        function: the one function to run. By default a shard that names functions runs
            each call with the function of its T, and any other package runs its own
            default function.
        compiled_path: where a device keeps the compiled package. None: in a temporary
            folder, which is removed with the model.
    """

    path: Path
    shard: Shard | None = None
    t_max: int = 0
    function: str | None = None
    compiled_path: Path | None = None


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
    """One loaded shard.

    A runtime implements `make_state` and `predict`. `predict_observed` and
    `predict_calls` give the same results as `predict`; a runtime overrides them where it
    consists of several packages, or where several calls at once cost less.

    Attributes:
        shard: the shard that the model runs; None: a package outside of a bundle, or
            one of several that are another exporter's shard.
        loading_ms: milliseconds of the `LOADING_STAGES`; None where a stage did not
            happen or its time is not known.
        is_device: whether its values depend on the hardware that runs it. A device takes
            no hooks.
        shows_inner_layers: whether a hook sees every operation and may replace its
            value.
        last_native_ms: Core ML's own share of the last call; None where the runtime
            reports none.
    """

    is_device = False
    shows_inner_layers = False
    last_native_ms: float | None = None
    loading_ms: dict[str, float | None]
    shard: Shard | None

    @property
    def package_models(self) -> list["Model"]:
        """The model itself; where several packages of another exporter are one shard,
        the models of their functions."""
        return [self]

    @abstractmethod
    def make_state(self) -> State:
        """Fresh states, zeros, for this model alone."""

    @abstractmethod
    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None = None,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the shard once and advances `state`.

        Args:
            inputs: arrays by name, in the shapes that the manifest states.
            hook: see `Hook`; a device takes none.

        Returns:
            float32 arrays by name.
        """

    def predict_observed(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None,
        hook: Hook | None,
        on_call: OnCall,
    ) -> dict[str, np.ndarray]:
        """`predict`, with `on_call` called before every call of a package."""
        on_call(self, inputs, state)
        return self.predict(inputs, state, hook)

    def predict_calls(
        self,
        calls: Sequence[dict[str, np.ndarray]],
        states: Sequence[State | None],
        hooks: Sequence[Hook | None],
    ) -> list[dict[str, np.ndarray]]:
        """What `predict` returns for each of several calls, which run in this order."""
        return [self.predict(*call) for call in zip(calls, states, hooks, strict=True)]


class PackageModel(Model):
    """One loaded Core ML package, with one function for every T, or one for each.

    The constructor reads no file. A subclass calls it first, sets what its own loading
    needs, and then calls `read_programs`.

    Attributes:
        path: of the package.
        settings: see `Settings`.
        function_names: by the T of the calls that they run, or one by `ANY_T`; None is
            the package's default function.
        program: the program that `read_programs` has read last, without its operations.
            All functions of a package have the same states; inputs and outputs are those
            of one function.
    """

    program: miltorch.Program

    def __init__(self, package: Package, settings: Settings):
        self.path = package.path
        self.shard = package.shard
        self.settings = settings
        self.function_names: dict[int, str | None] = {ANY_T: package.function}
        if self.shard and self.shard.functions and not package.function:
            self.function_names = {T: name for name, T in self.shard.functions.items()}
        self._t_max = package.t_max

    def read_programs(
        self, prepare: Callable[[int, miltorch.Program], None] | None = None
    ) -> None:
        """Reads the program of every function, compares its interface with the manifest
        and sets `program`.

        Args:
            prepare: called as prepare(T, program) with each program once it is checked,
                the only time that its operations are at hand: they are dropped
                afterwards, so that no file of weights stays mapped.

        Raises:
            InputError: a function that the package lacks, or whose interface is not as
                the manifest says.
        """
        for T, name in self.function_names.items():
            program = miltorch.read(self.path, name)
            if self.shard:
                check_interface(self.shard, program, self._most_tokens(T))
            if prepare:
                prepare(T, program)
            self.program = replace(program, block=None)

    @property
    def smallest_T(self) -> int:
        """The smallest T that has a function; `ANY_T` where one takes every T."""
        return min(self.function_names)

    def _most_tokens(self, T: int) -> int:
        """The most tokens that a call of the function of T takes."""
        if T != ANY_T:
            return T
        return self.shard.functions.get(self.function_names[ANY_T], self._t_max)

    def T_of(self, inputs: dict[str, np.ndarray]) -> int:
        """The T of the function that runs a call, a key of `function_names`."""
        if ANY_T in self.function_names:
            return ANY_T
        for name, shape in self.shard.inputs.items():
            if "T" in shape:
                return inputs[name].shape[shape.index("T")]
        raise AssertionError(f"shard {self.shard.name} has no input with an axis T")

    def function_name(self, inputs: dict[str, np.ndarray]) -> str | None:
        """The name of the function that runs a call."""
        return self.function_names[self.T_of(inputs)]


def interrupted_error(subject: str) -> InputError:
    """The error for states with which no call can continue."""
    actual = "states that an interrupted call has advanced in part"
    step = "begin again, or from a snapshot"
    return InputError(subject, actual, "states after all of its tokens", step)


def native_inputs(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as Core ML's binding takes them: contiguous and writeable arrays, int32 or
    else float32. Core ML rounds float32 once, to the float16 of its inputs. The portable
    runtime takes the same arrays, so that both round alike."""
    return {
        name: np.require(x, np.int32 if x.dtype == np.int32 else np.float32, "CW")
        for name, x in inputs.items()
    }


def check_outputs(
    shard: Shard, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Raises an InputError for outputs of another shape than the manifest states. Core
    ML was reported to return a batch of 1 without an error (coremltools issue 2730)."""
    sizes = {}  # of this call: axis as the manifest names it (`T`, or its size) → size
    for name, shape in shard.inputs.items():
        sizes.update(zip(shape, inputs[name].shape))
    for name, shape in shard.outputs.items():
        declared = [sizes.get(axis, axis) for axis in shape]
        actual = list(outputs[name].shape)
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
