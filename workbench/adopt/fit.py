"""Checks a `foreign.yaml` against the packages that it names, before anything runs."""

from collections.abc import Sequence

import miltorch
from workbench.adopt.schema import (
    FILE,
    INPUT_AXES,
    Axis,
    Foreign,
    Function,
    Part,
    State,
)
from workbench.errors import InputError

UNBOUNDED = 1 << 31


def sizes(program: miltorch.Program, name: str) -> list[Sequence[int]]:
    """The allowed sizes of each axis of an input: one, a range, or those of the
    enumerated shapes."""
    feature = next(f for f in program.description.input if f.name == name)
    array = feature.type.multiArrayType
    if ranges := array.shapeRange.sizeRanges:
        ends = []
        for r in ranges:
            ends.append(
                (r.lowerBound, r.upperBound if r.upperBound >= 0 else UNBOUNDED)
            )
        return [range(low, high + 1) for low, high in ends]
    if shapes := [list(s.shape) for s in array.enumeratedShapes.shapes]:
        return [tuple(sorted(set(axis))) for axis in zip(*shapes)]
    return [(n,) for n in array.shape]


def check(foreign: Foreign, programs: Sequence[Sequence[miltorch.Program]]) -> None:
    """Refuses a description that the packages contradict.

    Names, ranks and sizes of inputs, outputs and states, and T of functions are
    compared with `programs`, the programs of every part's functions. Every layer must
    have a cache.

    Raises:
        InputError: names the first value that does not fit.
    """
    shared: set[str] = set()
    for index, part in enumerate(foreign.parts):
        inputs, outputs, states = set(), set(), set()
        for function, program in zip(part.functions, programs[index], strict=True):
            where = f"parts.{index} ({part.package}, {program.function})"
            _names(where, "input", program.inputs, part.inputs)
            _names(where, "output", program.outputs, part.outputs)
            for name in program.inputs:
                _input(f"{where} input {name!r}", part, function, name, program)
            entries = {}
            for s in foreign.states:
                if s.part in (None, index):
                    entries[s.name] = s
            _names(where, "state", program.states, entries)
            for name, kind in program.states.items():
                _state(f"{where} state {name!r}", entries[name], kind.shape)
            inputs |= program.inputs.keys()
            outputs |= set(program.outputs)
            states |= program.states.keys()
        shared |= states
        own = {s.name for s in foreign.states if s.part == index}
        for what, described, packaged in (
            ("input", part.inputs.keys(), inputs),
            ("output", part.outputs.keys(), outputs),
            ("state", own, states),
        ):
            if unknown := sorted(described - packaged):
                _refuse(
                    f"parts.{index} ({part.package})",
                    f"{what} {unknown[0]!r}, which the package does not have",
                    f"some of {', '.join(sorted(packaged)) or 'none'}",
                )
    _caches(foreign, shared)


def _caches(foreign: Foreign, packaged: set[str]) -> None:
    """Refuses layers without keys and values or with several, and states that no part
    has."""
    names = [(state.part, state.name) for state in foreign.states]
    if twice := sorted({name for part, name in names if names.count((part, name)) > 1}):
        _refuse(
            f"state {twice[0]!r}",
            "described twice",
            "once for all parts, or `part` for each",
        )
    for state in foreign.states:
        if state.name not in packaged:
            _refuse(
                f"state {state.name!r}", "in no package", f"one of {sorted(packaged)}"
            )
        if state.part is not None and state.part >= len(foreign.parts):
            _refuse(
                f"state {state.name!r}", f"part {state.part}", "a part that there is"
            )
    caches = []
    for state in foreign.states:
        for layer in state.layers:
            caches += [(layer, tensor) for tensor in state.holds]
    layers = range(max(layer for layer, _ in caches) + 1)
    for layer in layers:
        for tensor in "kv":
            if (times := caches.count((layer, tensor))) != 1:
                _refuse(
                    f"layer {layer}",
                    f"{tensor} in {times} states",
                    "one for each layer",
                )


def _names(where: str, what: str, packaged, described) -> None:
    if unknown := sorted(set(packaged) - set(described)):
        needed = f"every {what} of the package: {', '.join(packaged)}"
        _refuse(where, f"no {what} {unknown[0]!r}", needed)


def _input(where: str, part: Part, function: Function, name: str, program) -> None:
    """Refuses axes of the file that the package's sizes contradict."""
    entry, allowed = part.inputs[name], sizes(program, name)
    if entry.kind == "constant":
        return
    _rank(where, entry.axes, allowed)
    if "T" in INPUT_AXES[entry.kind] and "T" not in entry.axes and function.t_max > 1:
        _refuse(where, f"axes {entry.axes}", f"an axis T, for t_max = {function.t_max}")
    for axis, size in zip(entry.axes, allowed, strict=True):
        if isinstance(axis, int) and axis not in size:
            _refuse(
                where,
                f"axis {axis} of {entry.axes}",
                f"{_said(size)}, as the package says",
            )
        if axis == "T":
            for T in (function.t_min, function.t_max):
                if T not in size:
                    _refuse(where, f"T = {T}", f"{_said(size)}, as the package says")


def _state(where: str, entry: State, shape: tuple) -> None:
    _rank(where, entry.axes, shape)
    planes = len(entry.layers) * (2 if entry.holds == "kv" else 1)
    sized = dict(zip(entry.axes, shape, strict=True))
    if sized.get("L", 1) != planes:
        _refuse(
            where, f"{planes} planes for layers {entry.layers}", f"{sized.get('L', 1)}"
        )
    if missing := {"H", "S", "D"} - sized.keys():
        _refuse(where, f"axes {entry.axes}", f"an axis {min(missing)}")


def _rank(where: str, axes: list[Axis], sizes) -> None:
    if len(axes) != len(sizes):
        _refuse(
            where,
            f"{len(axes)} axes {axes}",
            f"{len(sizes)}, as the package has: {sizes}",
        )


def _said(size: Sequence[int]) -> str:
    if isinstance(size, range) and len(size) > 1:
        return f"{size[0]} to {size[-1]}"
    return " or ".join(map(str, size))


def _refuse(where: str, actual: str, needed: str) -> None:
    raise InputError(where, actual, needed, f"correct {FILE}")
