"""Packages of another exporter as one shard: a model with the interface of the
workbench's own shards, which translates every call, and a state that shows the caches
of the packages under the names and in the row order of a bundle."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import miltorch
from miltorch.constants import Constants
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import TOKEN_AXIS, Function, caches, refuse
from workbench.bundle.names import LOGITS, MASKED, PER_LAYER, POS, X
from workbench.runtime.base import Model, OnCall, State, interrupted


class ForeignState(State):
    """The states of all parts under the logical names of a bundle, `layers.i.k_state`
    and `layers.i.v_state` [1, H_kv, rows, D].

    Attributes:
        part_states: the packages' states, by their numbers.
        tensors: (state, its name there) of every tensor, by `number/name`.
        arranged_for: the order of the rows. 0: the bundle's. n: that of the packages
            after n tokens. None: a call or a move has begun; where it is still None
            later, that was interrupted.
    """

    def __init__(self, model: "ForeignModel"):
        super().__init__(model.shard)
        self.foreign = model.foreign
        self.arranged_for: int | None = 0
        # channels of each plane that the heads of its layer have
        self.widths = {
            entry.tensor: entry.shape[-1] for entry in model.shard.states.values()
        }
        self.part_states: dict[int | None, State] = {}
        self.tensors: dict[str, tuple[State, str]] = {}
        for part, models in zip(self.foreign.parts, model.models):
            if part.state is None or part.state in self.part_states:
                continue
            first = next(iter(models.values()))
            state = self.part_states[part.state] = first.make_state()
            for name in first.program.states:
                self.tensors[f"{part.state}/{name}"] = state, name

    def read_tensor(self, tensor: str) -> np.ndarray:
        return self.read_plane(tensor)[..., : self.widths[tensor]]

    def read_plane(self, tensor: str) -> np.ndarray:
        """A plane [1, H_kv, rows, width] with all its channels, which may be more than
        the heads of its layer have."""
        self.arrange_rows(0)
        packed, _, plane = tensor.rpartition("/")
        state, name = self.tensors[packed]
        value = state.read(name)
        planes = value.reshape(-1, *value.shape[-3:])
        return planes[[int(plane)]]

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        self.arrange_rows(0)
        packed, _, plane = tensor.rpartition("/")
        state, name = self.tensors[packed]
        # a package's state may hold the caches of all its layers
        planes = state.read(name)
        of_plane = planes.reshape(-1, *planes.shape[-3:])[int(plane)]
        of_plane[..., : self.widths[tensor]] = value[0]
        state.write(name, planes)

    def arrange_rows(self, end: int) -> None:
        """Moves every row to its place in the packages after `end` tokens."""
        if self.foreign.moves and end != self.arranged_for:
            earlier_end = self.arranged_for
            if earlier_end is None:
                raise interrupted("sequence")
            self.arranged_for = None
            shift = self.foreign.row_shift
            for state, name in self.tensors.values():
                value = state.read(name)
                rows = value.shape[-2]
                # what was `shift` rows up moves down again, then up for the new end
                rows_down = shift(rows, earlier_end) - shift(rows, end)
                state.write(name, np.roll(value, rows_down, axis=-2))
        self.arranged_for = end


@dataclass(frozen=True)
class PredictArguments:
    """The arguments of `ForeignModel.predict_observed`; see there."""

    inputs: dict[str, np.ndarray]
    state: ForeignState
    hook: Callable | None
    on_call: OnCall | None

    @property
    def start(self) -> int:
        """The position of the first token."""
        return int(self.inputs[POS][0])


class ForeignModel(Model):
    """The packages of one shard, run part after part.

    Of the attributes of `base.Model` it has `shard`, `loading_ms`, `is_device` and
    `last_native_ms`; its `packages` have the rest.

    Args:
        models: the models of each part's package by the names of its functions.
        fast: whether logits may be nan in columns for which a function gives none, such
            as a prefill that only fills the cache. Otherwise other functions compute
            them first. The last column always has its logits.

    Raises:
        InputError: a description that the packages contradict.
    """

    def __init__(
        self,
        bundle: Bundle,
        shard: Shard,
        models: list[dict[str | None, Model]],
        fast: bool = False,
    ):
        self.shard = shard
        self.foreign = shard.foreign
        self.fast = fast
        self.V = bundle.manifest.dims.V
        self.models = models
        # rows of the smallest cache, where inputs say which of them a call writes first
        self.ring_rows: int | None = None
        if "ring_start" in shard.foreign.roles.values():
            self.ring_rows = min(entry.shape[-2] for entry in shard.states.values())
        self._check_names()
        self._check_slices()
        first = self.packages[0]
        self.is_device = first.is_device
        self.loading_ms = {
            stage: total([package.loading_ms[stage] for package in self.packages])
            for stage in first.loading_ms
        }

    @property
    def packages(self) -> list[Model]:
        return [model for functions in self.models for model in functions.values()]

    def _check_names(self) -> None:
        """Refuses a description that lacks an input, output or cache of the packages, or
        has one that no package has."""
        packaged = set()
        states = self.shard.states.values()
        widths = {entry.tensor: entry.shape[-1] for entry in states}
        for part, functions in zip(self.foreign.parts, self.models):
            for model in functions.values():
                program = model.program
                packaged |= {*program.inputs, *program.outputs}
                for tensor, shape in caches(part.state, program.states).items():
                    *sizes, width = shape
                    # the heads of a layer may be narrower than their plane
                    width = min(width, widths.get(tensor, width))
                    packaged.add(f"{tensor} {[*sizes, width]}")
        described = {f"{entry.tensor} {entry.shape}" for entry in states}
        if different := packaged ^ (described | self.foreign.roles.keys()):
            actual = f"{sorted(different)} on one side only"
            refuse("names", actual, "those of the packages")

    def _check_slices(self) -> None:
        """Refuses several slices of `top` tokens if their logits are not output too."""
        outputs = Counter()
        for functions in self.models:
            names = {n for model in functions.values() for n in model.program.outputs}
            outputs.update(self.foreign.roles[name] for name in names)
        if outputs["top"] > max(1, outputs["top_value"]):
            slices, values = outputs["top"], outputs["top_value"]
            actual = f"{slices} slices of top, {values} of top_value"
            refuse("roles", actual, "top_value of each slice")

    def make_state(self) -> ForeignState:
        return ForeignState(self)

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: ForeignState,
        hook: Callable | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs a call of T tokens, in as many calls of the packages as their functions
        need: logits [1, V, T, 1], −inf for ids that an argmax inside did not pick."""
        return self.predict_observed(inputs, state, hook, None)

    def predict_observed(
        self,
        inputs: dict[str, np.ndarray],
        state: ForeignState,
        hook: Callable | None,
        on_call: OnCall | None,
    ) -> dict[str, np.ndarray]:
        self.last_native_ms = 0.0
        arguments = PredictArguments(inputs, state, hook, on_call)
        start = arguments.start
        T = inputs[X].shape[2]
        logits = np.full((1, self.V, T, 1), np.nan, np.float32)
        calls = list(self.foreign.calls(start, T, ring_rows=self.ring_rows))
        if not self.fast and not all(function.logits for function, _ in calls):
            # A function that only fills the cache gives no logits: first functions that
            # give some run, then, from the same states, those that an app would call.
            arranged_for = state.arranged_for
            tensors = state.tensors.values()
            before = [part_state.read(name) for part_state, name in tensors]
            with_logits = self.foreign.calls(
                start, T, allow_without_logits=False, ring_rows=self.ring_rows
            )
            self._run(with_logits, arguments, logits)
            for (part_state, name), value in zip(tensors, before):
                part_state.write(name, value)
            state.arranged_for = arranged_for
        self._run(calls, arguments, logits)
        return {LOGITS: logits}

    def _run(
        self,
        calls: Iterable[tuple[Function, np.ndarray]],
        arguments: PredictArguments,
        logits: np.ndarray,
    ) -> None:
        """Runs calls, and writes the logits of functions that give any into their
        columns of `logits` [1, V, T, 1]."""
        inputs = arguments.inputs
        state = arguments.state
        for function, tokens in calls:
            values = {
                name: np.take(inputs[name], tokens, axis=TOKEN_AXIS[name])
                for name in inputs.keys() & TOKEN_AXIS.keys()
            }
            positions = arguments.start + tokens
            state.arrange_rows(positions[0])
            # an interrupted call leaves None, with which `arrange_rows` refuses the next call
            state.arranged_for = None
            outputs = self._call(function, values, positions, arguments)
            state.arranged_for = positions[-1] + 1
            if function.logits:
                logits[0, :, tokens, 0] = self._scores(outputs).T

    def _call(
        self,
        function: Function,
        values: dict[str, np.ndarray],
        positions: np.ndarray,
        arguments: PredictArguments,
    ) -> dict[str, np.ndarray]:
        """Calls every part once for tokens at `positions` [T].

        Args:
            values: inputs of the bundle's interface for these tokens; a part's output
                `x` replaces the one before.

        Returns:
            Outputs [rows, T] by role, slices of the vocabulary joined.
        """
        hook = arguments.hook
        T = len(positions)
        parts = [*zip(self.foreign.parts, self.models)]
        while not function.logits and parts[-1][0].state is None:
            del parts[-1]  # has no state: only logits need its result
        outputs: dict[str, list[np.ndarray]] = defaultdict(list)
        carried: dict[str, np.ndarray] = {}
        for part, models in parts:
            model = models[self.foreign.function_of(part, function)]
            package_inputs = {
                name: self._input_array(name, type_, values, carried, positions, hook)
                for name, type_ in model.program.inputs.items()
            }
            part_state = arguments.state.part_states.get(part.state)
            if arguments.on_call:
                arguments.on_call(model, package_inputs, part_state)
            results = model.predict(package_inputs, part_state, hook)
            self.last_native_ms = total([self.last_native_ms, model.last_native_ms])
            for name, role in self.foreign.roles.items():
                if name in results and role == "carried":
                    carried[name.removesuffix("_out")] = results[name]
                elif name in results:
                    value = results[name]
                    # only in rank 4 do channels come before tokens
                    if role in ("top", "top_value") and value.size == T:
                        value = value.reshape(1, T)
                    elif value.ndim == 4:
                        value = value[0, :, :, 0]
                    else:
                        value = value.reshape(-1, value.shape[-1]).T
                    outputs[role].append(value[:, :T])
            if X in outputs:
                values[X] = outputs[X][-1][None, :, :, None]
        return {role: np.concatenate(arrays) for role, arrays in outputs.items()}

    def _input_array(
        self,
        name: str,
        type_: miltorch.Type,
        values: dict[str, np.ndarray],
        carried: dict[str, np.ndarray],
        positions: np.ndarray,
        hook: Callable | None,
    ) -> np.ndarray:
        """The array of an input for a call of tokens at `positions` [T]. `carried`:
        outputs of earlier parts."""
        shape = type_.shape
        role = self.foreign.roles[name]
        T = len(positions)
        if role == "positions":
            value = positions
        elif role == "start":
            value = positions[:1]
        elif role == "ring_start":
            value = positions[:1] % self.ring_rows
        elif role == "carried" and name in carried:
            value = carried[name]
        elif role in ("write", "mask", "mask_inf"):
            value = self._mask(role, shape, positions, hook)
        elif role == "zeros":
            value = np.zeros([size or T for size in shape])
        elif role in values:
            value = _plane(role, shape, values[role], T)
        else:
            refuse(name, f"role {role!r}", f"one of {[*values, *TOKEN_AXIS, 'start']}")
        rank = len(shape)
        # leading axes are all 1: add or drop them until the rank is the input's
        padded = (1,) * rank + value.shape
        dtype = np.int32 if type_.dtype.startswith("INT") else np.float32
        return value.reshape(padded[-rank:]).astype(dtype)

    def _mask(
        self,
        role: str,
        shape: Sequence[int],
        positions: np.ndarray,
        hook: Callable | None,
    ) -> np.ndarray:
        """The attention mask [T, rows] of tokens at `positions`, or for the role `write`
        the one-hot rows [rows, T] that place them in the cache."""
        end = positions[-1] + 1
        rows = shape[-2] if role == "write" else shape[-1]
        distance = positions[:, None] - self.foreign.positions(rows or end, end)
        if role == "write":
            return distance.T == 0
        # a hook may search the operations for an inf, so the mask must have none then
        blocked = MASKED if role == "mask" or hook else -np.inf
        return np.where(distance < 0, blocked, 0.0)

    def _scores(self, outputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits [V, T]. If the packages contain the argmax, only the tokens that it
        picked have one; the others are −inf."""
        if "top" not in outputs:
            return outputs["logits"]
        # ids count from the first token of their slice of the vocabulary
        slices = np.array_split(np.arange(self.V), len(outputs["top"]))
        top = outputs["top"].astype(int) + [rows[:1] for rows in slices]
        scores = np.full((self.V, top.shape[1]), -np.inf, np.float32)
        values = outputs.get("top_value", np.zeros(top.shape))
        np.put_along_axis(scores, top, values, axis=0)
        return scores


def _plane(role: str, shape: Sequence[int], value: np.ndarray, T: int) -> np.ndarray:
    """A value of the bundle's interface in the shape of a package's input, for a call of
    T tokens."""
    # a head may take more columns than the call has: the last one is repeated
    size = max(T, shape[TOKEN_AXIS[role]] or T)
    columns = np.minimum(np.arange(size), T - 1)
    value = np.take(value, columns, axis=TOKEN_AXIS[role])
    if role in (X, PER_LAYER) and len(shape) < 4:
        return value[..., 0].swapaxes(1, 2)
    if role.startswith("rope"):
        # may be as wide as the head, with the half twice
        return np.tile(value, shape[-1] // value.shape[-1])
    return value


def constants(bundle: Bundle, shard: Shard) -> Callable:
    """A function that reads a matrix of the checkpoint, decompressed, from the places of
    its pieces in the packages of a shard."""

    @cache
    def constants_of(part: str) -> Constants:
        package = shard.foreign.parts[int(part)].package
        return Constants(miltorch.read(bundle.package(shard) / package))

    def matrix(pieces: Sequence[str]) -> torch.Tensor:
        """Joins the constants `part/name`, which hold the rows of the matrix in order."""
        places = [piece.split("/", 1) for piece in pieces]
        return torch.cat([constants_of(part)[name].squeeze() for part, name in places])

    return matrix


def total(values: Sequence[float | None]) -> float | None:
    """The sum of times; None if one of them is unknown."""
    return None if None in values else sum(values)
