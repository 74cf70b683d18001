"""Checkpoint in, bundle out: stateful Core ML shards, host tables, manifest. Knows nothing of how shards are run."""

import errno
import json
import math
import shutil
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from miltorch.quiet import coremltools
from workbench.bundle import Bundle, Embedding, FileEntry, Manifest, Options, Shard, Tokens, Writer, file_entries
from workbench.errors import InputError
from workbench.export import make, shards
from workbench.export.build import Clock
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room left: on the disk, for this user, in one file
THREADS = 2  # stamping is bound by memory and disk: more gain little


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused by name."""
    try:
        return Options(**chosen)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name, limits = ".".join(map(str, first["loc"])) or "export options", first.get("ctx", {})
        choices = str(limits.get("expected")).replace(" or ", ", ").replace("'", "")
        needed = {
            "extra_forbidden": f"one of the options {', '.join(Options.model_fields)}",
            "literal_error": f"one of {choices}",
            "greater_than_equal": f"at least {limits.get('ge')}",
            "less_than_equal": f"at most {limits.get('le')}",
        }.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise InputError(name, repr(first.get("input")), needed,
                         "see: workbench export --help") from None


def export(checkpoint: str | Path, bundle: str | Path, *, progress: bool = True, plain: bool = False,
           verify_stamps: int = 0, clock: Clock | None = None, **chosen) -> Bundle:  # fmt: skip
    """Exports the Hugging Face folder `checkpoint` to the new folder `bundle`.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole or sharded).
        bundle: where the bundle shall be; an interrupted export to the same place with the same options resumes.
        progress: show a progress bar.
        plain: convert every shard, stamp none; the bytes are the same, only slower to make.
        verify_stamps: number of random stamped shards to convert again and compare.
        clock: collects what the time went into.
        chosen: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, target that is taken, no room on the disk.
    """
    coremltools()  # quietly, before a part of it is imported by itself
    chosen_options = options(**chosen)
    source = Checkpoint(checkpoint)
    plan, eos = read_plan(source, chosen_options), source.eos
    _warn_widths(plan, chosen_options)
    packages = versions()
    try:
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(THREADS))
            identity = pool.submit(lambda: {"checkpoint": source.sha256, "options": chosen_options.model_dump(),
                                            "packages": packages})  # fmt: skip
            writer = stack.enter_context(Writer(Path(bundle), identity))
            stack.callback(pool.shutdown, cancel_futures=True)  # comes first: the folder is left when nobody writes to it
            maker = make.Maker(source, plan, chosen_options, writer, plain, clock or Clock())
            made, table = _make(maker, pool, verify_stamps, progress)
            identity.result()
            return writer.finish(_manifest(source, plan, eos, chosen_options, writer, made, packages, table))
    except OSError as problem:
        raise _stopped(bundle, problem) from problem


def _stopped(bundle: str | Path, problem: OSError) -> InputError:
    """What the system refused; only where there is no room would more of it help."""
    found = f"{problem.strerror or problem}"
    if problem.errno in FULL:
        return InputError(f"bundle {bundle}", found, "a writable disk with room for the bundle",
                          "free some room and run the same export again: it resumes")  # fmt: skip
    where = f" ({problem.filename})" if problem.filename else ""
    return InputError(
        f"bundle {bundle}", found + where, "files that can be written and read", "mend that, or choose another target"
    )


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("coremltools", "numpy", "torch", "transformers", "workbench")}


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint; refuses options that mean nothing to the family."""
    family = family_of(source.config)
    plan = family.plan(source.config)
    sliding = any(layer.window for layer in plan.layers)
    for option, value, needed, missing in (("moe", "routed", "a family with experts", not plan.experts),
                                           ("sliding", "ring", "a family with sliding attention", not sliding)):  # fmt: skip
        if getattr(options, option) == value and missing:
            raise InputError(f"{option} = {value}", f"a {source.config.model_type} checkpoint", needed, f"leave out --{option}")
    return family.settle(plan, source) if hasattr(family, "settle") else plan


def _warn_widths(plan: Plan, options: Options) -> None:
    widths = {shape[-1] for spec in shards.specs(plan, options) for shape in spec.buffers.values()}
    odd = sorted(width for width in widths if width % 32)
    if odd:
        warnings.warn(f"states of width {', '.join(map(str, odd))}, no multiple of 32, failed on the Neural Engine "
                      "(rule K2, CT#2631); the portable runtime takes them", stacklevel=3)  # fmt: skip


def _make(maker: make.Maker, pool: ThreadPoolExecutor, verify: int, progress: bool) -> tuple[list[Shard], FileEntry]:
    """All shards and the embedding table, with a progress bar in bytes; then the check of `verify` random stamped shards."""
    from tqdm.auto import tqdm

    jobs = make.jobs(list(shards.specs(maker.plan, maker.options)), maker.source, maker.plan, maker.options)
    with tqdm(total=sum(job.bytes for job in jobs), desc="export", unit="B", unit_scale=True, disable=not progress) as bar:
        made = maker.convert_first(jobs, lambda job: bar.update(job.bytes))
        table = pool.submit(_write_embedding, maker.source, maker.plan, maker.writer)
        others = [job for job in jobs if job.spec.name not in made]
        made |= maker.stamp_others(others, pool, lambda job: bar.update(job.bytes))
    ordered = [made[job.spec.name] for job in jobs]
    maker.verify(jobs, ordered, verify)
    return ordered, table.result()


def _manifest(source, plan, eos, options, writer, made, packages, table) -> Manifest:
    config = source.config
    return Manifest(
        family=config.model_type, dims=plan.dims, options=options, rope=plan.rope, layers=plan.layers,
        embedding=Embedding(file=table, scale=plan.embedding_scale),
        tokens=Tokens(bos=config.bos_token_id, eos=eos, files=_copy_tokenizer(source, writer)),
        checkpoint={"name": source.path.name, "sha256": source.sha256, "dtype": source.dtype},
        packages=packages, residual_exponent=plan.residual_exponent, shards=made,
    )  # fmt: skip


def _write_embedding(source: Checkpoint, plan: Plan, writer: Writer) -> FileEntry:
    """The embedding table as fp16 (and what is applied to it, fp32) in a safetensors file, never whole in memory."""
    names = {"weight": f"{source.prefix}embed_tokens.weight"}
    if plan.embedding_bias and plan.embedding_factor:
        names |= {"bias": source.prefix + plan.embedding_bias, "scale": source.prefix + plan.embedding_factor}
    header, end = {}, 0
    for key, name in names.items():
        kind, shape = ("F16", 2) if key == "weight" else ("F32", 4), source.shape(name)
        start, end = end, end + math.prod(shape) * kind[1]
        header[key] = {"dtype": kind[0], "shape": shape, "data_offsets": [start, end]}
    path, text = writer.root / "embedding.safetensors", json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, name in names.items():
            for chunk in source.chunks(name):
                values = chunk.half() if key == "weight" else chunk.float()
                if not values.isfinite().all():
                    raise InputError(f"tensor {name}", "values beyond fp16", "finite fp16 values",
                                     "export a checkpoint whose weights fp16 can hold")  # fmt: skip
                file.write(values.numpy())
    return file_entries(writer.root, path)[0]


def _copy_tokenizer(source: Checkpoint, writer: Writer) -> list[FileEntry]:
    if not source.tokenizer_files():
        return []
    folder = writer.root / "tokenizer"
    folder.mkdir(exist_ok=True)
    for file in source.tokenizer_files():
        shutil.copyfile(file, folder / file.name)
    return file_entries(writer.root, folder)


__all__ = ["Clock", "export", "options"]
