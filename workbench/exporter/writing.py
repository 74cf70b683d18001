"""Writes the files of a bundle: shards, host tables, tokenizer. `write_bundle` is the
entry.

Shards of one shape share a program: it is converted once, with placeholder weights
(`template.convert_shard`). Then threads write every shard from that program, with the
shard's own weights (`_write_shard`). coremltools itself never runs in two threads."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from workbench.bundle.presets import Preset
from workbench.exporter.shards import Spec, specs
from workbench.exporter.template import Template, convert_shard
from workbench.exporter.weights import (
    Arrays,
    WeightSource,
    check_shape,
    encode_weight,
    iter_values,
    load_values,
    weight_sources,
)
from workbench.files import check_free_space
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.progress import bar, stage

if TYPE_CHECKING:
    from workbench.exporter.calibrate import CompressedMatrices

MAX_THREADS = 2  # writing is bound by memory and disk: more threads gain little


@dataclass(frozen=True)
class PlannedShard:
    """A shard to write, and where the values of its parameters come from."""

    spec: Spec
    weights: list[WeightSource]


def write_bundle(
    folder: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    matrices: "CompressedMatrices | None",
    presets: Mapping[str, Preset],
) -> Manifest:
    """Writes every file of a bundle except its manifest to `folder`; returns the
    manifest.

    Args:
        matrices: the matrices that are fitted to a text; all other values are rounded to
            the nearest. None: there is no text.
        presets: checkpoint tensor → preset, of every matrix of a mixed bundle; empty
            for other bundles.

    Raises:
        InputError: a tensor that is missing or does not fit, no space on the disk.
    """
    planned = [
        PlannedShard(spec, weight_sources(spec, checkpoint, plan, options, presets))
        for spec in specs(plan, options)
    ]
    _check_space(planned, plan, folder)
    # first, so that a damaged one is refused before the shards are written
    tokens = checkpoint.tokens.save(folder)
    with _writing_threads() as pool:
        # each future runs while coremltools converts in this thread
        checkpoint_entry = pool.submit(lambda: checkpoint.manifest_entry)
        embedding_file = pool.submit(write_embedding, checkpoint, plan, folder)
        shards = _write_shards(
            planned, folder, checkpoint, plan, options, matrices, pool
        )
        return Manifest(
            family=checkpoint.config.model_type,
            dims=plan.dims,
            options=options,
            rope=plan.rope,
            layers=plan.layers,
            shards=shards,
            embedding=Embedding(
                file=embedding_file.result(), scale=plan.embedding_scale
            ),
            tokens=tokens,
            checkpoint=checkpoint_entry.result(),
            packages=versions(options),
            residual_exponent=plan.residual_exponent,
            formats=_differing_presets(planned, options),
        )


def _check_space(planned: list[PlannedShard], plan: Plan, folder: Path) -> None:
    """Raises an InputError where the disk has no room for weights and embeddings."""
    needed = sum(weight.bytes for shard in planned for weight in shard.weights)
    needed += 2 * plan.dims.V * (plan.dims.C + plan.dims.L * plan.dims.P)
    check_free_space(folder, needed, f"bundle in {folder.parent}")


@contextmanager
def _writing_threads() -> Iterator[ThreadPoolExecutor]:
    """Context manager that gives a pool of threads that write. Inside it torch uses one
    thread in each of them and in this one: more would only wait for the pool's, and spin
    meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(
        min(threads, MAX_THREADS), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _write_shards(
    planned: list[PlannedShard],
    folder: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    matrices: "CompressedMatrices | None",
    pool: ThreadPoolExecutor,
) -> list[Shard]:
    """Converts each distinct program in this thread, while the threads of `pool` write the
    shards whose programs are converted; returns the manifest's entries."""
    convert = options.plugin.template if options.plugin else convert_shard
    write = partial(
        _write_shard,
        folder=folder,
        checkpoint=checkpoint,
        options=options,
        matrices=matrices,
    )
    templates: dict[str, Any] = {}  # program key → `Template`, or a plug-in's
    futures: list[Future[Shard]] = []
    keys = [_program_key(shard, plan) for shard in planned]
    total = len(set(keys)) + len(planned)
    stage("export: converting programs and writing shards")
    progress = bar(total=total, desc="export", unit="program", leave=False)
    for shard, key in zip(planned, keys):
        if key not in templates:
            progress.set_postfix_str(f"converting {shard.spec.name}")
            templates[key] = convert(shard.spec, plan, options, shard.weights)
            progress.update()
        futures.append(pool.submit(write, shard, templates[key]))
    progress.set_postfix_str("writing")
    entries = []
    for future in futures:
        entries.append(future.result())
        progress.update()
    progress.close()
    return entries


def _differing_presets(planned: list[PlannedShard], options: Options) -> dict[str, str]:
    """`Manifest.formats`: checkpoint tensor → name of its preset, of every compressible
    tensor whose preset is not that of the options."""
    weights = [weight for shard in planned for weight in shard.weights]
    return {
        weight.tensor: weight.preset.name
        for weight in weights
        if weight.tensor and weight.is_compressible and weight.preset != options.preset
    }


def versions(options: Options) -> dict[str, str]:
    """Versions of the packages that a bundle's bytes and values depend on, by name."""
    names = ["coremltools", "numpy", "torch", "transformers", "workbench"]
    if options.plugin:
        names += options.plugin.packages
    return {name: version(name) for name in names}


def _program_key(shard: PlannedShard, plan: Plan) -> str:
    """Everything that decides a shard's program, as text: shards with equal keys have equal
    programs. The numbers of layers and the names of tensors are left out."""
    spec = shard.spec
    layers = [
        _relative_layer(layer, spec) for layer in plan.layers[slice(*spec.layers)]
    ]
    states = list(spec.states.values())
    parameters = [replace(weight, tensor=None, rows=None) for weight in shard.weights]
    return repr([spec.kind, spec.inputs, spec.outputs, states, layers, parameters])


def _relative_layer(layer: Layer, spec: Spec) -> tuple[Layer, str]:
    """A layer without the number of its `Layer.source`, and where that source is: at a place
    in the shard, or outside."""
    if layer.source is None:
        return layer, ""
    place = layer.source - spec.layers[0]
    where = f"inside the shard, at {place}" if place >= 0 else "outside"
    return layer.model_copy(update={"source": None}), where


def _write_shard(
    shard: PlannedShard,
    template: Template,
    *,
    folder: Path,
    checkpoint: Checkpoint,
    options: Options,
    matrices: "CompressedMatrices | None",
) -> Shard:
    """Writes one shard; returns its manifest entry.

    Args:
        template: of the shard's program, this exporter's or a plug-in's.
        matrices: see `write_bundle`.
    """
    spec = shard.spec

    def load_arrays(weight: WeightSource) -> Arrays:
        if matrices is not None and matrices.has(weight):
            return matrices.load(weight)
        return encode_weight(weight, load_values(weight, checkpoint))

    package = folder / f"{spec.name}{template.suffix}"
    files, places = template.write(package, shard.weights, load_arrays)
    first, last = spec.layers
    modules = _number_layers(template.modules, first)
    taps = {}
    # a plug-in's programs show no inner values
    if spec.kind == "layers" and not options.plugin:
        taps = _find_taps(modules) | {last - 1: HIDDEN}
    located = [w for w in shard.weights if w.tensor and w.path in places]
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
        taps=taps,
    )


def _number_layers(modules: dict[str, str], first: int) -> dict[str, str]:
    """Program value → module path, with the numbers of the model's layers in place of
    those in the shard, whose first layer is `first`."""
    numbered = {}
    for value, path in modules.items():
        layer_in_shard, module = split_layer(path)
        if layer_in_shard is not None:
            layer = f"layers.{first + layer_in_shard}"
            path = f"{layer}.{module}" if module else layer
        numbered[value] = path
    return numbered


def _find_taps(modules: dict[str, str]) -> dict[int, str]:
    """Layer → the value that holds its hidden output: the last one of the layer, since
    values come in the order of the program."""
    taps = {}
    for value, path in modules.items():
        layer, _ = split_layer(path)
        if layer is not None:
            taps[layer] = value
    return taps


def write_embedding(checkpoint: Checkpoint, plan: Plan, folder: Path) -> FileEntry:
    """Writes the tables and vectors that the host computes embeddings with to a safetensors
    file, never holding a table whole in memory."""
    tensors = _embedding_tensors(checkpoint, plan)
    header = {}
    end = 0
    for weight, dtype in tensors:
        start = end
        end += math.prod(weight.shape) * dtype.itemsize
        header[weight.path] = {
            "dtype": f"F{8 * dtype.itemsize}",
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
    path = folder / "embedding.safetensors"
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight, dtype in tensors:
            for values in iter_values(weight, checkpoint, dtype):
                file.write(values.numpy())
    return file_entries(folder, path)[0]


def _embedding_tensors(
    checkpoint: Checkpoint, plan: Plan
) -> list[tuple[WeightSource, torch.dtype]]:
    """The tensors of the embedding file by their keys (`WeightSource.path`), and the dtypes
    in which they are stored: fp16 for tables, fp32 for vectors.

    Raises:
        InputError: a tensor that is missing or has another size.
    """
    dims = plan.dims
    tables = {"weight": (dims.V, dims.C), PER_LAYER: (dims.V, dims.L * dims.P)}
    tensors = []
    for key, name in ({"weight": "embed_tokens.weight"} | plan.embedding).items():
        if key in tables:
            shape, dtype = tables[key], torch.float16
        else:
            shape, dtype = (dims.C,), torch.float32
        weight = WeightSource(key, checkpoint.prefix + name, shape)
        check_shape(weight, checkpoint)
        tensors.append((weight, dtype))
    return tensors
