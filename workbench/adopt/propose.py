"""Proposes a `foreign.yaml` from packages' names, shapes, functions and the files
beside them.

Properties that the interface leaves open are assumed, with a note for each assumption.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import miltorch
from miltorch.program import read_spec
from workbench import paths
from workbench.adopt import fit, passes, schema
from workbench.adopt.adapter import Adapter
from workbench.adopt.folder import Adopted
from workbench.adopt.schema import (
    FILE,
    Embedding,
    Foreign,
    Function,
    Input,
    Output,
    Part,
    State,
)
from workbench.check import metrics
from workbench.errors import InputError
from workbench.files import write_whole
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import head_dim

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


@dataclass
class _Package:
    """A package and its programs by function."""

    path: Path
    programs: dict[str | None, miltorch.Program] = field(default_factory=dict)

    @property
    def stateful(self) -> bool:
        return any(program.states for program in self.programs.values())

    @property
    def embeds(self) -> bool:
        return any("ids" in map(kind_of, p.inputs) for p in self.programs.values())

    @property
    def state_shapes(self) -> dict[str, tuple]:
        """State → its shape."""
        shapes = {}
        for program in self.programs.values():
            for name, kind in program.states.items():
                shapes[name] = kind.shape
        return shapes

    @property
    def order(self) -> tuple:
        """The sort key of a package: embeddings, then packages with a state, then
        heads; each by the numbers in its name."""
        place = 2
        if self.stateful:
            place = 1
        elif self.embeds:
            place = 0
        return place, _natural(self.path.name)


def propose(
    packages: Sequence[Path], checkpoint: Checkpoint, folder: Path
) -> tuple[Foreign, list[str]]:
    """A description of `packages` for `folder`, and the assumptions in sentences.

    Raises:
        InputError: no packages, one that cannot be read, or an input or a state of an
            unknown kind.
    """
    ordered = sorted(map(_read, _expand(packages)), key=lambda package: package.order)
    maker = _Maker(checkpoint, ordered, folder)
    foreign = _probed(maker.foreign(), checkpoint, folder, maker.notes)
    return foreign, maker.notes


def _expand(packages: Sequence[Path]) -> list[Path]:
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


def _read(path: Path) -> _Package:
    names = list(read_spec(path).mlProgram.functions)
    functions = [None] if len(names) == 1 else names
    return _Package(path, {name: miltorch.read(path, name) for name in functions})


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def kind_of(name: str) -> str | None:
    """The kind of an input by its name, None if no pattern fits."""
    for kind, pattern in INPUT_NAMES:
        if re.search(pattern, name.lower()):
            return kind
    return None


class _Maker:
    """Makes the parts of a description and collects notes on its assumptions."""

    def __init__(self, checkpoint, packages: list[_Package], folder: Path):
        config = checkpoint.config
        self.checkpoint, self.packages = checkpoint, packages
        self.folder, self.notes = folder, []
        self.C, self.V = config.hidden_size, config.vocab_size
        self.D, self.L = head_dim(config), config.num_hidden_layers
        self.kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.L
        self.window = getattr(config, "sliding_window", None)
        self.anemll = any((p.path.parent / "meta.yaml").is_file() for p in packages)
        names = [name for package in packages for name in package.programs if name]
        self.rotates = any("rotate" in name for name in names)
        self.local_rows = "shift" if self.rotates else "ring"

    def foreign(self) -> Foreign:
        states, context = self.states()
        parts = [self.part(package) for package in self.packages]
        embedding = Embedding()
        if any(entry.kind == "hidden" for entry in parts[0].inputs.values()):
            embedding = self.embedding()
        return Foreign(
            exporter="ANEMLL (it left a meta.yaml)" if self.anemll else "",
            checkpoint=os.path.relpath(
                self.checkpoint.path.resolve(), self.folder.resolve()
            ),
            context=context,
            parts=parts,
            states=states,
            embedding=embedding,
        )

    def embedding(self) -> Embedding:
        """The first file beside the packages with the size of an fp16 table, else the
        checkpoint's table."""
        embedding, table = Embedding(), "the checkpoint's"
        for folder in sorted({package.path.parent for package in self.packages}):
            for file in sorted(folder.iterdir()):
                size = file.is_file() and file.stat().st_size
                if size == 2 * self.C * self.V and not embedding.file:
                    embedding.file = os.path.relpath(file, self.folder)
                    table = file.name
        self.notes.append(
            f"The host embeds the tokens: the table is {table} (embedding)."
        )
        return embedding

    def part(self, package: _Package) -> Part:
        inputs, outputs, functions = {}, {}, []
        for name, program in package.programs.items():
            for tensor in program.inputs:
                inputs.setdefault(tensor, self.input(package, program, tensor))
            for t_min, t_max in self.tokens(program, inputs):
                functions.append(self.function(name, t_min, t_max, package.stateful))
            types = dict(pair for op in program.block.ops for pair in op.outputs)
            for tensor in sorted(program.outputs, key=_natural):
                outputs.setdefault(tensor, self.output(tensor, types[tensor], inputs))
        path = os.path.relpath(package.path, self.folder.resolve())
        functions.sort(key=lambda f: f.t_max)
        return Part(package=path, functions=functions, inputs=inputs, outputs=outputs)

    def function(
        self, name: str | None, t_min: int, t_max: int, stateful: bool
    ) -> Function:
        text, window = name or "", self.window
        function = Function(name=name, t_min=t_min, t_max=t_max)
        if "rotate" in text:
            note = f"{name} is called from position {window}, the window, on."
            self.notes.append(note)
            if stateful:
                function.first = window
        elif self.rotates and stateful:
            function.until = window
        if "prefill" in text:
            function.logits = False
            note = f"{name} gives no logits, as its name says (functions.logits)."
            self.notes.append(note)
        return function

    def tokens(self, program, inputs: dict[str, Input]) -> list[tuple[int, int]]:
        """(t_min, t_max) of a function, one pair for every enumerated size."""
        for name in program.inputs:
            if "T" in inputs[name].axes:
                size = fit.sizes(program, name)[inputs[name].axes.index("T")]
                if isinstance(size, range):
                    return [(size[0], min(size[-1], self.context))]
                return [(n, n) for n in size]
        return [(1, 1)]

    def input(self, package: _Package, program, name: str) -> Input:
        kind, sizes = kind_of(name), fit.sizes(program, name)
        if kind is None:
            self.notes.append(
                f"Input {name!r} of {package.path.name} is unknown: constant 0."
            )
            return Input(kind="constant")
        entry = Input(kind=kind, axes=self.axes(kind, sizes))
        if kind == "mask":
            infinite = self.anemll or "E" in entry.axes
            if infinite:
                entry.blocked = -np.inf
            if LOCAL.search(name.lower()):
                entry.window = self.window
                if list(sizes[-1]) == [self.window]:
                    entry.rows = self.local_rows
            self.notes.append(
                f"{name}: blocked by {entry.blocked:g}, which no interface tells."
            )
        if kind in ("cos", "sin"):
            if sizes[-1][-1] == self.D // 2:
                entry.width = "half"
            if len(set(self.kinds)) > 1:
                entry.layer_type = "full_attention"
                if LOCAL.search(name.lower()):
                    entry.layer_type = "sliding_attention"
                self.notes.append(f"{name}: the table of {entry.layer_type} layers.")
        return entry

    def axes(self, kind: str, sizes: list[Sequence[int]]) -> list:
        """The axes of an input: the letters of its kind on the axes of a fitting size,
        else 1."""
        axes: list = [1] * len(sizes)
        if kind in ("start", "end"):
            return axes
        wide = None
        letter = {"hidden": "C", "cos": "D", "sin": "D", "write": "S"}.get(kind)
        if kind == "hidden":
            wide = self._channels(sizes)
        elif kind == "write":
            wide = max((2, 3), key=lambda axis: max(sizes[axis]))
        elif kind in ("mask", "cos", "sin"):
            wide = len(sizes) - 1
            letter = letter or ("E" if len(sizes[-1]) > 1 else "S")
        if wide is not None:
            axes[wide] = letter
        free = [i for i, axis in enumerate(axes) if axis == 1]
        moving = []
        for i in free:
            if len(sizes[i]) > 1 or sizes[i][0] != 1:
                moving.append(i)
        usual = {"mask": 2, "hidden": max(1, 3 - (wide or 0)), "write": 5 - (wide or 0)}
        tokens = min(usual.get(kind, free[-1]), len(sizes) - 1)
        if moving:
            tokens = moving[0]
        axes[tokens] = "T"
        return axes

    def _channels(self, sizes) -> int:
        last = len(sizes) - 1
        fitting = [i for i, size in enumerate(sizes) if list(size) == [self.C]]
        if last == 2:
            return max(fitting, default=last)
        return min(fitting, default=last)

    def output(
        self, name: str, kind: miltorch.Type, inputs: dict[str, Input]
    ) -> Output:
        text, shape = name.lower(), kind.shape
        if kind.dtype.startswith("INT"):
            pieces = (shape[-1] if shape else 1) or 1
            if pieces == 1:
                return Output(kind="top")
            self.notes.append(
                f"{name}: ids count from the start of {pieces} equal slices."
            )
            parts = np.array_split(np.arange(self.V), pieces)
            return Output(kind="top", offsets=[int(part[0]) for part in parts])
        if re.search(r"val|token_logit|max", text):
            return Output(kind="top_value")
        if "logit" in text:
            return Output(kind="logits", axes=_wide_axes(len(shape), "V"))
        for entry in inputs.values():
            if entry.kind == "hidden":
                return Output(kind="hidden", axes=entry.axes)
        return Output(kind="hidden", axes=_wide_axes(len(shape), "C"))

    def states(self) -> tuple[list[State], int]:
        """All states, and the context: the most rows of a cache."""
        by_part: dict[int | None, dict[str, tuple]] = {}  # part → state → shape
        for index, package in enumerate(self.packages):
            if package.stateful:
                by_part[index] = package.state_shapes
        if not by_part:
            actual, step = "no state in any", "name all of them"
            raise InputError("packages", actual, "a cache in states", step)
        first, *others = by_part.values()
        if not others:
            by_part = {None: first}
        elif self.layers_of(first) == self.L and all(own == first for own in others):
            note = "All parts have states of the same names and sizes: shared."
            self.notes.append(note)
            by_part = {None: first}
        entries = []
        first = self.context = 0
        for part, own in by_part.items():
            for name, shape in own.items():
                entries.append(self.state(name, shape, part, first))
                self.context = max(self.context, shape[-2])
            first += self.layers_of(own)
        return entries, self.context

    def layers_of(self, shapes: dict[str, tuple]) -> int:
        """Decoder layers of a part, from its states."""
        planes = sum(shape[0] if len(shape) > 3 else 1 for shape in shapes.values())
        return planes // 2

    def state(self, name: str, shape: tuple, part: int | None, first: int) -> State:
        text = name.lower()
        holds = "v"
        if "kv" in text:
            holds = "kv"
        elif re.search(r"(^|[^a-z])k(ey)?", text):
            holds = "k"
        planes = shape[0] // len(holds)
        layers = list(range(first, first + planes))
        number = re.search(r"layers?\D?(\d+)", text)
        if planes == 1 and number:
            layers = [first + int(number[1])]
        rows, local = "absolute", LOCAL.search(text)
        if local or "global" in text:
            sliding = np.array(self.kinds) == "sliding_attention"
            layers = np.flatnonzero(sliding == bool(local)).tolist()
        if local:
            rows = self.local_rows
            self.notes.append(f"{name}: rows of a full cache {rows} (states.rows).")
        entry = State(name=name, part=part, layers=layers, holds=holds, rows=rows)
        if len(shape) == 5:
            entry.axes = ["L", 1, "H", "S", "D"]
        return entry


def _wide_axes(rank: int, letter: str) -> list:
    """Axes [1, T, W]; [1, W, T, 1] for rank 4."""
    if rank == 4:
        return [1, letter, "T", 1]
    return [1] * (rank - 2) + ["T", letter]


def _probed(
    foreign: Foreign, checkpoint: Checkpoint, folder: Path, notes: list[str]
) -> Foreign:
    """The description with the order of packed planes whose keys and values are nearest
    to the checkpoint's over a few tokens; a note has their distance."""
    orders = ["halves"]
    if any(s.holds == "kv" for s in foreign.states):
        orders.append("pairs")
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 4)
    expected = passes.reference(checkpoint, ids, None, head=False)
    errors, trials = {}, {}
    for order in orders:
        trial = trials[order] = foreign.model_copy(deep=True)
        for state in trial.states:
            state.order = order
        adopted = Adopted(folder.resolve(), trial, checkpoint.path.resolve())
        fit.check(trial, adopted.programs)
        own = passes.run(Adapter(adopted, "portable"), ids, 1)
        k = metrics.relative_rms(expected.k, np.nan_to_num(own.k))
        errors[order] = max(k, metrics.relative_rms(expected.v, np.nan_to_num(own.v)))
    best = min(errors, key=errors.get)
    if len(orders) > 1:
        notes.append(
            f"Planes of packed states: {best}, which is nearer to the checkpoint."
        )
    notes.append(
        f"K and V of four tokens differ from the checkpoint's by {errors[best]:.2g} (relative)."
    )
    return trials[best]


def target(folder: Path) -> Path:
    """The file to be written in a folder; refuses to replace one."""
    path = folder / FILE
    if os.path.lexists(path):
        raise InputError(
            str(path), "a file", "a folder without one", "remove it, or choose another"
        )
    return path


def write(foreign: Foreign, notes: list[str], path: Path) -> None:
    """Writes the file, what was assumed as comments above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = "".join(f"# {note}\n" for note in dict.fromkeys(notes))
    write_whole(path, (comments + schema.dump(foreign)).encode())
