"""Checkpoint in, bundle out: stateful Core ML shards, host tables, manifest. Knows nothing of how shards are run."""

import shutil
import warnings
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from workbench.bundle import Bundle, Embedding, FileEntry, Manifest, Options, Shard, Tokens, Writer, file_entries
from workbench.bundle.contract import HIDDEN
from workbench.errors import InputError
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

from . import convert, shards
from .build import build, matrices, offsets


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused by name."""
    try:
        return Options(**chosen)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "export options"
        raise InputError(name, repr(first.get("input")), first["msg"].removeprefix("Value error, "),
                         "see: workbench export --help") from None  # fmt: skip


def export(checkpoint: str | Path, bundle: str | Path, *, progress: bool = True, **chosen) -> Bundle:
    """Exports the Hugging Face folder `checkpoint` to the new folder `bundle`.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole or sharded).
        bundle: where the bundle shall be; an interrupted export to the same place with the same options resumes.
        progress: show a progress bar.
        chosen: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, target that is taken, no room on the disk.
    """
    chosen_options = options(**chosen)
    source = Checkpoint(checkpoint)
    plan = read_plan(source, chosen_options)
    _warn_widths(plan, chosen_options)
    identity = {"checkpoint": source.sha256, "options": chosen_options.model_dump(), "packages": versions()}
    writer = Writer(Path(bundle), identity)
    try:
        made = list(_make_shards(source, plan, chosen_options, writer, progress))
        return writer.finish(_manifest(source, plan, chosen_options, writer, made, identity))
    except OSError as problem:
        raise InputError(f"bundle {bundle}", f"{problem.strerror or problem}", "a writable disk with room for the bundle",
                         "free some room and run the same export again: it resumes") from problem  # fmt: skip


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("coremltools", "numpy", "torch", "transformers", "workbench")}


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint; refuses options that mean nothing to the family."""
    family = family_of(source.config)
    plan = family.plan(source.config)
    pointless = [
        ("moe", "routed", "a family with experts", not plan.experts),
        ("sliding", "ring", "a family with sliding attention", not any(layer.window for layer in plan.layers)),
    ]
    for option, value, needed, missing in pointless:
        if getattr(options, option) == value and missing:
            raise InputError(f"{option} = {value}", f"a {source.config.model_type} checkpoint", needed, f"leave out --{option}")
    return family.settle(plan, source) if hasattr(family, "settle") else plan


def _warn_widths(plan: Plan, options: Options) -> None:
    widths = {shape[-1] for spec in shards.specs(plan, options) for shape in spec.buffers.values()}
    odd = sorted(width for width in widths if width % 32)
    if odd:
        warnings.warn(f"states of width {', '.join(map(str, odd))}, no multiple of 32, failed on the Neural Engine "
                      "(rule K2, CT#2631); the portable runtime takes them", stacklevel=3)  # fmt: skip


def _make_shards(source, plan, options, writer, progress):
    from tqdm.auto import tqdm

    for spec in tqdm(list(shards.specs(plan, options)), desc="export", unit="shard", disable=not progress):
        yield writer.finished(spec.name) or _make_shard(spec, source, plan, options, writer)


def _make_shard(spec: shards.Spec, source: Checkpoint, plan: Plan, options: Options, writer: Writer) -> Shard:
    """Converts one shard plainly and records it."""
    module, paths = build(spec, source, plan, options)
    model = convert.convert(module, spec, options, matrices(module))
    values = convert.modules(model, spec.layers[0])
    package = writer.root / f"{spec.name}.mlpackage"
    shutil.rmtree(package, ignore_errors=True)
    model.save(str(package))
    held, added = convert.constants(model), offsets(module)
    files = file_entries(writer.root, package)
    shard = Shard(
        name=spec.name, kind=spec.kind, path=package.name, layers=spec.layers, rows=spec.rows, inputs=spec.inputs,
        outputs=spec.outputs, states=spec.states,
        weights={tensor: held[path.replace(".", "_")] for tensor, path in paths.items()},
        offsets={tensor: added[path] for tensor, path in paths.items() if path in added},
        modules=values, taps=_taps(values, spec), bytes=sum(f.bytes for f in files), files=files,
    )  # fmt: skip
    return writer.record(shard)


def _taps(values: dict[str, str], spec: shards.Spec) -> dict[int, str]:
    """Layer → name of the value holding its hidden output: the last value that came from its block."""
    if spec.kind != "layers":
        return {}
    last = {}
    for value, path in values.items():
        if path.startswith("layers."):
            last[int(path.split(".")[1])] = value
    return last | {spec.layers[1] - 1: HIDDEN}


def _manifest(source, plan, options, writer, made, identity) -> Manifest:
    config = source.config
    eos = config.eos_token_id
    return Manifest(
        family=config.model_type, dims=plan.dims, options=options, rope=plan.rope, layers=plan.layers,
        embedding=Embedding(file=_write_embedding(source, plan, writer), scale=plan.embedding_scale),
        tokens=Tokens(bos=config.bos_token_id, eos=eos if isinstance(eos, list) else [] if eos is None else [eos],
                      files=_copy_tokenizer(source, writer)),
        checkpoint={"name": source.path.name, "sha256": source.sha256, "dtype": source.dtype},
        packages=identity["packages"], residual_exponent=plan.residual_exponent, shards=made,
    )  # fmt: skip


def _write_embedding(source: Checkpoint, plan: Plan, writer: Writer) -> FileEntry:
    from safetensors.numpy import save_file

    prefix = source.prefix
    tensors = {"weight": source.tensor(f"{prefix}embed_tokens.weight").half().numpy()}
    if not np.isfinite(tensors["weight"]).all():
        raise InputError(f"tensor {prefix}embed_tokens.weight", "values beyond fp16", "finite fp16 values",
                         "export a checkpoint whose weights fp16 can hold")  # fmt: skip
    if plan.embedding_bias and plan.embedding_factor:
        tensors["bias"] = source.tensor(prefix + plan.embedding_bias).numpy()
        tensors["scale"] = source.tensor(prefix + plan.embedding_factor).numpy()
    path = writer.root / "embedding.safetensors"
    save_file(tensors, path)
    return file_entries(writer.root, path)[0]


def _copy_tokenizer(source: Checkpoint, writer: Writer) -> list[FileEntry]:
    if not source.tokenizer_files():
        return []
    folder = writer.root / "tokenizer"
    folder.mkdir(exist_ok=True)
    for file in source.tokenizer_files():
        shutil.copyfile(file, folder / file.name)
    return file_entries(writer.root, folder)


__all__ = ["build", "export", "options"]
