"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run."""

import errno
import json
import math
import shutil
import struct
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pydantic import ValidationError

from miltorch.quiet import coremltools
from workbench.bundle import (
    Bundle,
    Embedding,
    FileEntry,
    Manifest,
    Options,
    Shard,
    Tokens,
    Writer,
    file_entries,
)
from workbench.bundle.aimodel import optional
from workbench.bundle.manifest import first_fault
from workbench.bundle.names import MATRIX_STATE
from workbench.errors import InputError
from workbench.export import shards
from workbench.export.coreai import CoreAIMaker
from workbench.export.make import Maker
from workbench.export.weights import Clock
from workbench.files import check_room
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

__all__ = ["export", "options", "read_plan", "versions"]
# no room left: on the disk, for this user, in one file
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
MATRIX_T_MAX = 8  # most tokens a call where layers keep a matrix
MAKERS = {"coreml": Maker, "coreai": CoreAIMaker}  # by the option `target`
THREADS = 2  # stamping is bound by memory and disk: more gain little


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused
    by name."""
    try:
        return Options(**chosen)
    except ValidationError as problem:
        name, error = first_fault(problem, "export options")
        limits = error.get("ctx", {})
        choices = str(limits.get("expected")).replace(" or ", ", ").replace("'", "")
        needed = {
            "extra_forbidden": f"one of the options {', '.join(Options.model_fields)}",
            "literal_error": f"one of {choices}",
            "greater_than_equal": f"at least {limits.get('ge')}",
            "less_than_equal": f"at most {limits.get('le')}",
        }.get(error["type"], error["msg"])
        raise InputError(
            name, repr(error.get("input")), needed, "see: workbench export --help"
        ) from None


def export(
    checkpoint: str | Path,
    bundle: str | Path,
    *,
    progress: bool = True,
    plain: bool = False,
    verify_stamps: int = 0,
    clock: Clock | None = None,
    **chosen,
) -> Bundle:
    """Exports the Hugging Face folder `checkpoint` to the new folder `bundle`.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole
            or sharded).
        bundle: where the bundle shall be; an interrupted export to the same place with
            the same options resumes.
        progress: show a progress bar.
        plain: convert every shard, stamp none; the bytes are the same, only slower to
            make.
        verify_stamps: number of random stamped shards to convert again and compare.
        clock: collects the seconds of each kind of work.
        chosen: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, target that is
            taken, no room on the disk.
    """
    coremltools()  # quietly, before a part of it is imported by itself
    settings = options(**chosen)
    source = Checkpoint(checkpoint)
    plan = read_plan(source, settings)
    packages = versions(settings.target)
    _warn_widths(plan, settings)
    subject = f"bundle {bundle}"
    make = MAKERS[settings.target]
    try:
        with Writer(Path(bundle)) as writer:
            maker = make(source, plan, settings, writer, plain, clock or Clock())
            return _write(maker, packages, subject, verify_stamps, progress)
    except OSError as problem:
        raise _stopped(subject, problem) from problem


def _write(
    maker: Maker,
    packages: dict[str, str],
    subject: str,
    verify_stamps: int,
    progress: bool,
) -> Bundle:
    """Writes every file of the bundle that `maker` has a writer for."""
    source = maker.source
    plan = maker.plan
    writer = maker.writer

    def identity() -> dict:  # hashes the checkpoint, once
        settings = maker.options.model_dump()
        return {"checkpoint": source.sha256, "options": settings, "packages": packages}

    if writer.resumes:
        writer.resume(identity())
    _check_room(maker, subject)
    files = _copy_tokenizer(source, writer)
    tokens = Tokens(bos=source.config.bos_token_id, eos=source.eos, files=files)
    pool = ThreadPoolExecutor(THREADS)
    try:
        signing = pool.submit(lambda: writer.sign(identity()))
        finished, table = _make(maker, pool, progress)
        maker.verify(finished, verify_stamps)
        signing.result()
    finally:
        pool.shutdown(cancel_futures=True)  # before the folder is unlocked
    manifest = Manifest(
        family=source.config.model_type,
        dims=plan.dims,
        options=maker.options,
        rope=plan.rope,
        layers=plan.layers,
        shards=finished,
        embedding=Embedding(file=table, scale=plan.embedding_scale),
        tokens=tokens,
        checkpoint={
            "name": source.name,
            "sha256": source.sha256,
            "dtype": source.dtype,
        },
        packages=packages,
        residual_exponent=plan.residual_exponent,
    )
    return writer.finish(manifest)


def _check_room(maker: Maker, subject: str) -> None:
    """Raises an InputError if the disk lacks room for the missing part of the bundle
    and for the temporary copies of its largest shard, in the work folder (a trial, a
    program for each function) and where coremltools writes."""
    shards, largest = maker.room()
    table = maker.source.prefix + "embed_tokens.weight"
    embedding = 2 * math.prod(maker.source.shape(table))
    copies = 1 + len(maker.options.functions)
    check_room(maker.writer.root, shards + embedding + copies * largest, subject)
    check_room(Path(tempfile.gettempdir()), largest, f"{subject}, temporary files")


def _stopped(subject: str, problem: OSError) -> InputError:
    """The InputError for an OSError during an export; it advises to free room only if
    the disk is full."""
    reason = f"{problem.strerror or problem}"
    if problem.errno in FULL:
        needed = "a writable disk with room for the bundle"
        step = "free some room and run the same export again: it resumes"
        return InputError(subject, reason, needed, step)
    if problem.filename:
        reason += f" ({problem.filename})"
    needed = "files that can be written and read"
    return InputError(subject, reason, needed, "correct this, or choose another target")


def versions(target: str = "coreml") -> dict[str, str]:
    """Versions of the packages that a bundle's bytes and values depend on, by name."""
    from importlib.metadata import version

    names = ["coremltools", "numpy", "torch", "transformers", "workbench"]
    if target == "coreai":
        optional("coreai_torch")
        names += ["coreai-core", "coreai-torch"]
    return {name: version(name) for name in names}


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint. Raises an InputError for options that do not
    apply to the family."""
    family = family_of(source.config)
    subject = f"a {source.config.model_type} checkpoint"
    plan = family.plan(source.config)
    windows = any(layer.window for layer in plan.layers)
    matrices = any(MATRIX_STATE in states for states in plan.side_states)
    longest = plan.max_positions or options.max_seq_len
    # (does not apply, option, what is needed, next step)
    refusals = [
        (
            options.moe == "routed" and not plan.experts,
            "moe = routed",
            "a family with experts",
            "leave out --moe",
        ),
        (
            options.sliding == "ring" and not windows,
            "sliding = ring",
            "a family with sliding attention",
            "leave out --sliding",
        ),
        (
            options.state_pair and not matrices,
            "state_pair",
            "a family with matrix states",
            "leave out --state-pair",
        ),
        (
            options.t_max > MATRIX_T_MAX and matrices,
            f"t_max = {options.t_max}",
            f"at most {MATRIX_T_MAX}: "
            "fp16 cannot hold what more tokens at once do to a matrix state",
            f"export with --t-max {MATRIX_T_MAX} or less",
        ),
        (
            options.max_seq_len > longest,
            f"max_seq_len = {options.max_seq_len}",
            f"at most {longest}, the length beyond which its positions are scaled",
            "export with a smaller --max-seq-len",
        ),
    ]
    for refused, option, needed, step in refusals:
        if refused:
            raise InputError(option, subject, needed, step)
    if hasattr(family, "settle"):
        return family.settle(plan, source)
    return plan


def _warn_widths(plan: Plan, options: Options) -> None:
    widths = set()
    for spec in shards.specs(plan, options):
        widths |= {shape[-1] for shape in spec.buffers.values()}
    odd = sorted(width for width in widths if width % 32)
    if odd:
        warnings.warn(
            f"states of width {', '.join(map(str, odd))}, no multiple of 32, "
            "failed on the Neural Engine "
            "(rule K2, CT#2631); the portable runtime takes them",
            stacklevel=3,
        )


def _make(
    maker: Maker, pool: ThreadPoolExecutor, progress: bool
) -> tuple[list[Shard], FileEntry]:
    """All shards and the embedding table, with a progress bar in bytes."""
    from tqdm.auto import tqdm

    sizes = {spec.name: maker.stored_bytes(spec.name) for spec in maker.specs}
    bar = tqdm(
        total=sum(sizes.values()),
        desc="export",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    finished = {}
    with bar:
        for shard in maker.convert_first():
            finished[shard.name] = shard
            bar.update(sizes[shard.name])
        table = pool.submit(_write_embedding, maker.source, maker.plan, maker.writer)
        others = [spec for spec in maker.specs if spec.name not in finished]
        for shard in maker.stamp_all(others, pool):
            finished[shard.name] = shard
            bar.update(sizes[shard.name])
    return [finished[name] for name in sizes], table.result()


def _write_embedding(source: Checkpoint, plan: Plan, writer: Writer) -> FileEntry:
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
    path = writer.root / "embedding.safetensors"
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
    return file_entries(writer.root, path)[0]


def _copy_tokenizer(source: Checkpoint, writer: Writer) -> list[FileEntry]:
    folder = writer.root / "tokenizer"
    for file in source.tokenizer_files():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    return file_entries(writer.root, folder)
