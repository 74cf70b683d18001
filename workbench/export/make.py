"""Every shard of a bundle, made in the cheapest way that gives coremltools' own bytes.

The first shard of each shape is converted; its template is trusted once pressing that same shard gives its bytes, and
its smallest compressed weight is what coremltools' own functions make of it. Then the others are stamped by threads,
which is the work of NumPy, PyTorch and the disk; beside a conversion, which holds the interpreter, both would crawl.
Shards that no template fits are converted too. coremltools itself never runs in two threads.
"""

import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod

import numpy as np

from workbench.bundle import FileEntry, Options, Shard, Writer
from workbench.bundle.manifest import HIDDEN
from workbench.errors import InputError
from workbench.export import build, compress, convert, package, stamp
from workbench.export.shards import Spec
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan


@dataclass
class ShardJob:
    """A shard to be made, and the weights it is made of."""

    spec: Spec
    parts: list[build.WeightSource]
    key: str
    bytes: int  # of weights, as stored


@dataclass
class Form:
    """What one conversion tells about all shards of its shape; `template` is None when it cannot be filled in."""

    spec: Spec
    constants: dict[str, str]  # parameter path → program value that holds it
    modules: dict[str, str]  # program value → module path; layers counted from the shard's first
    template: stamp.Template | None = None


def jobs(specs: list[Spec], source: Checkpoint, plan: Plan, options: Options) -> list[ShardJob]:
    found = []
    for spec in specs:
        parts = build.weight_sources(spec, source, plan, options)
        stored = sum(prod(p.shape) * compress.WEIGHT_BITS[options.compress if p.compressed else "fp16"] // 8 for p in parts)
        found.append(ShardJob(spec, parts, _key(spec, parts, plan), stored))
    return found


def _key(spec: Spec, parts: list[build.WeightSource], plan: Plan) -> str:
    """Equal for shards whose conversions differ in nothing but weights and the names of their states."""
    shapes = [(p.path, p.shape, p.offset, p.compressed) for p in parts]
    layers = [layer.model_dump() for layer in plan.layers[slice(*spec.layers)]] if spec.kind != "expert" else []
    return json.dumps([spec.kind, spec.inputs, spec.outputs, list(spec.buffers.values()), layers, shapes])


@dataclass
class Maker:
    """Makes shards into a writer's folder; `plain` converts each one."""

    source: Checkpoint
    plan: Plan
    options: Options
    writer: Writer
    plain: bool = False
    clock: build.Clock = field(default_factory=build.Clock)
    forms: dict[str, Form] = field(default_factory=dict)
    local: threading.local = field(default_factory=threading.local)

    def convert_first(self, jobs: list[ShardJob], done) -> dict[str, Shard]:
        """Shards by name: those an interrupted export finished, and one conversion for each shape (`plain`: all).

        `done(job)` is called for each.
        """
        made = {}
        for job in jobs:
            shard = self.writer.finished(job.spec.name)
            if shard is None and not self._template_of(job):
                shard = self.convert_and_record(job)
            if shard:
                made[job.spec.name] = shard
                done(job)
        return made

    def stamp_others(self, jobs: list[ShardJob], pool: ThreadPoolExecutor, done) -> dict[str, Shard]:
        """Shards by name, stamped by the threads of `pool`; here, those that could not be stamped are converted."""
        made, waiting = {}, {pool.submit(self._stamp, job): job for job in jobs}
        for future in as_completed(waiting):
            job = waiting[future]
            made[job.spec.name] = self._stamped(job, future.result())
            done(job)
        return made

    def _template_of(self, job: ShardJob) -> stamp.Template | None:
        return None if self.plain or job.key not in self.forms else self.forms[job.key].template

    def _scratch(self) -> build.Scratch:
        if not hasattr(self.local, "scratch"):
            self.local.scratch = build.Scratch()
        return self.local.scratch

    def _stamp(self, job: ShardJob) -> list[FileEntry] | None:
        """Files of the stamped package; None, and no package, when its weights do not fit the template."""
        target = self.writer.root / f"{job.spec.name}.mlpackage"
        return self._press(self._template_of(job), job, target)

    def _press(self, template: stamp.Template, job: ShardJob, target) -> list[FileEntry] | None:
        shutil.rmtree(target, ignore_errors=True)
        try:
            return template.press(job.spec, job.parts, self.source, self.options, target, self._scratch(), self.clock)
        except stamp.TemplateMismatch:
            shutil.rmtree(target)
            return None

    def _stamped(self, job: ShardJob, files: list[FileEntry] | None) -> Shard:
        return self._record(job, self.forms[job.key], files, "stamped") if files else self.convert_and_record(job)

    def stamp_and_record(self, job: ShardJob) -> Shard:
        """Stamps one shard, whose shape has a template, in this thread; converts it if that cannot be."""
        return self._stamped(job, self._stamp(job))

    def convert_and_record(self, job: ShardJob) -> Shard:
        """Converts one shard plainly; the first of its shape becomes the form of the others."""
        target = self.writer.root / f"{job.spec.name}.mlpackage"
        form = self.convert(job, target, self.plain)
        files = package.entries(target)
        if not self.plain and not self._template_of(job):
            form.template = self._template(job, form, target, files)
            self.forms[job.key] = form
        return self._record(job, form, files, "converted")

    def convert(self, job: ShardJob, target, plain: bool) -> Form:
        """Converts one shard with coremltools into the package `target`; `plain`: with nothing of ours in it."""
        compressed = {p.path for p in job.parts if p.compressed}
        with self.clock("template"), ExitStack() as stack:
            module, _ = build.build(job.spec, self.source, self.plan, self.options)
            if not plain:
                stack.enter_context(compress.installed(self.options.compress))
                stack.enter_context(convert.lean())
            model = convert.convert(module, job.spec, self.options, compressed)
            package.save_package(model, target)
        held = convert.constants(model)
        names = {p.path: p.path.replace(".", "_") for p in job.parts}
        return Form(job.spec, {path: held[name] for path, name in names.items() if name in held}, convert.modules(model))

    def _template(self, job: ShardJob, form: Form, target, files: list[FileEntry]) -> stamp.Template | None:
        """The template of a converted shard, if pressing the shard itself gives the same bytes."""
        trial = self.writer.root / f"{job.spec.name}.trial" / target.name
        try:
            template = stamp.Template(job.spec, job.parts, target, form.constants)
            same = self._press(template, job, trial) == files and self._compresses(job)
            return template if same else None
        except stamp.TemplateMismatch:
            return None
        finally:
            shutil.rmtree(trial.parent, ignore_errors=True)

    def _compresses(self, job: ShardJob) -> bool:
        """Whether our compression of the smallest compressed weight is coremltools'."""
        part = min((p for p in job.parts if p.compressed), key=lambda p: prod(p.shape), default=None)
        if part is None or self.options.compress == "fp16":
            return True
        values, peak = build.load_values(part, self.source, self.options, self._scratch())
        ours = compress.stored_arrays(part, values, peak, self.options.compress, self._scratch())
        theirs = compress.reference(part, values, self.options.compress)
        return all(np.array_equal(ours[role], theirs[role]) for role in theirs)

    def _record(self, job: ShardJob, form: Form, files: list[FileEntry], how: str) -> Shard:
        spec, names = job.spec, dict(zip(form.spec.buffers, job.spec.buffers, strict=True))
        modules = {stamp.renamed(value, names): absolute_layer_path(path, spec.layers[0]) for value, path in form.modules.items()}
        held = {p.tensor: p for p in job.parts if p.tensor and p.path in form.constants}
        return self.writer.record(Shard(
            name=spec.name, kind=spec.kind, path=f"{spec.name}.mlpackage", layers=spec.layers, rows=spec.rows,
            inputs=spec.inputs, outputs=spec.outputs, states=spec.states,
            weights={tensor: form.constants[p.path] for tensor, p in held.items()},
            offsets={tensor: p.offset for tensor, p in held.items() if p.offset},
            modules=modules, taps=_taps(modules, spec), how=how, bytes=sum(f.bytes for f in files), files=files))  # fmt: skip

    def verify(self, jobs: list[ShardJob], made: list[Shard], count: int) -> None:
        """Converts `count` random stamped shards again and compares the files.

        Raises:
            InputError: one differs; then no stamped shard is kept for the next run.
        """
        stamped = [job for job, shard in zip(jobs, made, strict=True) if shard.how == "stamped"]
        for job in random.sample(stamped, min(count, len(stamped))):
            again = self.writer.root / f"{job.spec.name}.again" / f"{job.spec.name}.mlpackage"
            self.convert(job, again, plain=True)
            found = self.writer.finished(job.spec.name)
            same = found and package.entries(again) == found.files
            shutil.rmtree(again.parent)
            if not same:
                for other in stamped:
                    self.writer.discard(other.spec.name)
                raise InputError(f"stamped shard {job.spec.name}", "other bytes than its conversion gives", "the same bytes",
                                 "export with --plain, and report this")  # fmt: skip


def absolute_layer_path(path: str, first: int) -> str:
    """`layers.0.mlp` of a shard → the decoder's `layers.{first}.mlp`."""
    head, *rest = path.split(".")
    return ".".join(["layers", str(first + int(rest[0])), *rest[1:]]) if head == "layers" else path


def _taps(values: dict[str, str], spec: Spec) -> dict[int, str]:
    """Layer → name of the value holding its hidden output: the last value that came from its block."""
    if spec.kind != "layers":
        return {}
    last = {}
    for value, path in values.items():
        if path.startswith("layers."):
            last[int(path.split(".")[1])] = value
    return last | {spec.layers[1] - 1: HIDDEN}
