"""Packages of another exporter as one shard: a model with the interface of the
workbench's own shards, which translates every call, and a state that shows their caches
under the names and in the row order of a bundle."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

import miltorch
from miltorch.steps import Constants
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import (
    INPUTS,
    OUTPUTS,
    STATES,
    Function,
    Piece,
    arrange,
    refuse,
)
from workbench.bundle.names import MASKED, POS, X
from workbench.runtime.base import Model, State

PLANES = STATES["cache"].axes


class ForeignState:
    """The states of all parts, read and written as `layers.i.k_state` and
    `layers.i.v_state` [1, H_kv, rows, D].

    Attributes:
        raws: the packages' states, by their numbers.
        end: the tokens after which the rows stand where the packages have them; after 0
            the order is the bundle's.
    """

    def __init__(self, model: "ForeignModel"):
        self.model, self.foreign, self.end = model, model.foreign, 0
        self.raws: dict[int, State] = {}
        self.packed: list[str] = []
        for part, models in zip(self.foreign.parts, model.models):
            if part.state is not None and part.state not in self.raws:
                most = max(models.values(), key=lambda m: len(m.program.states))
                self.raws[part.state] = most.make_state()
                self.packed += [f"{part.state}/{name}" for name in most.program.states]

    def copy(self) -> "ForeignState":
        """A state of its own with the same contents."""
        other = ForeignState(self.model)
        other.end = self.end
        for packed in self.packed:
            other.keep(packed, self.planes(packed))
        return other

    def read(self, tensor: str) -> np.ndarray:
        self.settle(0)
        packed, _, plane = tensor.rpartition("/")
        return self.planes(packed)[[int(plane)]]

    def write(self, tensor: str, value: np.ndarray) -> None:
        self.settle(0)
        packed, _, plane = tensor.rpartition("/")
        planes = self.planes(packed)
        planes[int(plane)] = value[0]
        self.keep(packed, planes)

    def settle(self, end: int) -> None:
        """Puts every row where the packages have it after `end` tokens."""
        for packed in self.packed if self.foreign.moves and end != self.end else ():
            planes = self.planes(packed)
            up = [self.foreign.moved(planes.shape[2], n) for n in (self.end, end)]
            self.keep(packed, np.roll(planes, up[0] - up[1], axis=2))
        self.end = end

    def planes(self, packed: str) -> np.ndarray:
        """The contents of a packed state, [L, H_kv, rows, D]."""
        number, name = packed.split("/")
        value = self.raws[int(number)].read(name)
        return arrange(name, value, self.foreign.tensors[name].axes, PLANES)

    def keep(self, packed: str, planes: np.ndarray) -> None:
        number, name = packed.split("/")
        value = arrange(name, planes, PLANES, self.foreign.tensors[name].axes)
        self.raws[int(number)].write(name, value)


class ForeignModel(Model):
    """The packages of one shard, run part after part; see `base.Model`.

    Args:
        load: opens a package, called as load(path, function=name).
        fast: whether the columns that a function keeps to itself, as a prefill that
            only fills the cache does, may be nan. Otherwise they are computed by
            another function on a copy of the state. The last column is always there.

    Raises:
        InputError: a description that the packages contradict.
    """

    def __init__(
        self, bundle: Bundle, shard: Shard, load: Callable[..., Model], fast=False
    ):
        self.shard, self.foreign, self.fast = shard, shard.foreign, fast
        self.V = bundle.manifest.dims.V
        self.models: list[dict[str | None, Model]] = []
        for part in self.foreign.parts:
            package = bundle.package(shard) / part.package
            models = {name: load(package, function=name) for name in part.functions}
            self.models.append(models)
        self._check()
        every = [model for models in self.models for model in models.values()]
        self.is_device = every[0].is_device
        self.loading_ms = {
            stage: total([model.loading_ms[stage] for model in every])
            for stage in every[0].loading_ms
        }
        self.last_native_ms: float | None = None

    def _check(self) -> None:
        """Refuses names that are not those of the packages, and states that do not have
        the caches of the shard."""
        found, shapes = {None}, {}
        for part, models in zip(self.foreign.parts, self.models):
            found |= models.keys()
            for program in [model.program for model in models.values()]:
                found |= {*program.inputs, *program.outputs, *program.states}
                for name, kind in program.states.items():
                    shapes[f"{part.state}/{name}"] = kind.shape
        named = {function.name for function in self.foreign.functions}
        if wrong := (found ^ (named | self.foreign.tensors.keys())) - {None}:
            refuse("names", f"{sorted(wrong)} on one side alone", "the packages' names")
        caches = {}
        for packed, shape in shapes.items():
            name = packed.partition("/")[2]
            value = np.empty(shape, bool)
            planes = arrange(name, value, self.foreign.tensors[name].axes, PLANES)
            for plane in range(len(planes)):
                caches[f"{packed}/{plane}"] = [1, *planes.shape[1:]]
        for name, entry in self.shard.states.items():
            if caches.get(entry.tensor) != entry.shape:
                refuse(name, f"{entry.shape} in {entry.tensor!r}", caches)

    def make_state(self) -> State:
        return State(self.shard, ForeignState(self))

    def predict(
        self, inputs: dict[str, np.ndarray], state: State | None = None, hook=None
    ) -> dict[str, np.ndarray]:
        """Runs a call of T tokens, in as many calls of the packages as their functions
        need."""
        start, self.last_native_ms = int(inputs.get(POS, [0])[0]), 0.0
        (name,) = self.shard.outputs
        return {name: self._run(inputs, state and state.raw, start, hook)}

    def _run(self, inputs, state, start: int, hook, loud=False) -> np.ndarray:
        """What comes out for every column, [1, W, T, 1]; `loud`: by functions that give
        it."""
        T, done = inputs[X].shape[2], 0
        (shape,) = self.shard.outputs.values()
        values = np.full((1, shape[1], T, 1), np.nan, np.float32)
        while done < T:
            function, size = self._function(T - done, start + done, state, loud)
            # columns past the last one, which a fixed size needs, repeat it
            chosen = np.minimum(done + np.arange(size), T - 1)
            call = {
                name: np.take(inputs[name], chosen, axis=shape.index("T"))
                for name, shape in self.shard.inputs.items()
                if name != POS
            }
            scratch = None if function.logits or self.fast else state.copy()
            piece = self._call(function, call, state, start + done, hook)
            if scratch:
                piece = self._run(call, scratch, start + done, hook, loud=True)
            if scratch or function.logits:
                values[:, :, done : done + size] = piece[:, :, : T - done]
            done += size
        return values

    def _function(self, left: int, start: int, state, loud) -> tuple[Function, int]:
        """The function of the next call and its tokens: the most up to `left` or,
        without a state, the fewest beyond."""
        functions = [f for f in self.foreign.functions if f.logits or not loud]
        best = max(functions, key=lambda f: f.size(left, start))
        size = best.size(left, start) or (0 if state else best.t_min)
        if not size:
            needed = "t_min, t_max, first, until of a function that takes them"
            refuse("call", f"{left} tokens at position {start}", needed)
        return best, size

    def _call(self, function, inputs, state, start: int, hook) -> np.ndarray:
        """One call of every part: logits [1, V, T, 1], −inf for tokens of which the
        packages give none, or what is handed on [1, C, T, 1]."""
        end = start + inputs[X].shape[2]
        if state:
            state.settle(start)
            state.end = end
        found: dict[str, list[np.ndarray]] = {}
        for part, models in zip(self.foreign.parts, self.models):
            model = models.get(function.name, models[part.functions[0]])
            feeds = {}
            for name, kind in model.program.inputs.items():
                value = self._feed(name, kind.shape, inputs, np.arange(start, end))
                # with a hook no inf, which would be no result of an operation
                value = np.maximum(value, MASKED) if hook else value
                integer = kind.dtype.startswith("INT")
                feeds[name] = value.astype(np.int32 if integer else np.float32)
            raw = None if part.state is None else state.raws[part.state]
            results = model.predict(feeds, raw, hook)
            self.last_native_ms = total([self.last_native_ms, model.last_native_ms])
            for name, entry in self.foreign.tensors.items():
                if name in results:
                    axes = OUTPUTS[entry.role].axes
                    value = arrange(name, results[name], entry.axes, axes)
                    value = value + np.float32(entry.offsets)[:, None, None]
                    found.setdefault(entry.role, []).append(value)
            inputs = inputs | {X: found.get(X, [inputs[X]])[-1]}
        if "top" not in found:
            return np.concatenate(found.get("logits", [inputs[X]]), axis=1)
        tops = np.concatenate(found["top"], axis=1).astype(np.int64)
        values = np.concatenate(found.get("top_value", [0.0 * tops]), axis=1)
        scores = np.full((1, self.V, *tops.shape[2:]), -np.inf, np.float32)
        np.put_along_axis(scores, tops, values, axis=1)
        return scores

    def _feed(self, name: str, shape, inputs, at: np.ndarray) -> np.ndarray:
        """The array of an input that has the sizes `shape` in the package (None: any),
        for tokens at the positions `at`."""
        entry, end = self.foreign.tensors[name], at[-1] + 1
        role, sizes = INPUTS[entry.role], dict(zip(entry.axes, shape))
        if role.value:
            held = self.foreign.positions(sizes.get("S") or end, end)
            value = role.value(entry, at, at[:, None] - held)
        elif entry.source in inputs:
            value = inputs[entry.source]
            if "D" in sizes:  # a table may be as wide as the head, half of it twice
                value = np.tile(value, sizes["D"] // value.shape[-1])
        else:
            return np.zeros([n or 1 for n in shape])
        return arrange(name, value, role.axes, entry.axes)


def constants(bundle: Bundle, shard: Shard) -> Callable:
    """A checkpoint's matrix from its pieces in the packages of a shard, decompressed."""

    @cache
    def opened(part: int, function: str | None) -> Constants:
        package = bundle.package(shard) / shard.foreign.parts[part].package
        return Constants(miltorch.read(package, function))

    def matrix(pieces: Sequence[Piece]) -> torch.Tensor:
        rows = []
        for piece in pieces:
            value = opened(piece.part, piece.function)[piece.constant].squeeze()
            value = value.T if piece.transposed else value
            rows.append(value[piece.source : piece.source + piece.count])
        return torch.cat(rows)

    return matrix


def total(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(values)
