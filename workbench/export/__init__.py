"""Checkpoint in, bundle out: stateful Core ML shards, host tables, manifest. Knows nothing of how shards are run."""

import shutil
import warnings
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from torch import nn

from workbench.bundle import Bundle, Embedding, FileEntry, Manifest, Options, Shard, Tokens, Writer, file_entries
from workbench.bundle.contract import HIDDEN
from workbench.errors import InputError
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

from . import convert, shards

MAX_FP16 = 65504.0
MAX_INT8 = 32752.0  # coremltools doubles the largest weight in fp16 on the way to an int8 scale


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused by name."""
    try:
        return Options(**chosen)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "export options"
        raise InputError(name, repr(first.get("input")), first["msg"], "see: workbench export --help") from None


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
    module = family_of(source.config)
    plan = module.plan(source.config)
    _warn_width(plan)
    identity = {"checkpoint": source.sha256, "options": chosen_options.model_dump(), "packages": versions()}
    writer = Writer(Path(bundle), identity)
    try:
        made = list(_make_shards(source, module, plan, chosen_options, writer, progress))
        return writer.finish(_manifest(source, plan, chosen_options, writer, made, identity))
    except OSError as problem:
        raise InputError(f"bundle {bundle}", f"{problem.strerror or problem}", "a writable disk with room for the bundle",
                         "free some room and run the same export again: it resumes") from problem  # fmt: skip


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("coremltools", "numpy", "torch", "transformers", "workbench")}


def _warn_width(plan: Plan) -> None:
    if plan.dims.D % 32:
        warnings.warn(f"head_dim {plan.dims.D} is no multiple of 32: states of that width failed on the Neural Engine "
                      "(rule K2, CT#2631); the portable runtime takes it", stacklevel=3)  # fmt: skip


def _make_shards(source, module, plan, options, writer, progress):
    from tqdm.auto import tqdm

    for spec in tqdm(list(shards.specs(plan, options)), desc="export", unit="shard", disable=not progress):
        yield writer.finished(spec.name) or _make_shard(spec, source, module, plan, options, writer)


def _make_shard(spec: shards.Spec, source: Checkpoint, module, plan: Plan, options: Options, writer: Writer) -> Shard:
    """Converts one shard plainly and records it."""
    built, sources = build(spec, source, module, plan, options)
    model = convert.convert(built, spec, options)
    values = convert.modules(model, spec.layers[0])
    model = convert.compress(model, options.compress)
    path = writer.root / f"{spec.name}.mlpackage"
    shutil.rmtree(path, ignore_errors=True)
    model.save(str(path))
    held = convert.constants(model)
    weights = {tensor: held[name] for name, tensor in sources.items() if name in held}
    files = file_entries(writer.root, path)
    shard = Shard(
        name=spec.name, kind=spec.kind, path=path.name, layers=spec.layers, rows=spec.rows, inputs=spec.inputs,
        outputs=spec.outputs, states=shards.state_entries(spec), weights=weights, modules=values,
        taps=_taps(values, spec), bytes=sum(f.bytes for f in files), files=files,
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


def build(spec: shards.Spec, source: Checkpoint, module, plan: Plan, options: Options):
    """The torch module of one shard with its weights rounded to fp16, and constant name → checkpoint tensor."""
    config, prefix = source.config, prefix_of(source)
    if spec.kind == "head":
        head = module.head(config, spec.rows[1] - spec.rows[0])
        names = {"norm.weight": f"{prefix}norm.weight", "lm_head.weight": head_name(source, plan)}
        fill(head, names, source, options, rows={"lm_head.weight": slice(*spec.rows)})
        return head, {path.replace(".", "_"): name for path, name in names.items()}
    blocks = [module.layer(config, i, options) for i in range(*spec.layers)]
    stack = shards.LayerStack(blocks, spec, [plan.layers[i].rope for i in range(*spec.layers)])
    names = {
        f"blocks.{i}.{path}": f"{prefix}layers.{spec.layers[0] + i}.{path}"
        for i, block in enumerate(blocks)
        for path, _ in block.named_parameters()
    }
    fill(stack, names, source, options)
    return stack, {path.replace(".", "_"): name for path, name in names.items()}


def prefix_of(source: Checkpoint) -> str:
    """What precedes `layers.0…` in the checkpoint's tensor names."""
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        if f"{prefix}embed_tokens.weight" in source:
            return prefix
    source.tensor("model.embed_tokens.weight")  # raises, naming what is missing
    raise AssertionError


def head_name(source: Checkpoint, plan: Plan) -> str:
    return f"{prefix_of(source)}embed_tokens.weight" if plan.tied else "lm_head.weight"


def fill(module: nn.Module, names: dict[str, str], source: Checkpoint, options: Options, rows=None) -> None:
    """Loads parameters tensor by tensor, each rounded to fp16; refuses what fp16 or the compression cannot hold."""
    offsets = {f"{n}.weight": m.offset for n, m in module.named_modules() if getattr(m, "offset", 0)}
    limit = MAX_FP16 if options.compress == "fp16" else MAX_INT8
    for path, parameter in module.named_parameters():
        name = names[path]
        value = source.tensor(name, (rows or {}).get(path)) + offsets.get(path, 0.0)
        if value.numel() != parameter.numel():
            raise InputError(f"tensor {name!r}", f"shape {list(value.shape)}", f"{list(parameter.shape)}",
                             "check that config.json belongs to these weights")  # fmt: skip
        if not bool(value.abs().max() <= limit):
            raise InputError(f"tensor {name!r}", f"a value of {value.abs().max():g}", f"magnitudes up to {limit:g}",
                             "export a checkpoint whose weights fp16 can hold")  # fmt: skip
        parameter.data = value.half().float().reshape(parameter.shape)


def _manifest(source, plan, options, writer, made, identity) -> Manifest:
    config = source.config
    eos = config.eos_token_id
    return Manifest(
        family=config.model_type, dims=plan.dims, options=options, rope=plan.rope, layers=plan.layers,
        embedding=Embedding(file=_write_embedding(source, plan, writer), scale=plan.embedding_scale),
        tokens=Tokens(bos=config.bos_token_id, eos=eos if isinstance(eos, list) else [] if eos is None else [eos],
                      files=_copy_tokenizer(source, writer)),
        checkpoint={"name": source.path.name, "sha256": source.sha256, "dtype": source.dtype},
        packages=identity["packages"], shards=made,
    )  # fmt: skip


def _write_embedding(source: Checkpoint, plan: Plan, writer: Writer) -> FileEntry:
    from safetensors.numpy import save_file

    prefix = prefix_of(source)
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
