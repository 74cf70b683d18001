"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run.

Each shape of shard is converted once, with placeholder weights. Then threads write
every shard from the program of its shape, with the shard's own weights. coremltools
itself never runs in two threads."""

import hashlib
import json
import math
import shutil
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import ValidationError

from miltorch.quiet import coremltools
from workbench import paths
from workbench.bundle import (
    Bundle,
    Embedding,
    FileEntry,
    Manifest,
    Options,
    Shard,
    file_entries,
    new_bundle,
)
from workbench.bundle.manifest import MANIFEST_VERSION, first_fault
from workbench.bundle.names import HIDDEN, MATRIX_STATE, split_layer
from workbench.errors import InputError
from workbench.exporter.shards import Spec, specs
from workbench.exporter.template import Template
from workbench.exporter.weights import (
    WeightSource,
    check_shape,
    load_values,
    rounded,
    stored,
    weight_sources,
)
from workbench.files import check_room, locked, output_root, sha256
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.progress import bar

MAX_THREADS = 2  # writing is bound by memory and disk: more gain little
MATRIX_T_MAX = 8  # most tokens a call where layers keep a matrix


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused
    by name."""
    try:
        settings = Options(**chosen)
    except ValidationError as problem:
        name, error = first_fault(problem, "export options")
        found, step = repr(error.get("input")), "see: workbench export --help"
        raise InputError(name, found, error["msg"], step) from None
    if settings.plugin:
        settings.plugin.check(settings)
    return settings


def export(
    checkpoint: str | Path, bundle: str | Path | None = None, **chosen
) -> Bundle:
    """Exports the Hugging Face folder `checkpoint` to the new folder `bundle`, or opens
    the bundle of that checkpoint and these options in `data/bundles`, where it is
    exported if it is missing.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole
            or sharded).
        bundle: where the bundle shall be; it is there as a whole or not at all.
        chosen: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, target that is
            taken, no room on the disk.
    """
    settings = options(**chosen)
    source = Checkpoint(paths.find(checkpoint))
    if bundle is None:
        return bundle_for(source, settings, output_root() / "data" / "bundles")
    return _export(source, settings, Path(bundle))


def _export(source: Checkpoint, options: Options, bundle: Path) -> Bundle:
    coremltools()  # quietly, before a part of it is imported by itself
    plan = read_plan(source, options)
    try:
        with new_bundle(bundle) as folder:
            write_bundle(folder, source, plan, options).save(folder)
        return Bundle.open(bundle)
    except OSError as problem:
        reason = f"{problem.strerror or problem} ({problem.filename or bundle})"
        needed = "files that can be read and written"
        step = "correct this, or choose another target"
        raise InputError(f"bundle {bundle}", reason, needed, step) from problem


def bundle_name(checkpoint: str, identity: str, options: Options) -> str:
    """Checkpoint and a hash of everything that decides a bundle's bytes but its
    tokenizer's."""
    parts = [MANIFEST_VERSION, identity, options.model_dump(), versions(options)]
    text = json.dumps(parts, sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(checkpoint: Checkpoint, options: Options, folder: Path) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened; a damaged one is exported again, with a warning that
    has the reason."""
    path = folder / bundle_name(checkpoint.name, checkpoint.sha256, options)
    with locked(path.with_name(f".{path.name}.lock")):
        reason = "the checkpoint has another tokenizer now"
        try:
            made = Bundle.open(path)
            held = {Path(e.path).name: e.sha256 for e in made.manifest.tokens.files}
            own = {file.name: sha256(file) for file in checkpoint.tokenizer_files()}
            if held == own:
                return made
        except InputError as problem:
            if isinstance(problem.__cause__, OSError):  # it may be whole
                raise
            reason = problem
        if path.exists():
            text = f"the cached bundle {path.name} is exported again: {reason}"
            warnings.warn(text, stacklevel=2)
            shutil.rmtree(path)
        return _export(checkpoint, options, path)


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint. Raises an InputError for options that do not
    apply to the family."""
    family = family_of(source.config)
    try:
        plan = family.plan(source.config)
    except ValidationError as problem:
        name, error = first_fault(problem, "config.json")
        found, step = repr(error.get("input")), "check config.json"
        raise InputError(name, found, error["msg"], step) from None
    except TypeError as problem:  # null in place of a number
        needed, step = "a number wherever the family reads one", "check config.json"
        raise InputError("config.json", str(problem), needed, step) from problem
    windows = any(layer.window for layer in plan.layers)
    matrices = any(MATRIX_STATE in states for states in plan.side_states)
    scaled = plan.max_positions or options.max_seq_len
    trained = getattr(source.config, "max_position_embeddings", None)
    if options.sliding == "window":
        found, step = "sliding = window", "leave out --sliding"
        needed = "mask or ring: only other exporters' packages have such a cache"
    elif options.sliding == "ring" and not windows:
        found, step = "sliding = ring", "leave out --sliding"
        needed = "a family with sliding attention"
    elif options.moe == "routed" and not plan.experts:
        found, step = "moe = routed", "leave out --moe"
        needed = "a family with experts"
    elif options.t_max > MATRIX_T_MAX and matrices:
        found = f"tokens = {options.tokens}"
        needed = f"at most {MATRIX_T_MAX}: fp16 cannot hold what more do to a matrix"
        step = f"export with --tokens 1-{MATRIX_T_MAX} or fewer"
    elif options.max_seq_len > scaled:
        found = f"max_seq_len = {options.max_seq_len}"
        needed = f"at most {scaled}, the length beyond which its positions are scaled"
        step = "export with a smaller --max-seq-len"
    elif trained and options.max_seq_len > trained:
        found = f"max_seq_len = {options.max_seq_len}"
        needed = f"at most {trained}, the max_position_embeddings of its config.json"
        step = (
            f"export with --max-seq-len {trained} or less; a model that was trained on "
            "longer texts states it there"
        )
    else:
        return family.settle(plan, source) if hasattr(family, "settle") else plan
    raise InputError(found, f"a {source.config.model_type} checkpoint", needed, step)


def write_bundle(
    folder: Path, source: Checkpoint, plan: Plan, options: Options
) -> Manifest:
    """Writes every file of a bundle to `folder` but its manifest, which it returns.

    Raises:
        InputError: a tensor that is missing or does not fit, no room on the disk.
    """
    shards = [
        (s, weight_sources(s, source, plan, options)) for s in specs(plan, options)
    ]
    needed = sum(weight.bytes for _, weights in shards for weight in weights)
    needed += 2 * math.prod(source.shape(source.prefix + "embed_tokens.weight"))
    check_room(folder, needed, f"bundle in {folder.parent}")
    convert = options.plugin.template if options.plugin else Template
    templates = {}
    # torch in one thread in each: more would only wait for these, and spin meanwhile
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}
    pool = ThreadPoolExecutor(min(threads, MAX_THREADS), **alone)
    try:
        facts = pool.submit(lambda: source.facts)
        table = pool.submit(write_embedding, source, plan, folder)
        written = []
        shapes = [_shape(spec, plan, weights) for spec, weights in shards]
        total = len(set(shapes)) + len(shards)
        about = {"desc": "export", "unit": "program", "leave": False}
        shown = bar(total=total, **about)
        for (spec, weights), shape in zip(shards, shapes):
            if shape not in templates:
                shown.set_postfix_str(f"converting {spec.name}")
                templates[shape] = convert(spec, plan, options, weights)
                shown.update()
            part = folder, spec, templates[shape], weights, source, options
            written.append(pool.submit(_write_shard, *part))
        shown.set_postfix_str("writing")
        entries = []
        for one in written:
            entries.append(one.result())
            shown.update()
        shown.close()
        return Manifest(
            family=source.config.model_type,
            dims=plan.dims,
            options=options,
            rope=plan.rope,
            layers=plan.layers,
            shards=entries,
            embedding=Embedding(file=table.result(), scale=plan.embedding_scale),
            tokens=source.save_tokenizer(folder),
            checkpoint=facts.result(),
            packages=versions(options),
            residual_exponent=plan.residual_exponent,
        )
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def versions(options: Options) -> dict[str, str]:
    """Versions of the packages that a bundle's bytes and values depend on, by name."""
    names = ["coremltools", "numpy", "torch", "transformers", "workbench"]
    if options.plugin:
        names += options.plugin.packages
    return {name: version(name) for name in names}


def _shape(spec: Spec, plan: Plan, weights: list[WeightSource]) -> str:
    """Equal for shards whose programs are equal."""
    layers = plan.layers[slice(*spec.layers)]
    states = list(spec.states.values())
    held = [replace(weight, tensor=None, rows=None) for weight in weights]
    return repr([spec.kind, spec.inputs, spec.outputs, states, layers, held])


def _write_shard(
    folder: Path,
    spec: Spec,
    template: Template,
    weights: list[WeightSource],
    source: Checkpoint,
    options: Options,
) -> Shard:
    """Writes one shard; returns its manifest entry."""
    package = folder / f"{spec.name}{template.suffix}"
    files, places = template.write(
        package, weights, lambda weight: stored(weight, load_values(weight, source))
    )
    first, last = spec.layers
    modules, taps = {}, {}
    for value, path in template.modules.items():
        index, rest = split_layer(path)
        if index is not None:  # `layers.0.mlp` of a shard → `layers.{first}.mlp`
            path = f"layers.{first + index}.{rest}".rstrip(".")
            taps[first + index] = value
        modules[value] = path
    # programs of a plug-in show no inner values
    shown = spec.kind == "layers" and not options.plugin
    held = [weight for weight in weights if weight.tensor and weight.path in places]
    return Shard(
        **vars(spec),
        path=package.name,
        template=template.name,
        functions=options.functions,
        bytes=sum(file.bytes for file in files),
        files=files,
        weights={weight.tensor: places[weight.path] for weight in held},
        offsets={weight.tensor: weight.offset for weight in held if weight.offset},
        modules=modules,
        taps=taps | {last - 1: HIDDEN} if shown else {},
    )


def write_embedding(source: Checkpoint, plan: Plan, folder: Path) -> FileEntry:
    """The embedding table as fp16 (and what is applied to it, fp32) in a safetensors
    file, never whole in memory."""
    tables, header, end = [], {}, 0
    for key, name in ({"weight": "embed_tokens.weight"} | plan.embedding).items():
        dtype = torch.float16 if key == "weight" else torch.float32
        shape = [plan.dims.V, plan.dims.C][-1 if key != "weight" else 0 :]
        weight = WeightSource(key, source.prefix + name, tuple(shape))
        check_shape(weight, source)
        start = end
        end += math.prod(shape) * dtype.itemsize
        kind = f"F{8 * dtype.itemsize}"
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        tables.append((weight, source, dtype))
    path = folder / "embedding.safetensors"
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for table in tables:
            for values in rounded(*table):
                file.write(values.numpy())
    return file_entries(folder, path)[0]
