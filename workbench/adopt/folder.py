"""An adopted folder: its description, and the properties that a bundle has in its
manifest."""

import hashlib
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import miltorch
from workbench import paths
from workbench.adopt import fit, schema
from workbench.adopt.schema import Foreign, Part
from workbench.bundle import PRESETS
from workbench.errors import InputError
from workbench.files import sha256
from workbench.models.checkpoint import Checkpoint

MAX_VOCABULARY = 1 << 19  # tokens, if neither checkpoint nor packages have the number
LARGEST_TILE = 64  # tokens of a gate's call, if a package takes any number


@dataclass(frozen=True)
class AdoptedOptions:
    """The export options that packages of other exporters have; the batch is one."""

    max_seq_len: int
    t_max: int
    batch: int = 1
    compress: str | None = None  # the preset whose size is nearest
    kv_write = "mask"
    target, program_dtype = "coreml", "fp16"

    def model_dump(self) -> dict:
        """The options by name, without the estimated `compress`."""
        options = asdict(self)
        options.pop("compress")
        return options

    def tokens(self, limit: int) -> int:
        return limit

    width = tokens


@dataclass
class AdoptedShard:
    """One package. `kind` is `layers` if it has states, `head` after these, else
    `embedding`. `states` are named and shaped as a bundle's. `layers` is the span of
    its decoder layers, None if it is unknown, since the parts share one state."""

    name: str
    kind: str
    package: str
    files: list[SimpleNamespace]
    states: dict[str, SimpleNamespace]
    layers: tuple[int, int] | None
    functions: dict = field(default_factory=dict)
    modules: dict = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass
class Adopted:
    """A folder with a `foreign.yaml`, checked against the packages that it names."""

    root: Path
    foreign: Foreign
    source: Path | None = None  # a checkpoint in place of the one that the file names

    @classmethod
    def open(cls, path: str | Path, checkpoint: Path | None = None) -> "Adopted":
        """Opens the folder (or its foreign.yaml).

        Raises:
            InputError: no such file, a value that does not fit the packages, a package
                that cannot be read.
        """
        path = Path(path)
        root = path if path.is_dir() else path.parent
        adopted = cls(root.resolve(), schema.load(root / schema.FILE), checkpoint)
        fit.check(adopted.foreign, adopted.programs)
        return adopted

    def path(self, written: str) -> Path:
        """A path of the file, relative to the folder, which need not exist yet."""
        return Path(os.path.normpath(self.root / written))

    def package(self, part: Part | AdoptedShard) -> Path:
        return self.path(part.package)

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The exported checkpoint: `source`, else the one in the file, else None."""
        path = self.source or (
            self.foreign.checkpoint and self.path(self.foreign.checkpoint)
        )
        return Checkpoint(path) if path else None

    def needed_checkpoint(self) -> Checkpoint:
        """The checkpoint; refuses a folder that names none."""
        if self.checkpoint is None:
            needed = "the Hugging Face folder that was exported"
            step = "give --checkpoint, or write it there"
            raise InputError(
                str(self.root / schema.FILE), "no checkpoint", needed, step
            )
        return self.checkpoint

    @property
    def tokenizer(self) -> Path:
        """The folder that the tokenizer is in."""
        return self.checkpoint.path if self.checkpoint else self.root

    @cached_property
    def programs(self) -> list[list[miltorch.Program]]:
        """The programs of every part's functions."""
        programs = []
        for part in self.foreign.parts:
            package = self.package(part)
            programs.append([miltorch.read(package, f.name) for f in part.functions])
        return programs

    @cached_property
    def stateful(self) -> list[int]:
        """The parts with a state, by their number."""
        stateful = []
        for index, programs in enumerate(self.programs):
            if any(program.states for program in programs):
                stateful.append(index)
        return stateful

    @cached_property
    def vocabulary(self) -> int | None:
        """The size of the vocabulary, from the checkpoint or from the logits' shapes,
        else None."""
        if self.checkpoint:
            return self.checkpoint.config.vocab_size
        total = 0
        for part, (program, *_) in zip(self.foreign.parts, self.programs):
            types = {}
            for op in program.block.ops:
                types |= dict(op.outputs)
            for name, entry in part.outputs.items():
                if entry.kind == "logits":
                    total += types[name].shape[entry.axes.index("V")] or 0
        return total or None

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the description and every file of the packages."""
        text = self.foreign.model_dump_json()
        for path in dict.fromkeys(map(self.package, self.foreign.parts)):
            text += "".join(map(sha256, _files(path)))
        return hashlib.sha256(text.encode()).hexdigest()

    def shards(self, kind: str) -> list[AdoptedShard]:
        return [shard for shard in self.manifest.shards if shard.kind == kind]

    @cached_property
    def manifest(self) -> SimpleNamespace:
        """The fields of a bundle's manifest that commands read, from packages and
        checkpoint."""
        source, foreign = self.checkpoint, self.foreign
        name = foreign.exporter or self.root.name
        size = 0
        table = foreign.embedding.file and self.path(foreign.embedding.file)
        if table and table.is_file():
            size = table.stat().st_size
        family, hidden, eos = "adopted", 0, []
        if source:
            family, hidden = source.config.model_type, source.config.hidden_size
            name, eos = paths.model_name(source.path), source.eos
        shards = list(map(self._shard, range(len(foreign.parts))))
        options = options_of(foreign, self.stateful)
        return SimpleNamespace(
            family=family,
            checkpoint={"name": name, "sha256": source and source.sha256},
            options=replace(options, compress=self._compress(shards)),
            dims=SimpleNamespace(C=hidden, V=self.vocabulary or MAX_VOCABULARY),
            tokens=SimpleNamespace(bos=None, eos=eos),
            embedding=SimpleNamespace(file=SimpleNamespace(bytes=size)),
            shards=shards,
        )

    def _shard(self, index: int) -> AdoptedShard:
        part, stateful = self.foreign.parts[index], self.stateful
        path = self.package(part)
        kind = "embedding"
        if index in stateful:
            kind = "layers"
        elif index > stateful[-1]:
            kind = "head"
        own, states, layers, shared = [index], {}, set(), False
        if index == stateful[0]:
            own.append(None)
        for entry in self.foreign.states:
            if entry.part in own:
                sizes = dict(zip(entry.axes, self._shape_of(entry.name)))
                shape = [1, sizes["H"], sizes["S"], sizes["D"]]
                for layer, tensor in product(entry.layers, entry.holds):
                    name = f"layers.{layer}.{tensor}_state"
                    states[name] = SimpleNamespace(shape=shape)
                layers.update(entry.layers)
                shared |= entry.part is None
        span = None
        if layers and (len(stateful) == 1 or not shared):
            span = min(layers), max(layers) + 1
        files = []
        for file in _files(path):
            files.append(SimpleNamespace(path=file.name, bytes=file.stat().st_size))
        return AdoptedShard(path.stem, kind, part.package, files, states, span)

    def _compress(self, shards: list[AdoptedShard]) -> str:
        """The preset whose bits per weight are nearest to those of the packages'
        files."""
        elements = stored = 0
        for (program, *_), shard in zip(self.programs, shards):
            constants = [op for op in program.block.walk() if op.constant]
            inner = set().union(*(op.reads() for op in constants))
            for op in constants:
                for name, kind in op.outputs:
                    matrix = kind.dtype.startswith("FLOAT") and len(kind.shape) > 1
                    if matrix and name not in inner:
                        elements += prod(kind.shape)
            for file in shard.files:
                if file.path.endswith(".bin"):
                    stored += 8 * file.bytes
        bits = stored / max(elements, 1)
        return min(PRESETS, key=lambda name: abs(PRESETS[name].stored_bits - bits))

    def _shape_of(self, state: str) -> tuple:
        for programs in self.programs:
            for program in programs:
                if state in program.states:
                    return program.states[state].shape
        raise AssertionError(f"no program has the state {state}")


def _files(package: Path) -> list[Path]:
    return sorted(file for file in package.rglob("*") if file.is_file())


def options_of(foreign: Foreign, parts: list[int] | None = None) -> AdoptedOptions:
    """The options of packages: their context, and the largest call of the `parts` with
    a state (default: of all parts with an input that depends on the position)."""
    placed = {"mask", "write", "start", "end", "positions"}
    tiles = []
    for index, part in enumerate(foreign.parts):
        stateful = bool(placed & {entry.kind for entry in part.inputs.values()})
        if parts:
            stateful = index in parts
        if stateful:
            tiles += map(largest_tile, part.functions)
    return AdoptedOptions(foreign.context, min(max(tiles), foreign.context))


def largest_tile(function: schema.Function) -> int:
    """The most tokens of a gate's call: `t_max`, at most `LARGEST_TILE` if T varies."""
    if function.t_min == function.t_max:
        return function.t_max
    return min(function.t_max, LARGEST_TILE)
