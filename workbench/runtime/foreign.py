"""Packages of another exporter as one shard: a model with the interface of the
workbench's own shards, which translates every call, and a state that shows their caches
under the names and in the row order of a bundle."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import miltorch
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import (
    DIMS,
    Function,
    Input,
    PackedState,
    arrange,
    logical_rows,
    named,
    visible,
    written,
)
from workbench.bundle.names import (
    HANDED_ON,
    IDS,
    LOGITS,
    MASKED,
    POS,
    ROPE_COS,
    ROPE_SIN,
    X,
)
from workbench.errors import InputError
from workbench.runtime.base import Model, State, check_inputs

UNBOUNDED = 1 << 31


class ForeignState:
    """The states of all parts, read and written as `layers.i.k_state` and
    `layers.i.v_state` [1, H_kv, rows, D]. What is written goes into the packages when
    the next call says at which position it begins."""

    def __init__(self, model: "ForeignModel"):
        self.model, self.end = model, 0
        self.raws: dict[int | None, State] = {}
        for index in model.stateful:
            functions = model.models[index].values()
            most = max(functions, key=lambda function: len(function.program.states))
            self.raws.setdefault(model.owner(index), most.make_state())
        self.values: dict[str, np.ndarray] | None = None
        self.changed = False

    def copy(self) -> "ForeignState":
        """A state of its own with the same contents."""
        other = ForeignState(self.model)
        other.end = self.end
        for entry in self.model.shard.foreign.states:
            value = self.raws[entry.part].read(entry.name)
            other.raws[entry.part].write(entry.name, value)
        return other

    def read(self, tensor: str) -> np.ndarray:
        return self._logical()[tensor]

    def write(self, tensor: str, value: np.ndarray) -> None:
        self._logical()[tensor] = np.array(value)
        self.changed = True

    def settle(self, start: int) -> None:
        """Puts every row where the packages expect it after `start` tokens."""
        entries = self.model.shard.foreign.states
        moves = start != self.end and any(e.rows != "absolute" for e in entries)
        if self.changed or moves:
            values = self._logical()
            for entry in entries:
                whole = self.raws[entry.part].read(entry.name)
                planes = named(whole, entry.axes, "LHSD")
                rows = logical_rows(entry.rows, planes.shape[2], start)
                for tensor, plane in entry.planes.items():
                    planes[plane] = values[tensor][0][:, rows]
                self.raws[entry.part].write(entry.name, whole)
        self.end, self.values, self.changed = start, None, False

    def _logical(self) -> dict[str, np.ndarray]:
        if self.values is None:
            self.values = {}
            for entry in self.model.shard.foreign.states:
                whole = self.raws[entry.part].read(entry.name)
                planes = named(whole, entry.axes, "LHSD")
                rows = logical_rows(entry.rows, planes.shape[2], self.end)
                for tensor, plane in entry.planes.items():
                    self.values[tensor] = np.empty_like(planes[plane])[None]
                    self.values[tensor][0][:, rows] = planes[plane]
        return self.values


class ForeignModel:
    """The packages of one shard, run part after part; see `base.Model`.

    Args:
        load: opens a package, called as load(path, function=name).
        fast: whether the columns that a function keeps to itself, as a prefill that
            only fills the cache does, may be nan. Otherwise they are computed by
            another function on a copy of the state. The last column is always there.

    Raises:
        InputError: a description that the packages contradict.
    """

    shows_inner_layers = False

    def __init__(
        self, bundle: Bundle, shard: Shard, load: Callable[..., Model], fast=False
    ):
        self.shard, self.fast = shard, fast
        self.t_max = bundle.manifest.options.t_max
        self.parts = shard.foreign.parts
        self.models: list[dict[str | None, Model]] = []
        for part in self.parts:
            names = dict.fromkeys(function.name for function in part.functions)
            package = bundle.package(shard) / part.package
            self.models.append({name: load(package, function=name) for name in names})
        check_description(shard, self.models)
        self.stateful = []
        for index, functions in enumerate(self.models):
            if any(model.program.states for model in functions.values()):
                self.stateful.append(index)
        every = [model for functions in self.models for model in functions.values()]
        self.is_device = every[0].is_device
        self.loading_ms: dict[str, float | None] = {}
        for model in every:
            for stage, ms in model.loading_ms.items():
                before = self.loading_ms.get(stage)
                self.loading_ms[stage] = before if ms is None else ms + (before or 0.0)
        self.last_native_ms: float | None = None

    def owner(self, part: int) -> int | None:
        """The part whose state a part uses, None for the one that parts share."""
        own = any(entry.part == part for entry in self.shard.foreign.states)
        return part if own else None

    def make_state(self) -> State:
        return State(self.shard, ForeignState(self))

    def predict(
        self, inputs: dict[str, np.ndarray], state: State | None = None, hook=None
    ) -> dict[str, np.ndarray]:
        """Runs a call of T tokens, in as many calls of the packages as their functions
        need."""
        check_inputs(self.shard, inputs, self.t_max)
        columns = {}
        for name, value in inputs.items():
            if name == IDS:
                columns["ids"] = value[0]
            elif name == X:
                columns["hidden"] = value[0, :, :, 0].T
            elif name != POS:
                columns[name] = value[0, 0]
        start = int(inputs[POS][0]) if POS in inputs else 0
        self.last_native_ms = 0.0
        values = self._run(columns, state and state.raw, start, hook)
        name = LOGITS if LOGITS in self.shard.outputs else HANDED_ON
        return {name: np.ascontiguousarray(values.T)[None, :, :, None]}

    def _run(
        self, columns: dict, state: ForeignState | None, start: int, hook, loud=False
    ) -> np.ndarray:
        """What comes out for every column, [T, W]; `loud`: by functions that give it."""
        T, done, pieces = len(next(iter(columns.values()))), 0, []
        while done < T:
            functions, size = self._functions(T - done, start + done, loud)
            of_call = {name: a[done : done + size] for name, a in columns.items()}
            silent = not all(function.logits for function in functions.values())
            if state:
                state.settle(start + done)
            scratch = state.copy() if silent and not self.fast else None
            piece = self._call(of_call, functions, state, start + done, hook)
            if scratch:
                piece = self._run(of_call, scratch, start + done, hook, loud=True)
            elif silent:
                piece = np.full((size, 1), np.nan, np.float32)
            pieces.append(piece)
            done += size
        width = pieces[-1].shape[1]
        shapes = [(len(piece), width) for piece in pieces]
        return np.concatenate(list(map(np.broadcast_to, pieces, shapes)))

    def _functions(
        self, left: int, start: int, loud: bool
    ) -> tuple[dict[int, Function], int]:
        """The function of every part with a state, and the tokens of the largest next
        call of at most `left`; the last one gives logits."""
        for size in range(left, 0, -1):
            chosen = {}
            for index in self.stateful:
                for function in self.parts[index].functions:
                    if index not in chosen and function.takes(size, start):
                        chosen[index] = function
            every = len(chosen) == len(self.stateful)
            gives = all(function.logits for function in chosen.values())
            if every and (gives or not loud and size < left):
                return chosen, size
        raise InputError(
            f"call of shard {self.shard.name}",
            f"{left} tokens at position {start}",
            "a number that a function takes there",
            "shorten the prompt, or correct t_min, t_max, first, until in bundle.json",
        )

    def _call(
        self, columns: dict, functions: dict, state, start: int, hook
    ) -> np.ndarray:
        """One call of every part: logits [T, V], −inf for tokens of which the packages
        give none, or what is handed on [T, C]."""
        found: dict[str, list[np.ndarray]] = {}
        for index in range(len(self.parts)):
            if index in functions:
                raw = state.raws[self.owner(index)]
                outputs = self._part(index, functions[index], columns, raw, start, hook)
            else:
                outputs = self._in_columns(index, columns, start, hook)
            if "hidden" in outputs:
                columns = columns | {"hidden": outputs["hidden"][0]}
            for kind, values in outputs.items():
                found[kind] = found.get(kind, []) + values
        if state:
            state.end = start + len(columns[next(iter(columns))])
        if "logits" in found:
            return np.concatenate(found["logits"], axis=1)
        if "top" not in found:
            return found["hidden"][-1]
        tops = np.concatenate(found["top"], axis=1).astype(np.int64)
        values = np.zeros(tops.shape, np.float32)
        if "top_value" in found:
            values = np.concatenate(found["top_value"], axis=1)
        scores = np.full((len(tops), self.shard.rows[1]), -np.inf, np.float32)
        np.put_along_axis(scores, tops, values, axis=1)
        return scores

    def _in_columns(self, index: int, columns: dict, start: int, hook) -> dict:
        """A part without a state over all tokens, in as many calls as its functions
        need; a call with more columns than tokens are left repeats the last one."""
        functions = self.parts[index].functions
        smallest = min(functions, key=lambda f: f.t_min)
        T, done, calls = len(next(iter(columns.values()))), 0, []
        while done < T:
            fitting = [f for f in functions if f.t_min <= T - done]
            function = max(fitting, key=lambda f: f.t_max, default=smallest)
            size = max(function.t_min, min(function.t_max, T - done))
            chosen = np.minimum(done + np.arange(size), T - 1)
            of_call = {name: value[chosen] for name, value in columns.items()}
            calls.append(self._part(index, function, of_call, None, start + done, hook))
            done += size
        joined = {}
        for kind in calls[0]:
            outputs = zip(*(call[kind] for call in calls))
            # what the last call gave for tokens that it repeated is cut off
            joined[kind] = [np.concatenate(pieces)[:T] for pieces in outputs]
        return joined

    def _part(
        self, index: int, function: Function, columns: dict, raw, start: int, hook
    ) -> dict[str, list[np.ndarray]]:
        """The outputs of one call of a part by kind, the axis of tokens first."""
        part, model = self.parts[index], self.models[index][function.name]
        feeds = {}
        for name, kind in model.program.inputs.items():
            entry = part.inputs[name]
            allowed = sizes(model.program, name)
            value = self._feed(entry, allowed, columns, start, hook)
            integers = kind.dtype.startswith("INT")
            feeds[name] = value.astype(np.int32 if integers else np.float32)
        outputs = model.predict(feeds, raw, hook)
        if model.last_native_ms is None:
            self.last_native_ms = None
        elif self.last_native_ms is not None:
            self.last_native_ms += model.last_native_ms
        T, found = len(next(iter(columns.values()))), {}
        for name, entry in part.outputs.items():
            if name not in outputs or entry.kind == "ignored":
                continue
            value = outputs[name]
            if entry.kind in DIMS:
                value = named(value, entry.axes, DIMS[entry.kind])
            else:
                value = value.reshape(T, -1)
                if entry.offsets:
                    value = value + np.array(entry.offsets)
            found.setdefault(entry.kind, []).append(value)
        return found

    def _feed(
        self, entry: Input, allowed: list[Sequence[int]], columns: dict, start, hook
    ) -> np.ndarray:
        """The array of one input, in the package's axes, of which `allowed` has the
        sizes."""
        T, kind = len(next(iter(columns.values()))), entry.kind
        if kind == "constant":
            return np.full([size[0] for size in allowed], entry.value)
        axes = dict(zip(entry.axes, allowed, strict=True))
        suffix = f"_{entry.rope}" if entry.rope else ""
        if kind in ("cos", "sin"):
            value = columns[{"cos": ROPE_COS, "sin": ROPE_SIN}[kind] + suffix]
            if axes["D"][0] == 2 * value.shape[1]:
                value = np.concatenate([value, value], axis=1)
        elif kind in ("mask", "write"):
            count = start + T if "E" in axes else axes["S"][0]
            make = {"mask": visible, "write": written}[kind]
            value = make(entry, start, T, count)
        elif kind in ("ids", "hidden"):
            value = columns[kind]
        else:
            value = {
                "positions": start + np.arange(T),
                "start": np.array(start),
                "end": np.array(start + T),
            }[kind]
        if hook and kind == "mask":  # an inf of the host's is no result of an operation
            value = np.maximum(value, MASKED)
        return arrange(value, DIMS[kind], entry.axes)


class ForeignConstants:
    """The checkpoint's matrices as the packages of a shard hold them, decompressed, by
    their names in the checkpoint."""

    def __init__(self, bundle: Bundle, shard: Shard):
        self.folder, self.foreign = bundle.package(shard), shard.foreign
        self.opened: dict[tuple, object] = {}

    def __call__(self, tensor: str):
        import torch

        rows = []
        pieces = sorted(self.foreign.weights[tensor], key=lambda piece: piece.target)
        for piece in pieces:
            constants = self._constants(piece.part, piece.function)
            matrix = constants[piece.constant].squeeze()
            if piece.transposed:
                matrix = matrix.T
            rows.append(matrix[piece.source : piece.source + piece.count])
        return torch.cat(rows)

    def _constants(self, part: int, function: str | None):
        from miltorch.steps import Constants

        key = part, function
        if key not in self.opened:
            package = self.folder / self.foreign.parts[part].package
            self.opened[key] = Constants(miltorch.read(package, function))
        return self.opened[key]


def sizes(program: miltorch.Program, name: str) -> list[Sequence[int]]:
    """The sizes that each axis of an input may have: one, a range, or those of the
    enumerated shapes."""
    feature = next(f for f in program.description.input if f.name == name)
    array = feature.type.multiArrayType
    if ranges := array.shapeRange.sizeRanges:
        allowed = []
        for r in ranges:
            high = r.upperBound if r.upperBound >= 0 else UNBOUNDED
            allowed.append(range(r.lowerBound, high + 1))
        return allowed
    if shapes := array.enumeratedShapes.shapes:
        return [tuple(sorted(set(axis))) for axis in zip(*(s.shape for s in shapes))]
    return [(n,) for n in array.shape]


def check_description(shard: Shard, models: list[dict[str | None, Model]]) -> None:
    """Refuses a description that the packages contradict, before anything runs: names,
    axes and sizes of inputs and states, names of outputs, T of functions, and the
    caches that the shard has.

    Raises:
        InputError: names the first value that does not fit.
    """
    foreign = shard.foreign
    for index, (part, functions) in enumerate(zip(foreign.parts, models, strict=True)):
        where = f"parts.{index} ({part.package})"
        programs = [model.program for model in functions.values()]
        states = {s.name: s for s in foreign.states if s.part in (None, index)}
        shared = {s.name for s in foreign.states if s.part is None}
        for what, described in (
            ("inputs", part.inputs),
            ("outputs", part.outputs),
            ("states", states),
        ):
            packaged = set().union(*(getattr(program, what) for program in programs))
            for name in sorted(packaged ^ described.keys()):
                if name in packaged or name not in shared:
                    needed = f"those of the package: {', '.join(sorted(packaged))}"
                    _refuse(where, f"{what[:-1]} {name!r} on one side alone", needed)
        for function in part.functions:
            program = functions[function.name].program
            for name in program.inputs:
                _check_input(where, name, part.inputs[name], function, program)
            for name, kind in program.states.items():
                _check_state(f"{where} state {name!r}", states[name], kind.shape)
    caches = Counter(tensor for state in foreign.states for tensor in state.planes)
    if caches != Counter(shard.states.keys()):
        found = ", ".join(sorted(caches.elements()))
        _refuse(f"states of {shard.name}", found, "each cache of the shard once")


def _check_input(
    where: str, name: str, entry: Input, function: Function, program
) -> None:
    allowed, axes = sizes(program, name), list(entry.axes)
    where, lacks = f"{where} input {name!r}", "T" in DIMS.get(entry.kind, "")
    lacks = lacks and "T" not in axes and function.t_max > 1
    if entry.kind == "constant":
        return
    if len(axes) != len(allowed) or lacks:
        needed = (
            f"{len(allowed)} axes of sizes {allowed}, T among them where calls vary"
        )
        _refuse(where, f"axes {axes}", needed)
    for axis, size in zip(axes, allowed, strict=True):
        for n in (function.t_min, function.t_max) if axis == "T" else [axis]:
            if isinstance(n, int) and n not in size:
                _refuse(where, f"{axis} = {n}", f"one of {size}, as the package says")


def _check_state(where: str, entry: PackedState, shape: Sequence[int]) -> None:
    axes, planes = list(entry.axes), len(entry.planes)
    fits = len(axes) == len(shape) and {"H", "S", "D"} <= set(axes)
    if not fits or dict(zip(axes, shape)).get("L", 1) != planes:
        found = f"axes {axes}, {planes} planes of layers {list(entry.layers)}"
        _refuse(where, found, f"those of sizes {shape}: L planes, H, S and D")


def _refuse(where: str, found: str, needed: str) -> None:
    raise InputError(where, found, needed, "correct it in bundle.json")
