"""Writes the files of a bundle.

Each shape of shard is converted once, with placeholder weights. Then threads write
every shard from the program of its shape, with the shard's own weights. coremltools
itself never runs in two threads."""

import json
import math
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm

from workbench.bundle import (
    Embedding,
    FileEntry,
    Manifest,
    Options,
    Shard,
    Tokens,
    Writer,
    file_entries,
)
from workbench.bundle.names import HIDDEN, split_layer
from workbench.errors import InputError
from workbench.export import compress
from workbench.export.convert import to_template
from workbench.export.shards import Spec, specs
from workbench.export.template import Template
from workbench.export.weights import Scratch, WeightSource, check_shapes, weight_sources
from workbench.files import check_room
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

MAX_THREADS = 2  # writing is bound by memory and disk: more gain little


def write_bundle(
    writer: Writer,
    source: Checkpoint,
    plan: Plan,
    settings: Options,
    packages: dict[str, str],
    progress: bool,
) -> Manifest:
    """Writes every file of a bundle but its manifest, which it returns.

    Raises:
        InputError: a tensor that is missing or does not fit, no room on the disk.
    """
    shards = list(specs(plan, settings))
    weights = {s.name: weight_sources(s, source, plan, settings) for s in shards}
    for sources in weights.values():
        check_shapes(sources, source)
    _warn_widths(shards)
    folder = writer.root
    _check_room(writer, source, settings, weights)
    shape = {spec.name: _shape(spec, plan, weights[spec.name]) for spec in shards}
    convert = settings.plugin.template if settings.plugin else to_template
    templates: dict[str, Template] = {}
    scratch = Scratch()

    def write(spec: Spec) -> Shard:
        template = templates[shape[spec.name]]
        load = partial(compress.stored, source=source, scratch=scratch)
        package = folder / f"{spec.name}{template.suffix}"
        files, constants = template.write(package, weights[spec.name], load)
        return _entry(spec, template, settings, weights[spec.name], files, constants)

    size = {name: _stored_bytes(sources) for name, sources in weights.items()}
    bar = tqdm(
        total=sum(size.values()),
        desc="export",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, own_threads() as pool:
        digest = pool.submit(lambda: source.sha256)
        for spec in shards:
            if shape[spec.name] not in templates:
                sources = weights[spec.name]
                template = convert(spec, plan, settings, sources)
                templates[shape[spec.name]] = template
        table = pool.submit(_write_embedding, source, plan, folder)
        written = {pool.submit(write, spec): spec.name for spec in shards}
        finished = {}
        for shard in as_completed(written):
            finished[written[shard]] = shard.result()
            bar.update(size[written[shard]])
        embedding = Embedding(file=table.result(), scale=plan.embedding_scale)
    tokenizer = _copy_tokenizer(source, folder)
    return Manifest(
        family=source.config.model_type,
        dims=plan.dims,
        options=settings,
        rope=plan.rope,
        layers=plan.layers,
        shards=[finished[spec.name] for spec in shards],
        embedding=embedding,
        tokens=Tokens(bos=source.config.bos_token_id, eos=source.eos, files=tokenizer),
        checkpoint={
            "name": source.name,
            "sha256": digest.result(),
            "dtype": source.dtype,
        },
        packages=packages,
        residual_exponent=plan.residual_exponent,
    )


@contextmanager
def own_threads() -> Iterator[ThreadPoolExecutor]:
    """Context manager of a pool of as many threads as torch may use (`OMP_NUM_THREADS`,
    by default the cores), at most `MAX_THREADS`. Torch runs in one thread in each of
    them and in the caller: more would only wait for these, and spin meanwhile."""
    count = torch.get_num_threads()
    alone = partial(torch.set_num_threads, 1)
    alone()
    try:
        with ThreadPoolExecutor(min(count, MAX_THREADS), initializer=alone) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(count)


def _shape(spec: Spec, plan: Plan, weights: list[WeightSource]) -> str:
    """Equal for shards whose programs are equal."""
    facts = [spec.kind, spec.inputs, spec.outputs, spec.buffers]
    if spec.kind != "expert":
        facts.append(plan.layers[slice(*spec.layers)])
    for weight in weights:
        facts += weight.path, weight.shape, weight.offset, weight.compressed
    return repr(facts)


def _entry(
    spec: Spec,
    template: Template,
    settings: Options,
    weights: list[WeightSource],
    files: list[FileEntry],
    constants: dict[str, str],
) -> Shard:
    """The manifest entry of a shard that was written from a template.

    Args:
        constants: parameter path → what the manifest calls the constant's place.
    """
    first, last = spec.layers
    modules = {}
    for value, path in template.modules.items():
        index, rest = split_layer(path)
        if index is not None:  # `layers.0.mlp` of a shard → `layers.{first}.mlp`
            path = f"layers.{first + index}.{rest}".rstrip(".")
        modules[value] = path
    taps = {}
    if template.taps and spec.kind == "layers":
        taps = {first + index: value for index, value in template.taps.items()}
        taps |= {last - 1: HIDDEN}
    interface = dict(vars(spec))
    del interface["buffers"]
    tensors = {w.tensor: w for w in weights if w.tensor and w.path in constants}
    return Shard(
        **interface,
        path=f"{spec.name}{template.suffix}",
        template=template.name,
        functions=settings.functions,
        bytes=sum(file.bytes for file in files),
        files=files,
        weights={name: constants[w.path] for name, w in tensors.items()},
        offsets={name: w.offset for name, w in tensors.items() if w.offset},
        modules=modules,
        taps=taps,
    )


def _stored_bytes(weights: list[WeightSource]) -> int:
    return sum(math.prod(w.shape) * w.preset.bits // 8 for w in weights)


def _check_room(
    writer: Writer,
    source: Checkpoint,
    settings: Options,
    weights: dict[str, list[WeightSource]],
) -> None:
    """Raises an InputError if the disk lacks room for the bundle, or for the converted
    programs of its largest shard where temporary files are."""
    sizes = [_stored_bytes(sources) for sources in weights.values()]
    embedding = 2 * math.prod(source.shape(source.prefix + "embed_tokens.weight"))
    subject = f"bundle {writer.target}"
    check_room(writer.root, sum(sizes) + embedding, subject)
    programs = max(sizes) * (2 + len(settings.functions))
    check_room(Path(tempfile.gettempdir()), programs, f"{subject}, temporary files")


def _warn_widths(shards: list[Spec]) -> None:
    shapes = [shape for spec in shards for shape in spec.buffers.values()]
    odd = sorted({shape[-1] for shape in shapes if shape[-1] % 32})
    if odd:
        warnings.warn(
            f"states of width {', '.join(map(str, odd))}, no multiple of 32, "
            "failed on the Neural Engine "
            "(rule K2, CT#2631); the portable runtime takes them",
            stacklevel=4,
        )


def _write_embedding(source: Checkpoint, plan: Plan, folder: Path) -> FileEntry:
    """The embedding table as fp16 (and what is applied to it, fp32) in a safetensors
    file, never whole in memory."""
    names = {"weight": "embed_tokens.weight"} | plan.embedding
    names = {key: source.prefix + name for key, name in names.items()}
    dtypes = dict.fromkeys(names, torch.float32) | {"weight": torch.float16}
    header = {}
    end = 0
    for key, name in names.items():
        start = end
        shape = source.shape(name)
        width = dtypes[key].itemsize
        end += math.prod(shape) * width
        header[key] = {
            "dtype": f"F{8 * width}",
            "shape": shape,
            "data_offsets": [start, end],
        }
    path = folder / "embedding.safetensors"
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, name in names.items():
            for chunk in source.chunks(name):
                values = chunk.to(dtypes[key])
                if not values.isfinite().all():
                    raise InputError(
                        f"tensor {name}",
                        "values beyond fp16",
                        "finite fp16 values",
                        "export a checkpoint whose weights fp16 can hold",
                    )
                file.write(values.numpy())
    return file_entries(folder, path)[0]


def _copy_tokenizer(source: Checkpoint, folder: Path) -> list[FileEntry]:
    tokenizer = folder / "tokenizer"
    for file in source.tokenizer_files():
        tokenizer.mkdir(exist_ok=True)
        shutil.copyfile(file, tokenizer / file.name)
    return file_entries(folder, tokenizer)
