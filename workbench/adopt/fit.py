"""Checks a `foreign.yaml` against the packages that it names, before anything runs."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

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
        allowed = []
        for r in ranges:
            high = r.upperBound if r.upperBound >= 0 else UNBOUNDED
            allowed.append(range(r.lowerBound, high + 1))
        return allowed
    if shapes := array.enumeratedShapes.shapes:
        return [tuple(sorted(set(axis))) for axis in zip(*(s.shape for s in shapes))]
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
        states = {s.name: s for s in foreign.states if s.part in (None, index)}
        described = {"input": part.inputs, "output": part.outputs, "state": states}
        packaged = {what: set() for what in described}
        for function, program in zip(part.functions, programs[index], strict=True):
            where = f"parts.{index} ({part.package}, {program.function})"
            names = program.inputs, program.outputs, program.states
            for what, own in zip(described, names):
                _names(where, what, own, described[what])
                packaged[what].update(own)
            for name in program.inputs:
                _input(f"{where} input {name!r}", part, function, name, program)
            for name, kind in program.states.items():
                _state(f"{where} state {name!r}", states[name], kind.shape)
        shared |= packaged["state"]
        described["state"] = {s.name for s in foreign.states if s.part == index}
        for what, own in packaged.items():
            if unknown := sorted(set(described[what]) - own):
                _refuse(
                    f"parts.{index} ({part.package})",
                    f"{what} {unknown[0]!r}, which the package does not have",
                    f"some of {', '.join(sorted(own)) or 'none'}",
                )
    _caches(foreign, shared)


def _caches(foreign: Foreign, packaged: set[str]) -> None:
    """Refuses layers without keys and values or with several, and states that no part
    has."""
    names = Counter((state.name, state.part) for state in foreign.states)
    for (name, _), count in names.items():
        if count > 1:
            needed = "once for all parts, or `part` for each"
            _refuse(f"state {name!r}", "described twice", needed)
    caches = Counter()
    for state in foreign.states:
        where = f"state {state.name!r}"
        if state.name not in packaged:
            _refuse(where, "in no package", f"one of {sorted(packaged)}")
        if state.part is not None and state.part >= len(foreign.parts):
            _refuse(where, f"part {state.part}", "a part that there is")
        caches.update(product(state.layers, state.holds))
    layers = range(max(caches)[0] + 1)
    for layer, tensor in product(layers, "kv"):
        if (times := caches[layer, tensor]) != 1:
            actual = f"{tensor} in {times} states"
            _refuse(f"layer {layer}", actual, "one for each layer")


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
        needed = f"{_said(size)}, as the package says"
        if isinstance(axis, int) and axis not in size:
            _refuse(where, f"axis {axis} of {entry.axes}", needed)
        if axis == "T":
            for T in (function.t_min, function.t_max):
                if T not in size:
                    _refuse(where, f"T = {T}", needed)


def _state(where: str, entry: State, shape: tuple) -> None:
    _rank(where, entry.axes, shape)
    planes = len(entry.layers) * len(entry.holds)
    sized = {"L": 1} | dict(zip(entry.axes, shape, strict=True))
    if sized["L"] != planes:
        _refuse(where, f"{planes} planes for layers {entry.layers}", str(sized["L"]))
    if missing := {"H", "S", "D"} - sized.keys():
        _refuse(where, f"axes {entry.axes}", f"an axis {min(missing)}")


def _rank(where: str, axes: list[Axis], sizes) -> None:
    if len(axes) != len(sizes):
        needed = f"{len(sizes)}, as the package has: {sizes}"
        _refuse(where, f"{len(axes)} axes {axes}", needed)


def _said(size: Sequence[int]) -> str:
    if isinstance(size, range) and len(size) > 1:
        return f"{size[0]} to {size[-1]}"
    return " or ".join(map(str, size))


def _refuse(where: str, actual: str, needed: str) -> None:
    raise InputError(where, actual, needed, f"correct {FILE}")
