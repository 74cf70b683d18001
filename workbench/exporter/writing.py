"""Writes the files of a bundle: shards, host tables, tokenizer.

Shards of one shape share a program: it is converted once, with placeholder weights.
Then threads write every shard from that program, with the shard's own weights.
coremltools itself never runs in two threads."""

import json
import math
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from workbench.bundle import (
    Embedding,
    FileEntry,
    Layer,
    Manifest,
    Options,
    Shard,
    file_entries,
)
from workbench.bundle.names import HIDDEN, PER_LAYER, split_layer
from workbench.bundle.presets import FP16, Preset
from workbench.exporter.shards import Spec, specs
from workbench.exporter.template import Template, convert_shard
from workbench.exporter.weights import (
    WeightSource,
    check_shape,
    load_values,
    rounded,
    stored,
    weight_sources,
)
from workbench.files import check_free_space
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.progress import bar, stage

if TYPE_CHECKING:
    from workbench.exporter.calibrate import CompressedMatrices

MAX_THREADS = 2  # writing is bound by memory and disk: more threads gain little


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
    check_free_space(folder, needed, f"bundle in {folder.parent}")
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
        # each future runs while coremltools converts in this thread
        checkpoint_facts = pool.submit(lambda: source.facts)
        embedding_file = pool.submit(write_embedding, source, plan, folder)
        shard_entries = []
        program_keys = [_program_key(spec, plan, weights) for spec, weights in shards]
        total = len(set(program_keys)) + len(shards)
        stage("export: converting programs and writing shards")
        progress = bar(total=total, desc="export", unit="program", leave=False)
        for (spec, weights), program_key in zip(shards, program_keys):
            if program_key not in templates:
                progress.set_postfix_str(f"converting {spec.name}")
                templates[program_key] = convert(spec, plan, options, weights)
                progress.update()
            entry = pool.submit(
                _write_shard,
                folder,
                spec,
                templates[program_key],
                weights,
                source,
                options,
                matrices,
            )
            shard_entries.append(entry)
        progress.set_postfix_str("writing")
        entries = []
        for future in shard_entries:
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
            embedding=Embedding(
                file=embedding_file.result(), scale=plan.embedding_scale
            ),
            tokens=source.save_tokenizer(folder),
            checkpoint=checkpoint_facts.result(),
            packages=versions(options),
            residual_exponent=plan.residual_exponent,
            formats=formats_of(shards, options),
        )
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


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
    tables: list[tuple[WeightSource, torch.dtype]] = []
    header, end = {}, 0
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
        tables.append((weight, dtype))
    path = folder / "embedding.safetensors"
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight, dtype in tables:
            for values in rounded(weight, source, dtype):
                file.write(values.numpy())
    return file_entries(folder, path)[0]
