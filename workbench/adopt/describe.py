"""What the names, shapes and functions of packages say of their inputs, outputs and
states, and the assumptions where they say nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import miltorch
from miltorch.program import read_spec
from workbench import paths
from workbench.bundle.foreign import Function, Input, Output, PackedState, Part
from workbench.errors import InputError
from workbench.models.family import Plan
from workbench.runtime.foreign import sizes

INPUT_NAMES = (
    ("write", r"write|update"),
    ("mask", r"mask"),
    ("cos", r"cos"),
    ("sin", r"sin"),
    ("start", r"current_?pos|start|^pos$|offset"),
    ("positions", r"position"),
    ("ids", r"ids?$|tokens?$"),
    ("hidden", r"hidden|embed|^x$"),
)
"""(kind of input, pattern of its name); the first pattern that fits decides."""
LOCAL = re.compile(r"local|sliding")
KINDS = "embedding", "layers", "head"


@dataclass
class Package:
    """A package and its programs by function."""

    path: Path
    programs: dict[str | None, miltorch.Program] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, tuple]:
        """State → its shape."""
        shapes = {}
        for program in self.programs.values():
            shapes |= {name: kind.shape for name, kind in program.states.items()}
        return shapes

    @property
    def kind(self) -> str:
        """`layers` where it has a state, `embedding` where it reads ids, else
        `head`."""
        if self.states:
            return "layers"
        reads = {kind_of(name) for p in self.programs.values() for name in p.inputs}
        return "embedding" if "ids" in reads else "head"


def kind_of(name: str) -> str | None:
    """The kind of an input by its name, None if no pattern fits."""
    for kind, pattern in INPUT_NAMES:
        if re.search(pattern, name.lower()):
            return kind
    return None


def expand(packages: Sequence[Path]) -> list[Path]:
    """The paths of packages, and of those in folders."""
    resolved = []
    for source in packages:
        folders = [source]
        if not paths.is_package(source):
            folders = sorted(source.glob("[!.]*.mlpackage"))
        resolved += [path.resolve() for path in folders]
    if not resolved:
        actual = f"none in {', '.join(map(str, packages))}"
        raise InputError("packages", actual, ".mlpackage folders", "name them")
    return resolved


def read(path: Path) -> Package:
    names = list(read_spec(path).mlProgram.functions)
    functions = [None] if len(names) == 1 else names
    return Package(path, {name: miltorch.read(path, name) for name in functions})


def run_order(package: Package) -> tuple:
    return KINDS.index(package.kind), _natural(package.path.name)


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Description:
    """The description of packages of a model with a family's plan.

    Attributes:
        notes: the assumptions.
        context: the most rows of a cache.
        moves: whether rows of some cache move or wrap around.
        shapes: of every state, by part and name.
    """

    def __init__(self, plan: Plan, packages: list[Package]):
        self.plan, self.packages, self.notes = plan, packages, []
        self.anemll = any((p.path.parent / "meta.yaml").is_file() for p in packages)
        names = [name for package in packages for name in package.programs if name]
        self.rotates = any("rotate" in name for name in names)
        sliding = [layer for layer in plan.layers if layer.window]
        self.window = sliding[0].window if sliding else None
        self.local = sliding[0].rope if sliding else ""
        self.context, self.shapes = 0, {}

    def note(self, about: str, assumed: object, why: str) -> None:
        row = {"about": about, "assumed": str(assumed), "why": why}
        if row not in self.notes:
            self.notes.append(row)

    def part(self, package: Package) -> Part:
        inputs, outputs, functions = {}, {}, []
        for name, program in package.programs.items():
            for tensor in program.inputs:
                inputs.setdefault(tensor, self.input(package, program, tensor))
            for t_min, t_max in self.tokens(program, inputs):
                functions.append(self.function(name, t_min, t_max, package.kind))
            types = dict(pair for op in program.block.ops for pair in op.outputs)
            for tensor in sorted(program.outputs, key=_natural):
                outputs.setdefault(tensor, self.output(tensor, types[tensor], inputs))
        functions.sort(key=lambda f: f.t_max)
        name = package.path.name
        return Part(package=name, functions=functions, inputs=inputs, outputs=outputs)

    def function(self, name: str | None, t_min: int, t_max: int, kind: str) -> Function:
        text, limits = name or "", {}
        if self.rotates and kind == "layers":
            end = "first" if "rotate" in text else "until"
            limits = {end: self.window}
            self.note(f"functions.{end} of {name}", self.window, "the model's window")
        silent = "prefill" in text
        if silent:
            self.note(f"functions.logits of {name}", False, "a prefill, by its name")
        return Function(
            name=name, t_min=t_min, t_max=t_max, logits=not silent, **limits
        )

    def tokens(self, program, inputs: dict[str, Input]) -> list[tuple[int, int]]:
        """(t_min, t_max) of a function, one pair for every enumerated size."""
        for name in program.inputs:
            if "T" in inputs[name].axes:
                size = sizes(program, name)[inputs[name].axes.index("T")]
                if isinstance(size, range):
                    return [(size[0], min(size[-1], self.context))]
                return [(n, n) for n in size]
        return [(1, 1)]

    def input(self, package: Package, program, name: str) -> Input:
        kind, allowed = kind_of(name), sizes(program, name)
        if kind is None:
            about = f"input {name} of {package.path.name}"
            self.note(about, "constant 0", "its name says nothing")
            return Input(kind="constant")
        fields: dict = {"axes": self.axes(kind, allowed)}
        local = bool(LOCAL.search(name.lower()))
        if kind == "mask":
            why = "usual; no interface tells"
            if self.anemll or "E" in fields["axes"]:
                fields["blocked"] = -np.inf
                why = "a meta.yaml of ANEMLL" if self.anemll else "it grows by call"
            self.note(f"{name}.blocked", fields.get("blocked", -1e4), why)
            if local:
                fields["window"] = self.window
                if list(allowed[-1]) == [self.window]:
                    fields["rows"] = self.local_rows
        if kind in ("cos", "sin") and self.local:
            fields["rope"] = "local" if local else "global"
            self.note(f"{name}.rope", fields["rope"], "its name")
        return Input(kind=kind, **fields)

    @property
    def local_rows(self) -> str:
        rule = "shift" if self.rotates else "ring"
        why = "functions rotate" if self.rotates else "no function rotates"
        self.note("rows of sliding caches", rule, why)
        return rule

    def axes(self, kind: str, allowed: list[Sequence[int]]) -> list:
        """The axes of an input: the letters of its kind on the axes of a fitting size,
        else 1."""
        axes: list = [1] * len(allowed)
        last = len(allowed) - 1
        if kind in ("start", "end"):
            return axes
        wide, letter = None, {"hidden": "C", "write": "S"}.get(kind, "D")
        if kind == "hidden":
            wide = self.channels(allowed)
        elif kind == "write":
            wide = max((2, 3), key=lambda axis: max(allowed[axis]))
        elif kind in ("mask", "cos", "sin"):
            wide = last
            if kind == "mask":
                letter = "E" if len(allowed[-1]) > 1 else "S"
        if wide is not None:
            axes[wide] = letter
        free = [i for i, axis in enumerate(axes) if axis == 1]
        moving = [i for i in free if len(allowed[i]) > 1 or allowed[i][0] != 1]
        usual = {"mask": 2, "hidden": max(1, 3 - (wide or 0)), "write": 5 - (wide or 0)}
        axes[moving[0] if moving else min(usual.get(kind, free[-1]), last)] = "T"
        return axes

    def channels(self, allowed: list[Sequence[int]]) -> int:
        """The axis of channels: the first of their number, of three axes the last."""
        last = len(allowed) - 1
        fitting = [i for i, n in enumerate(allowed) if list(n) == [self.plan.dims.C]]
        if last == 2:
            return max(fitting, default=last)
        return min(fitting, default=last)

    def output(self, name: str, kind: miltorch.Type, inputs: dict) -> Output:
        text, shape = name.lower(), kind.shape
        if kind.dtype.startswith("INT"):
            pieces = (shape[-1] if shape else 1) or 1
            if pieces == 1:
                return Output(kind="top")
            self.note(f"{name}.offsets", f"{pieces} equal slices", "as many ids come")
            slices = np.array_split(np.arange(self.plan.dims.V), pieces)
            return Output(kind="top", offsets=[int(rows[0]) for rows in slices])
        if re.search(r"val|token_logit|max", text):
            return Output(kind="top_value")
        if "logit" in text:
            return Output(kind="logits", axes=_wide_axes(len(shape), "V"))
        for entry in inputs.values():
            if entry.kind == "hidden":
                return Output(kind="hidden", axes=entry.axes)
        return Output(kind="hidden", axes=_wide_axes(len(shape), "C"))

    def states(self) -> list[PackedState]:
        """All states; sets `context`, the most rows of a cache."""
        by_part: dict[int | None, dict[str, tuple]] = {}
        for index, package in enumerate(self.packages):
            if package.states:
                by_part[index] = package.states
        if not by_part:
            actual, step = "no state in any", "name all of them"
            raise InputError("packages", actual, "a cache in states", step)
        first, *others = by_part.values()
        layers = self.plan.dims.L
        same = _layers_of(first) == layers and all(own == first for own in others)
        if others and same:
            self.note("states", "shared by all parts", "each declares all layers")
        if same:
            by_part = {None: first}
        entries, before = [], 0
        for part, own in by_part.items():
            for name, shape in own.items():
                self.shapes[part, name] = shape
                entries.append(self.state(name, shape, part, before))
                self.context = max(self.context, shape[-2])
            before += _layers_of(own)
        self.moves = any(entry.rows != "absolute" for entry in entries)
        return entries

    def state(
        self, name: str, shape: tuple, part: int | None, before: int
    ) -> PackedState:
        text, holds = name.lower(), "v"
        if "kv" in text:
            holds = "kv"
        elif re.search(r"(^|[^a-z])k(ey)?", text):
            holds = "k"
        planes = shape[0] // len(holds)
        layers = list(range(before, before + planes))
        number = re.search(r"layers?\D?(\d+)", text)
        if planes == 1 and number:
            layers = [before + int(number[1])]
        local, rows = LOCAL.search(text), "absolute"
        if local or "global" in text:
            slides = [bool(layer.window) for layer in self.plan.layers]
            layers = np.flatnonzero(np.array(slides) == bool(local)).tolist()
            self.note(f"layers of state {name}", layers, "its name")
        if local and shape[-2] == self.window:
            rows = self.local_rows
        fields = {"axes": ["L", 1, "H", "S", "D"]} if len(shape) == 5 else {}
        return PackedState(
            name=name, part=part, layers=layers, holds=holds, rows=rows, **fields
        )


def _layers_of(shapes: dict[str, tuple]) -> int:
    """Decoder layers of a part, from its states."""
    return sum(shape[0] if len(shape) > 3 else 1 for shape in shapes.values()) // 2


def _wide_axes(rank: int, letter: str) -> list:
    """Axes [1, T, W]; [1, W, T, 1] for rank 4."""
    if rank == 4:
        return [1, letter, "T", 1]
    return [1] * (rank - 2) + ["T", letter]
