"""Packages of another exporter as one shard: a model with the interface of the
workbench's own shards, which translates every call, and a state that shows their caches
under the names and in the row order of a bundle."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

import miltorch
from miltorch.steps import Constants
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import TOKENS, Function, caches, refuse
from workbench.bundle.names import LOGITS, MASKED, POS, X
from workbench.runtime.base import Model, State, interrupted


class ForeignState:
    """The states of all parts, read and written as `layers.i.k_state` and
    `layers.i.v_state` [1, H_kv, rows, D].

    Attributes:
        raws: the packages' states, by their numbers.
        tensors: (state, its name there) of every tensor, by `number/name`.
        end: the tokens after which the rows stand where the packages have them; after 0
            the order is the bundle's. None while they move.
    """

    def __init__(self, model: "ForeignModel"):
        self.foreign = model.foreign
        self.end: int | None = 0
        self.raws: dict[int | None, State] = {}
        self.tensors: dict[str, tuple[State, str]] = {}
        for part, models in zip(self.foreign.parts, model.models):
            if part.state is None or part.state in self.raws:
                continue
            first = next(iter(models.values()))
            raw = self.raws[part.state] = first.make_state()
            for name in first.program.states:
                self.tensors[f"{part.state}/{name}"] = raw, name

    def read(self, tensor: str) -> np.ndarray:
        self.settle(0)
        packed, _, plane = tensor.rpartition("/")
        raw, name = self.tensors[packed]
        value = raw.read(name)
        return value.reshape(-1, *value.shape[-3:])[[int(plane)]]

    def write(self, tensor: str, value: np.ndarray) -> None:
        self.settle(0)
        packed, _, plane = tensor.rpartition("/")
        raw, name = self.tensors[packed]
        whole = raw.read(name)
        whole.reshape(-1, *whole.shape[-3:])[int(plane)] = value[0]
        raw.write(name, whole)

    def settle(self, end: int) -> None:
        """Puts every row where the packages have it after `end` tokens."""
        moved = self.foreign.moved
        if self.foreign.moves and end != self.end:
            before, self.end = self.end, None
            if before is None:
                raise interrupted("sequence")
            for raw, name in self.tensors.values():
                value = raw.read(name)
                rows = value.shape[-2]
                up = moved(rows, before) - moved(rows, end)
                raw.write(name, np.roll(value, up, axis=-2))
        self.end = end


class ForeignModel(Model):
    """The packages of one shard, run part after part; see `base.Model`.

    Args:
        load: opens a package, called as load(path, function=name).
        fast: whether the columns that a function keeps to itself, as a prefill that
            only fills the cache does, may be nan. Otherwise other functions compute
            them first. The last column is always there.

    Raises:
        InputError: a description that the packages contradict.
    """

    def __init__(
        self, bundle: Bundle, shard: Shard, load: Callable[..., Model], fast=False
    ):
        self.shard, self.foreign, self.fast = shard, shard.foreign, fast
        self.V = bundle.manifest.dims.V
        self.models: list[dict[str | None, Model]] = []
        packaged = set()
        for part in self.foreign.parts:
            package = bundle.package(shard) / part.package
            models = {
                name: load(package, function=name)
                for name in self.foreign.functions_of(part)
            }
            self.models.append(models)
            for model in models.values():
                program = model.program
                packaged |= {*program.inputs, *program.outputs}
                held = caches(part.state, program.states)
                packaged |= {f"{tensor} {shape}" for tensor, shape in held.items()}
        described = {f"{each.tensor} {each.shape}" for each in shard.states.values()}
        if wrong := packaged ^ (described | self.foreign.roles.keys()):
            found = f"{sorted(wrong)} on one side alone"
            refuse("names", found, "those of the packages")
        giving = Counter(
            self.foreign.roles[name]
            for models in self.models
            for name in {n for m in models.values() for n in m.program.outputs}
        )
        if giving["top"] > max(1, giving["top_value"]):
            found = f"{giving['top']} slices of top, {giving['top_value']} of top_value"
            refuse("roles", found, "top_value of each slice")
        every = [model for models in self.models for model in models.values()]
        self.is_device = every[0].is_device
        self.loading_ms = {
            stage: total([model.loading_ms[stage] for model in every])
            for stage in every[0].loading_ms
        }

    def make_state(self) -> State:
        return State(self.shard, ForeignState(self))

    def predict(
        self, inputs: dict[str, np.ndarray], state: State, hook=None
    ) -> dict[str, np.ndarray]:
        """Runs a call of T tokens, in as many calls of the packages as their functions
        need: logits [1, V, T, 1], −inf for ids that an argmax inside did not pick."""
        raw, self.last_native_ms = state.raw, 0.0
        start, T = int(inputs[POS][0]), inputs[X].shape[2]
        logits = np.full((1, self.V, T, 1), np.nan, np.float32)
        calls = list(self.foreign.calls(start, T))
        if not self.fast and not all(function.logits for function, _ in calls):
            end, tensors = raw.end, raw.tensors.values()
            before = [tensor.read(name) for tensor, name in tensors]
            loud = self.foreign.calls(start, T, silent=False)
            self._run(loud, inputs, raw, hook, logits)
            for (tensor, name), value in zip(tensors, before):
                tensor.write(name, value)
            raw.end = end
        self._run(calls, inputs, raw, hook, logits)
        return {LOGITS: logits}

    def _run(self, calls, inputs, state: ForeignState, hook, logits: np.ndarray):
        """Runs calls, and keeps what functions give in `logits` [1, V, T, 1]."""
        start = int(inputs[POS][0])
        for function, tokens in calls:
            io = {
                name: np.take(inputs[name], tokens, axis=TOKENS[name])
                for name in inputs.keys() & TOKENS.keys()
            }
            state.settle(start + tokens[0])
            state.end = None
            found = self._call(function, io, start + tokens, state, hook)
            state.end = start + tokens[-1] + 1
            if function.logits:
                logits[0, :, tokens, 0] = self._scores(found).T

    def _call(
        self, function: Function, io, at: np.ndarray, state: ForeignState, hook
    ) -> dict[str, np.ndarray]:
        """One call of every part for tokens at the positions `at` [T]. What comes out by
        role, [rows, T], slices of the vocabulary joined."""
        T = len(at)
        parts = [*zip(self.foreign.parts, self.models)]
        while not function.logits and parts[-1][0].state is None:
            del parts[-1]  # the head
        found: dict[str, list[np.ndarray]] = defaultdict(list)
        for part, models in parts:
            model = models[None if part.state is None else function.name]
            feeds = {
                name: self._feed(name, kind, io, at, hook)
                for name, kind in model.program.inputs.items()
            }
            results = model.predict(feeds, state.raws.get(part.state), hook)
            self.last_native_ms = total([self.last_native_ms, model.last_native_ms])
            for name, role in self.foreign.roles.items():
                if name in results:
                    value = results[name]
                    # channels come before tokens in rank 4 alone
                    if value.ndim == 4:
                        value = value[0, :, :, 0]
                    else:
                        value = value.reshape(-1, value.shape[-1]).T
                    found[role].append(value[:, :T])
            if X in found:
                io[X] = found[X][-1][None, :, :, None]
        return {role: np.concatenate(values) for role, values in found.items()}

    def _feed(self, name: str, kind: miltorch.Type, io, at: np.ndarray, hook):
        """The array of an input for a call of tokens at the positions `at`."""
        shape, role = kind.shape, self.foreign.roles[name]
        T, end = len(at), at[-1] + 1
        if role == "positions":
            value = at
        elif role == "start":
            value = at[:1]
        elif role in ("write", "mask", "mask_inf"):
            rows = shape[-2] if role == "write" else shape[-1]
            away = at[:, None] - self.foreign.positions(rows or end, end)
            # with a hook no inf, which would be no result of an operation
            blocked = MASKED if role == "mask" or hook else -np.inf
            value = np.where(away < 0, blocked, 0.0)
            if role == "write":
                value = away.T == 0
        elif role == "zeros":
            value = np.zeros([size or T for size in shape])
        elif role in io:
            # a head may take more columns than the call has: the last one is repeated
            size = max(T, shape[TOKENS[role]] or T)
            columns = np.minimum(np.arange(size), T - 1)
            value = np.take(io[role], columns, axis=TOKENS[role])
            if role == X and len(shape) < 4:
                value = value[..., 0].swapaxes(1, 2)
            elif role.startswith("rope"):
                # may be as wide as the head, with the half twice
                value = np.tile(value, shape[-1] // value.shape[-1])
        else:
            refuse(name, f"role {role!r}", f"one of {[*io, *TOKENS, 'start']}")
        shape = ((1,) * len(shape) + value.shape)[-len(shape) :]
        dtype = np.int32 if kind.dtype.startswith("INT") else np.float32
        return value.reshape(shape).astype(dtype)

    def _scores(self, found: dict[str, np.ndarray]) -> np.ndarray:
        """Logits [V, T]; where the argmax is inside, of its tokens alone."""
        if "top" not in found:
            return found["logits"]
        # ids count from the first token of their slice of the vocabulary
        slices = np.array_split(np.arange(self.V), len(found["top"]))
        top = found["top"].astype(int) + [rows[:1] for rows in slices]
        scores = np.full((self.V, top.shape[1]), -np.inf, np.float32)
        values = found.get("top_value", np.zeros(top.shape))
        np.put_along_axis(scores, top, values, axis=0)
        return scores


def constants(bundle: Bundle, shard: Shard) -> Callable:
    """A checkpoint's matrix from its pieces in the packages of a shard, decompressed."""

    @cache
    def opened(part: str) -> Constants:
        package = shard.foreign.parts[int(part)].package
        return Constants(miltorch.read(bundle.package(shard) / package))

    def matrix(pieces: Sequence[str]) -> torch.Tensor:
        """The constants `part/name`, whose rows are those of the matrix in order."""
        places = [piece.split("/", 1) for piece in pieces]
        return torch.cat([opened(part)[name].squeeze() for part, name in places])

    return matrix


def total(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(values)
