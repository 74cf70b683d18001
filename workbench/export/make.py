"""Makes every shard of a bundle in the cheapest way that gives coremltools' own bytes.

The first shard of each shape is converted. Its template is used only if refilling it
reproduces the converted shard byte for byte, and if its smallest compressed weight is
what coremltools' own functions give. Then threads stamp the others with NumPy, PyTorch
and file writes. They start after the conversions, which hold the interpreter lock.
Shards that fit no template are converted too. coremltools itself never runs in two
threads."""

import random
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch

from workbench.bundle import FileEntry, Options, Shard, Writer, file_entries
from workbench.bundle.names import HIDDEN, split_layer
from workbench.errors import InputError
from workbench.export import compress, convert, package
from workbench.export.shards import Spec, specs
from workbench.export.template import Template, TemplateMismatch, renamed
from workbench.export.weights import (
    Clock,
    Scratch,
    WeightSource,
    build,
    load_values,
    weight_sources,
)
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan


@dataclass
class Maker:
    """Makes the shards of a model in a writer's folder; `plain` converts each one."""

    source: Checkpoint
    plan: Plan
    options: Options
    writer: Writer
    plain: bool = False
    clock: Clock = field(default_factory=Clock)
    suffix = ".mlpackage"

    def __post_init__(self):
        self.scratch = Scratch()
        self.specs = list(specs(self.plan, self.options))
        self.weights: dict[str, list[WeightSource]] = {}
        for spec in self.specs:
            weights = weight_sources(spec, self.source, self.plan, self.options)
            self.weights[spec.name] = weights
        self.templates: dict[str, Template] = {}  # by `_shape`

    def stored_bytes(self, name: str) -> int:
        """Bytes of a shard's weights as stored."""
        count = 0
        for weight in self.weights[name]:
            count += prod(weight.shape) * weight.preset.bits // 8
        return count

    def room(self) -> tuple[int, int]:
        """Bytes that the shards which are still missing will take, and those of the
        largest of them."""
        noted = {path.stem for path in self.writer.root.glob("*.json")}
        sizes = [self.stored_bytes(name) for name in self.weights.keys() - noted]
        return sum(sizes), max(sizes, default=0)

    def convert_first(self) -> Iterator[Shard]:
        """The shards that an interrupted export finished, and one conversion for each
        shape (`plain`: all)."""
        for spec in self.specs:
            shard = self.writer.finished(spec.name)
            if shard or self._shape(spec) not in self.templates:
                yield shard or self.convert(spec)

    def stamp_all(
        self, others: Iterable[Spec], pool: ThreadPoolExecutor
    ) -> Iterator[Shard]:
        """Shards stamped by the threads of `pool`; those that fit no template are
        converted in this thread."""
        stamps = {pool.submit(self.stamp, spec): spec for spec in others}
        for stamp in as_completed(stamps):
            yield stamp.result() or self.convert(stamps[stamp])

    def stamp(self, spec: Spec) -> Shard | None:
        """Stamps and records a shard whose shape has a template. Returns None, and
        leaves no package, if its weights do not fit the template."""
        template = self.templates[self._shape(spec)]
        try:
            files = self._press(template, spec, self.writer.root)
        except TemplateMismatch:
            return None
        names = template.state_names(spec)
        modules = {}
        for value, path in template.modules.items():
            modules[renamed(value, names)] = path
        return self._record(spec, template.constants, modules, files, "stamped")

    def convert(self, spec: Spec) -> Shard:
        """Converts and records a shard; the first of its shape becomes the template of
        the others."""
        constants, modules = self._convert(spec, self.writer.root, self.plain)
        files = self._files(spec, self.writer.root)
        if not self.plain and self._shape(spec) not in self.templates:
            self._try_template(spec, constants, modules, files)
        return self._record(spec, constants, modules, files, "converted")

    def verify(self, shards: list[Shard], count: int) -> None:
        """Converts `count` random stamped shards again and compares the files.

        Raises:
            InputError: one differs; then no stamped shard is left for the next run.
        """
        stamped = {shard.name for shard in shards if shard.how == "stamped"}
        specs = [spec for spec in self.specs if spec.name in stamped]
        for spec in random.sample(specs, min(count, len(specs))):
            folder = self.writer.root / f"{spec.name}.again"
            self._convert(spec, folder, plain=True)
            shard = self.writer.finished(spec.name)
            files = self._files(spec, folder)
            shutil.rmtree(folder)
            if not shard or shard.files != files:
                for name in stamped:
                    self.writer.discard(name)
                raise InputError(
                    f"stamped shard {spec.name}",
                    "other bytes than its conversion gives",
                    "the same bytes",
                    "export with --plain, and report this",
                )

    def _shape(self, spec: Spec) -> str:
        """Equal for shards whose conversions differ in nothing but weights and the
        names of their states."""
        facts = [spec.kind, spec.inputs, spec.outputs, list(spec.buffers.values())]
        if spec.kind != "expert":
            facts.append(self.plan.layers[slice(*spec.layers)])
        for weight in self.weights[spec.name]:
            facts += weight.path, weight.shape, weight.offset, weight.compressed
        return repr(facts)

    def _package(self, spec: Spec, folder: Path) -> Path:
        return folder / f"{spec.name}{self.suffix}"

    def _files(self, spec: Spec, folder: Path) -> list[FileEntry]:
        """Manifest entries of a shard's files, read back."""
        return file_entries(folder, self._package(spec, folder))

    def _convert(
        self, spec: Spec, folder: Path, plain: bool
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Converts a shard with coremltools into `folder`; `plain`: by its own code
        alone, if with its exact k-means.

        Returns (parameter path → program value that holds it, program value → module
        path)."""
        weights = self.weights[spec.name]
        with self.clock("template"), ExitStack() as stack:
            module, _ = build(spec, self.source, self.plan, self.options)
            stack.enter_context(compress.exact_tables())
            if not plain:
                stack.enter_context(compress.installed(self.options.preset))
                stack.enter_context(convert.lean())
            compressed = {w.path for w in weights if w.compressed}
            whole = self._package(spec, folder)
            programs = {}
            constants = {}
            modules = {}
            for name, T in (self.options.function_names or {"main": None}).items():
                model = convert.convert(module, spec, self.options, compressed, T)
                programs[name] = whole
                if T:
                    alone = f"{spec.name}.{name}.mlpackage"
                    programs[name] = whole.with_name(alone)
                package.save_package(model, programs[name])
                constants |= convert.constants(model)
                modules |= convert.modules(model)
            if self.options.functions:
                del model
                convert.save_functions(programs, whole)
                for program in programs.values():
                    shutil.rmtree(program)
        by_path = {}
        for weight in weights:
            name = weight.path.replace(".", "_")
            if name in constants:
                by_path[weight.path] = constants[name]
        return by_path, modules

    def _press(self, template: Template, spec: Spec, folder: Path) -> list[FileEntry]:
        return template.press(
            spec,
            self.weights[spec.name],
            self._load,
            self._package(spec, folder),
            self.clock,
        )

    def _load(self, weight: WeightSource) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """fp16 values of a weight and, by role, the arrays that are stored for it."""
        with self.clock("read"):
            values, peak = load_values(weight, self.source, self.scratch)
        with self.clock("compress"):
            return values, compress.stored_arrays(weight, values, peak, self.scratch)

    def _try_template(
        self, spec: Spec, constants: dict, modules: dict, files: list[FileEntry]
    ) -> None:
        """Makes a converted shard the template of its shape, if stamping the shard
        itself gives the same bytes."""
        trial = self.writer.root / f"{spec.name}.trial"
        weights = self.weights[spec.name]
        whole = self._package(spec, self.writer.root)
        try:
            template = Template(spec, weights, whole, constants, modules)
            same = self._press(template, spec, trial) == files
            if same and self._compresses_alike(spec):
                self.templates[self._shape(spec)] = template
        except TemplateMismatch:
            pass
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    def _compresses_alike(self, spec: Spec) -> bool:
        """Whether `stored_arrays` gives the bytes of coremltools' own functions for the
        smallest compressed weight."""
        compressed = [w for w in self.weights[spec.name] if w.compressed]
        if not compressed:
            return True
        weight = min(compressed, key=lambda w: prod(w.shape))
        values, arrays = self._load(weight)
        reference = compress.reference(weight, values)
        return all(np.array_equal(arrays[role], reference[role]) for role in reference)

    def _record(
        self,
        spec: Spec,
        constants: dict,
        modules: dict,
        files: list[FileEntry],
        how: str,
    ) -> Shard:
        paths = {}
        for value, path in modules.items():
            paths[value] = absolute_layer_path(path, spec.layers[0])
        taps = {}
        if self.suffix == ".mlpackage":
            taps = _taps(paths, spec)
        weights = {}
        offsets = {}
        for weight in self.weights[spec.name]:
            if weight.tensor and weight.path in constants:
                weights[weight.tensor] = constants[weight.path]
                if weight.offset:
                    offsets[weight.tensor] = weight.offset
        interface = dict(vars(spec))
        del interface["buffers"]
        return self.writer.record(
            Shard(
                **interface,
                path=f"{spec.name}{self.suffix}",
                how=how,
                functions=self.options.function_names,
                bytes=sum(file.bytes for file in files),
                files=files,
                weights=weights,
                offsets=offsets,
                modules=paths,
                taps=taps,
            )
        )


def absolute_layer_path(path: str, first: int) -> str:
    """`layers.0.mlp` of a shard → the decoder's `layers.{first}.mlp`."""
    index, rest = split_layer(path)
    if index is None:
        return path
    return f"layers.{first + index}.{rest}".rstrip(".")


def _taps(modules: dict[str, str], spec: Spec) -> dict[int, str]:
    """Layer → name of the value holding its hidden output: the last value that came
    from its block."""
    if spec.kind != "layers":
        return {}
    taps = {}
    for value, path in modules.items():
        layer, _ = split_layer(path)
        if layer is not None:
            taps[layer] = value
    return taps | {spec.layers[1] - 1: HIDDEN}
