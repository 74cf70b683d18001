"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run.

`export` is the entry. Data flow through the files in this order:

- `options.py`: what is asked for, checked against the checkpoint;
- `shards.py`: the shards of the model, each with its interface;
- `weights.py`: the checkpoint tensor of each parameter, and the arrays that store it;
- with a text, `calibrate.py`: matrices compressed for the inputs that they have on it.
  `compress.py` compresses one matrix, `tables.py` finds its lookup tables;
- for a search of presets, `mixed.py`: `candidates.py`, `losses.py`, `allocation.py`,
  `replaceable.py` are its parts;
- `template.py`: the program of each distinct shape of shard, which coremltools converts;
- `writing.py`: all files of the bundle. Its manifest is saved here, last."""

import hashlib
import json
import shutil
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miltorch.coremltools_import import coremltools
from workbench import paths
from workbench.bundle import Bundle, Options, new_bundle
from workbench.bundle.manifest import MANIFEST_VERSION
from workbench.bundle.presets import FP16, check_calibrated
from workbench.errors import InputError
from workbench.exporter.options import (
    Compression,
    check_all_named,
    check_formats,
    make_options,
    read_plan,
)
from workbench.exporter.weights import all_weights, find_presets
from workbench.exporter.writing import versions, write_bundle
from workbench.files import locked, output_root, sha256
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.exporter.calibrate import CompressedMatrices, Text
    from workbench.exporter.mixed import Allocation, SearchSettings

__all__ = [
    "Compression",
    "bundle_for",
    "bundle_name",
    "export",
    "make_options",
    "read_plan",
]

ROUNDED = Compression()  # every weight to the nearest


def export(
    checkpoint: str | Path,
    bundle: str | Path | None = None,
    *,
    calibration: "Text | None" = None,
    formats: "Mapping[str, str] | None" = None,
    search: "SearchSettings | None" = None,
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
            tensor.
        search: for `compress="mixed"` without `formats`, how the presets are chosen.
        fields: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, a target where
            something is already, no space on the disk, a text for fp16, no text for a
            preset that needs one, `mixed` without formats or a search.
    """
    options = make_options(**fields)
    step = "pass calibration=workbench.exporter.calibrate.draw_windows(ids, name)"
    check_calibrated(options.preset, calibration is not None, step)
    if options.preset == FP16 and calibration is not None:
        step = "leave the text out, or choose another --compress"
        raise InputError("--compress fp16", "a text", "no calibration", step)
    compression = Compression(calibration, formats, search)
    check_formats(options, compression)
    opened_checkpoint = Checkpoint(paths.find(checkpoint))
    if bundle is None:
        folder = output_root() / "data" / "bundles"
        return bundle_for(opened_checkpoint, options, folder, compression)
    return _export(opened_checkpoint, options, Path(bundle), compression)


@dataclass(frozen=True)
class _Compressed:
    """Matrices that are compressed before the bundle is written.

    Args:
        matrices: those that are fitted to a text; None: there is no text.
        allocation: how a search chose their presets; None: no search did.
    """

    matrices: "CompressedMatrices | None" = None
    allocation: "Allocation | None" = None


def _export(
    checkpoint: Checkpoint,
    options: Options,
    bundle: Path,
    compression: Compression = ROUNDED,
) -> Bundle:
    coremltools()  # quietly, before a part of it is imported by itself
    plan = read_plan(checkpoint, options)
    if compression.formats is not None:
        check_all_named(checkpoint, plan, options, compression.formats)
    try:
        with ExitStack() as stack:
            compressed = _Compressed()
            if compression.text is not None:
                paths.check_new_bundle(bundle)
                # numba and Hugging Face's models take seconds to import
                from workbench.exporter.calibrate import work_folder

                work = stack.enter_context(work_folder(bundle))
                compressed = _compress(checkpoint, plan, options, compression, work)
            matrices, allocation = compressed.matrices, compressed.allocation
            formats = compression.formats
            if allocation is not None:
                formats = allocation.chosen.formats
            presets = find_presets(formats)
            folder = stack.enter_context(new_bundle(bundle))
            manifest = write_bundle(folder, checkpoint, plan, options, matrices, presets)
            records = {}
            if matrices is not None:
                nearest = sorted(matrices.unfitted)
                records["calibration"] = compression.text.record(folder, nearest)
            if allocation is not None:
                records["selection"] = allocation.record(
                    folder, compression.search.text
                )
            manifest.model_copy(update=records).save(folder)
        return Bundle.open(bundle)
    except OSError as problem:
        reason = f"{problem.strerror or problem} ({problem.filename or bundle})"
        needed = "files that can be read and written"
        step = "correct this, or choose another target"
        raise InputError(f"bundle {bundle}", reason, needed, step) from problem


def _compress(
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    compression: Compression,
    folder: Path,
) -> _Compressed:
    """Compresses matrices for the inputs that they have on a text, in presets that are
    given or that a search chooses.

    Args:
        folder: a work folder.
    """
    if compression.search is None:
        from workbench.exporter.calibrate import calibrate

        presets = find_presets(compression.formats)
        weights = all_weights(checkpoint, plan, options, presets)
        return _Compressed(calibrate(checkpoint, weights, compression.text, folder))
    from workbench.exporter.mixed import choose_and_compress

    mixed = choose_and_compress(
        checkpoint, plan, options, compression.text, compression.search, folder
    )
    return _Compressed(mixed.matrices, mixed.allocation)


def bundle_name(
    checkpoint: str, identity: str, options: Options, compression: Compression = ROUNDED
) -> str:
    """The name of a bundle's folder in `data/bundles`: the checkpoint's name and a hash
    of everything that decides the bundle's bytes, except those of its tokenizer."""
    parts = [MANIFEST_VERSION, identity, options.model_dump(), versions(options)]
    text = json.dumps([*parts, *compression.key], sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(
    checkpoint: Checkpoint,
    options: Options,
    folder: Path,
    compression: Compression = ROUNDED,
) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened. A damaged one, and one with another tokenizer than the
    checkpoint's, is exported again, with a warning that states the reason."""
    path = folder / bundle_name(
        checkpoint.name, checkpoint.sha256, options, compression
    )
    with locked(path.with_name(f".{path.name}.lock")):
        reason = "the checkpoint has another tokenizer now"
        try:
            cached = Bundle.open(path)
            stored = {Path(e.path).name: e.sha256 for e in cached.manifest.tokens.files}
            current = {file.name: sha256(file) for file in checkpoint.tokens.files()}
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
        return _export(checkpoint, options, path, compression)
