"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run.

Shards of one shape share a program: it is converted once, with placeholder weights.
Then threads write every shard from that program, with the shard's own weights.
coremltools itself never runs in two threads."""

import hashlib
import json
import math
import shutil
import struct
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from pydantic import ValidationError

from miltorch.quiet import coremltools
from workbench import paths
from workbench.bundle import (
    Bundle,
    Embedding,
    FileEntry,
    Layer,
    Manifest,
    Options,
    Shard,
    file_entries,
    new_bundle,
)
from workbench.bundle.manifest import MANIFEST_VERSION, first_fault
from workbench.bundle.names import HIDDEN, MATRIX_STATE, PER_LAYER, split_layer
from workbench.bundle.presets import (
    FP16,
    MIXED,
    REPLACED,
    Preset,
    check_calibrated,
    find_preset,
)
from workbench.errors import InputError
from workbench.exporter.shards import Spec, specs
from workbench.exporter.template import Template, convert_shard
from workbench.exporter.weights import (
    WeightSource,
    all_weights,
    check_shape,
    find_presets,
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

if TYPE_CHECKING:
    from workbench.exporter.calibrate import CompressedMatrices, Text
    from workbench.exporter.mixed import Allocation, Search

    Formats = Mapping[str, str] | Search

MAX_THREADS = 2  # writing is bound by memory and disk: more threads gain little
MATRIX_T_MAX = 8  # most tokens a call where layers keep a matrix


def make_options(**fields) -> Options:
    """Export options from keywords.

    Raises:
        InputError: an unknown option, a value out of range, a preset that is no longer
            exported, options that exclude each other, or that the target's plug-in
            refuses.
    """
    try:
        options = Options(**fields)
    except ValidationError as problem:
        name, error = first_fault(problem, "export options")
        actual, step = repr(error.get("input")), "see: workbench export --help"
        raise InputError(name, actual, error["msg"], step) from None
    if options.compress in REPLACED:
        needed = (
            "tables for groups of rows: one table for a whole tensor costs too much"
        )
        step = f"export with --compress {REPLACED[options.compress]}"
        raise InputError("compress", repr(options.compress), needed, step)
    if options.plugin:
        options.plugin.check(options)
    return options


def export(
    checkpoint: str | Path,
    bundle: str | Path | None = None,
    *,
    calibration: "Text | None" = None,
    formats: "Formats | None" = None,
    **fields,
) -> Bundle:
    """Exports a Hugging Face checkpoint as a bundle.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole
            or sharded).
        bundle: the new folder, which is written as a whole or not at all. By default
            the bundle of this checkpoint and these options in `data/bundles`, which is
            opened if it is there.
        calibration: token ids of a text, with which weights are compressed so that the
            layers' outputs on it change least (see `calibrate`).
        formats: for `compress="mixed"`, the preset of every matrix by its checkpoint
            tensor, or the search that chooses them (see `mixed.Search`).
        fields: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, a target where
            something is already, no space on the disk, a text for fp16, no text for a
            preset that needs one, `mixed` without formats.
    """
    options = make_options(**fields)
    step = "pass calibration=workbench.exporter.calibrate.draw_windows(ids, name)"
    check_calibrated(options.preset, calibration is not None, step)
    if options.preset == FP16 and calibration is not None:
        step = "leave the text out, or choose another --compress"
        raise InputError("--compress fp16", "a text", "no calibration", step)
    check_formats(options, formats)
    source = Checkpoint(paths.find(checkpoint))
    if bundle is None:
        folder = output_root() / "data" / "bundles"
        return bundle_for(source, options, folder, calibration, formats)
    return _export(source, options, Path(bundle), calibration, formats)


def check_formats(options: Options, formats: "Formats | None") -> None:
    """Raises an InputError for `mixed` without formats, for formats without `mixed`, and
    for a preset that no matrix can have."""
    if formats is not None and options.preset != MIXED:
        actual = f"compress = {options.compress}"
        raise InputError("formats", actual, "compress = mixed", "leave formats out")
    if options.preset != MIXED:
        return
    if formats is None:
        raise InputError(
            "--compress mixed",
            "no preset for each matrix",
            "the presets, or a search that chooses them",
            "run: workbench export CHECKPOINT BUNDLE --compress mixed --calibrate TEXT "
            "--max-kl 0.05",
        )
    if not isinstance(formats, Mapping):
        return
    for tensor, name in formats.items():
        subject, step = f"format of {tensor!r}", "choose another one"
        try:
            preset = find_preset(name)
        except ValueError as problem:
            raise InputError(subject, name, str(problem), step) from None
        if preset == MIXED or name in REPLACED:
            raise InputError(subject, name, "a preset of one matrix", step)


def _export(
    source: Checkpoint,
    options: Options,
    bundle: Path,
    calibration: "Text | None" = None,
    formats: "Formats | None" = None,
) -> Bundle:
    coremltools()  # quietly, before a part of it is imported by itself
    plan = read_plan(source, options)
    if isinstance(formats, Mapping):
        check_all_named(source, plan, options, formats)
    try:
        with ExitStack() as stack:
            matrices = allocation = None
            if calibration is not None:
                paths.check_new_bundle(bundle)
                # numba and Hugging Face's models take seconds to import
                from workbench.exporter.calibrate import work_folder

                work = stack.enter_context(work_folder(bundle))
                matrices, allocation = _compress(
                    source, plan, options, calibration, formats, work
                )
            if allocation is not None:
                presets = find_presets(allocation.chosen.formats)
            else:
                presets = find_presets(formats)
            folder = stack.enter_context(new_bundle(bundle))
            manifest = write_bundle(folder, source, plan, options, matrices, presets)
            records = {}
            if calibration is not None:
                weights = all_weights(source, plan, options, presets)
                nearest = matrices.unfitted(weights)
                records["calibration"] = calibration.record(folder, nearest)
            if allocation is not None:
                records["selection"] = allocation.record(folder, formats.text)
            manifest.model_copy(update=records).save(folder)
        return Bundle.open(bundle)
    except OSError as problem:
        reason = f"{problem.strerror or problem} ({problem.filename or bundle})"
        needed = "files that can be read and written"
        step = "correct this, or choose another target"
        raise InputError(f"bundle {bundle}", reason, needed, step) from problem


def _compress(
    source: Checkpoint,
    plan: Plan,
    options: Options,
    calibration: "Text",
    formats: "Formats | None",
    folder: Path,
) -> "tuple[CompressedMatrices, Allocation | None]":
    """Compresses matrices for the inputs that they have on a text. Returns them, and how
    their formats were chosen; None: no search chose them.

    Args:
        formats: see `export`.
        folder: a work folder.
    """
    if formats is None or isinstance(formats, Mapping):
        from workbench.exporter.calibrate import calibrate

        weights = all_weights(source, plan, options, find_presets(formats))
        return calibrate(source, weights, calibration, folder), None
    from workbench.exporter.mixed import choose_formats

    mixture = choose_formats(source, plan, options, calibration, formats, folder)
    return mixture.matrices, mixture.allocation


def bundle_name(
    checkpoint: str,
    identity: str,
    options: Options,
    calibration: "Text | None" = None,
    formats: "Formats | None" = None,
) -> str:
    """The name of a bundle's folder in `data/bundles`: the checkpoint's name and a hash
    of everything that decides the bundle's bytes, except those of its tokenizer."""
    parts = [MANIFEST_VERSION, identity, options.model_dump(), versions(options)]
    if calibration is not None:
        parts += [calibration.sha256, calibration.source, calibration.seed]
    if formats is not None:
        is_chosen = isinstance(formats, Mapping)
        parts.append(dict(formats) if is_chosen else formats.key)
    text = json.dumps(parts, sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(
    checkpoint: Checkpoint,
    options: Options,
    folder: Path,
    calibration: "Text | None" = None,
    formats: "Formats | None" = None,
) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened. A damaged one, and one with another tokenizer than the
    checkpoint's, is exported again, with a warning that states the reason."""
    path = folder / bundle_name(
        checkpoint.name, checkpoint.sha256, options, calibration, formats
    )
    with locked(path.with_name(f".{path.name}.lock")):
        reason = "the checkpoint has another tokenizer now"
        try:
            cached = Bundle.open(path)
            stored = {Path(e.path).name: e.sha256 for e in cached.manifest.tokens.files}
            current = {file.name: sha256(file) for file in checkpoint.tokenizer_files()}
            if stored == current:
                return cached
        except InputError as problem:
            if isinstance(problem.__cause__, OSError):  # unreadable, perhaps whole
                raise
            reason = problem
        if path.exists():
            text = f"the cached bundle {path.name} is exported again: {reason}"
            warnings.warn(text, stacklevel=2)
            shutil.rmtree(path)
        return _export(checkpoint, options, path, calibration, formats)


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint, once `check_options` has accepted the
    options: no weight is read before.

    Raises:
        InputError: a family or configuration that is not supported; see
            `check_options`.
    """
    family = family_of(source.config)
    try:
        plan = family.plan(source.config)
    except ValidationError as problem:
        name, error = first_fault(problem, "config.json")
        actual, step = repr(error.get("input")), "check config.json"
        raise InputError(name, actual, error["msg"], step) from None
    except TypeError as problem:  # null in place of a number
        needed, step = "a number wherever the family reads one", "check config.json"
        raise InputError("config.json", str(problem), needed, step) from problem
    check_options(options, plan)
    return family.settle(plan, source) if hasattr(family, "settle") else plan


def check_options(options: Options, plan: Plan) -> None:
    """Raises an InputError for options that do not apply to a family or to its
    configuration."""
    config = plan.config

    def refuse(actual: str, needed: str, next_step: str) -> NoReturn:
        subject = f"a {config.model_type} checkpoint"
        raise InputError(actual, subject, needed, next_step)

    if options.sliding == "window":
        needed = "mask or ring: only other exporters' packages have such a cache"
        refuse("sliding = window", needed, "leave out --sliding")
    if options.sliding == "ring" and not any(layer.window for layer in plan.layers):
        needed = "a family with sliding attention"
        refuse("sliding = ring", needed, "leave out --sliding")
    if options.moe == "routed" and not plan.experts:
        refuse("moe = routed", "a family with experts", "leave out --moe")
    has_matrix = any(MATRIX_STATE in states for states in plan.side_states)
    if has_matrix and options.t_max > MATRIX_T_MAX:
        needed = (
            f"at most {MATRIX_T_MAX}: fp16 cannot hold what a longer call does to a "
            "matrix state"
        )
        step = f"export with --tokens 1-{MATRIX_T_MAX} or fewer"
        refuse(f"tokens = {options.tokens}", needed, step)
    max_seq_len = f"max_seq_len = {options.max_seq_len}"
    if plan.max_positions and options.max_seq_len > plan.max_positions:
        needed = (
            f"at most {plan.max_positions}, the length beyond which its positions are "
            "scaled"
        )
        refuse(max_seq_len, needed, "export with a smaller --max-seq-len")
    trained = getattr(config, "max_position_embeddings", None)
    if trained and options.max_seq_len > trained:
        needed = f"at most {trained}, the max_position_embeddings of its config.json"
        step = (
            f"export with --max-seq-len {trained} or less; a model that was trained on "
            "longer texts states it there"
        )
        refuse(max_seq_len, needed, step)


def write_bundle(
    folder: Path,
    source: Checkpoint,
    plan: Plan,
    options: Options,
    matrices: "CompressedMatrices | None",
    presets: Mapping[str, Preset],
) -> Manifest:
    """Writes every file of a bundle except its manifest to `folder`; returns the
    manifest.

    Args:
        matrices: those that are compressed already.
        presets: checkpoint tensor → preset, of every matrix of a mixed bundle; empty
            for other bundles.

    Raises:
        InputError: a tensor that is missing or does not fit, no space on the disk.
    """
    shards = [
        (spec, weight_sources(spec, source, plan, options, presets))
        for spec in specs(plan, options)
    ]
    needed = sum(weight.bytes for _, weights in shards for weight in weights)
    needed += 2 * plan.dims.V * (plan.dims.C + plan.dims.L * plan.dims.P)
    check_room(folder, needed, f"bundle in {folder.parent}")
    convert = options.plugin.template if options.plugin else convert_shard
    templates = {}
    # One thread of torch in each thread of the pool: more would only wait for the
    # pool's, and spin meanwhile.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(
        min(threads, MAX_THREADS), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        facts = pool.submit(lambda: source.facts)
        table = pool.submit(write_embedding, source, plan, folder)
        pending = []
        program_keys = [_program_key(spec, plan, weights) for spec, weights in shards]
        total = len(set(program_keys)) + len(shards)
        progress = bar(total=total, desc="export", unit="program", leave=False)
        for (spec, weights), program_key in zip(shards, program_keys):
            if program_key not in templates:
                progress.set_postfix_str(f"converting {spec.name}")
                templates[program_key] = convert(spec, plan, options, weights)
                progress.update()
            arguments = folder, spec, templates[program_key], weights, source, options
            pending.append(pool.submit(_write_shard, *arguments, matrices))
        progress.set_postfix_str("writing")
        entries = []
        for future in pending:
            entries.append(future.result())
            progress.update()
        progress.close()
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
            formats=formats_of(shards, options),
        )
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def check_all_named(
    source: Checkpoint, plan: Plan, options: Options, formats: Mapping[str, str]
) -> None:
    """Raises an InputError unless formats are those of every matrix of a bundle."""
    weights = all_weights(source, plan, options, find_presets(formats))
    matrices = {weight.tensor for weight in weights if weight.is_compressible}
    for tensor in sorted(formats.keys() - matrices):
        needed, step = "the name of a matrix", "choose the formats again"
        raise InputError(f"format of {tensor!r}", "no matrix", needed, step)


def formats_of(
    shards: list[tuple[Spec, list[WeightSource]]], options: Options
) -> dict[str, str]:
    """Checkpoint tensor → name of its preset, for every tensor that a preset could
    compress and that is not stored by the options'."""
    weights = [weight for _, weights in shards for weight in weights if weight.tensor]
    return {
        weight.tensor: weight.preset.name
        for weight in weights
        if weight.is_compressible and weight.preset != options.preset
    }


def versions(options: Options) -> dict[str, str]:
    """Versions of the packages that a bundle's bytes and values depend on, by name."""
    names = ["coremltools", "numpy", "torch", "transformers", "workbench"]
    if options.plugin:
        names += options.plugin.packages
    return {name: version(name) for name in names}


def _program_key(spec: Spec, plan: Plan, weights: list[WeightSource]) -> str:
    """A key of a shard's program. Shards with equal keys have equal programs."""
    layers = [_placed(layer, spec) for layer in plan.layers[slice(*spec.layers)]]
    states = list(spec.states.values())
    parameters = [replace(weight, tensor=None, rows=None) for weight in weights]
    return repr([spec.kind, spec.inputs, spec.outputs, states, layers, parameters])


def _placed(layer: Layer, spec: Spec) -> tuple[Layer, str]:
    """A layer without the number of its source, and where the source is: at a place in
    the shard, or outside."""
    if layer.source is None:
        return layer, ""
    place = layer.source - spec.layers[0]
    where = f"inside the shard, at {place}" if place >= 0 else "outside"
    return layer.model_copy(update={"source": None}), where


def _write_shard(
    folder: Path,
    spec: Spec,
    template: Template,
    weights: list[WeightSource],
    source: Checkpoint,
    options: Options,
    matrices: "CompressedMatrices | None",
) -> Shard:
    """Writes one shard; returns its manifest entry.

    Args:
        matrices: those that are compressed already.
    """
    package = folder / f"{spec.name}{template.suffix}"

    def load(weight: WeightSource) -> dict[str, np.ndarray]:
        arrays = None
        if matrices and weight.tensor and weight.preset != FP16:
            arrays = matrices.arrays(weight)
        return arrays or stored(weight, load_values(weight, source))

    files, places = template.write(package, weights, load)
    first, last = spec.layers
    modules, taps = {}, {}
    # values come in program order: the last one of a layer is its hidden output
    for value, path in template.modules.items():
        layer_in_shard, module = split_layer(path)
        if layer_in_shard is not None:
            layer = first + layer_in_shard
            path = f"layers.{layer}.{module}" if module else f"layers.{layer}"
            taps[layer] = value
        modules[value] = path
    # a plug-in's programs show no inner values
    has_taps = spec.kind == "layers" and not options.plugin
    located = [weight for weight in weights if weight.tensor and weight.path in places]
    return Shard(
        **vars(spec),
        path=package.name,
        template=template.name,
        functions=options.tiling.functions,
        bytes=sum(file.bytes for file in files),
        files=files,
        weights={weight.tensor: places[weight.path] for weight in located},
        offsets={weight.tensor: weight.offset for weight in located if weight.offset},
        modules=modules,
        taps=taps | {last - 1: HIDDEN} if has_taps else {},
    )


def write_embedding(source: Checkpoint, plan: Plan, folder: Path) -> FileEntry:
    """Writes the embedding tables as fp16, and the vectors that are applied to it as
    fp32, to a safetensors file, never holding the table whole in memory."""
    tables, header, end = [], {}, 0
    for key, name in ({"weight": "embed_tokens.weight"} | plan.embedding).items():
        shape, dtype = [plan.dims.C], torch.float32
        if key == "weight":
            shape, dtype = [plan.dims.V, plan.dims.C], torch.float16
        elif key == PER_LAYER:
            shape, dtype = [plan.dims.V, plan.dims.L * plan.dims.P], torch.float16
        weight = WeightSource(key, source.prefix + name, tuple(shape))
        check_shape(weight, source)
        start = end
        end += math.prod(shape) * dtype.itemsize
        stored_dtype = f"F{8 * dtype.itemsize}"
        header[key] = {
            "dtype": stored_dtype,
            "shape": shape,
            "data_offsets": [start, end],
        }
        tables.append((weight, source, dtype))
    path = folder / "embedding.safetensors"
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for table in tables:
            for values in rounded(*table):
                file.write(values.numpy())
    return file_entries(folder, path)[0]
