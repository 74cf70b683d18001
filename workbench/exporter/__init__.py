"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run.

`export` is the entry. Data flow through the files in this order:

- `options.py`: the options of `bundle/options.py`, checked against the checkpoint;
- `shards.py`: the shards of the model, each with its interface;
- `weights.py`: the checkpoint tensor of each parameter, and the arrays that store it;
- with a text, `calibrate.py`: matrices compressed for their inputs on the text.
  `inputs.py` sums up inputs, `compress.py` compresses one matrix, `tables.py` finds its
  lookup tables;
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
from workbench.bundle import Bundle, Calibration, Options, Selection, new_bundle
from workbench.bundle.manifest import MANIFEST_VERSION
from workbench.bundle.options import make_options
from workbench.bundle.presets import FP16, Preset, check_calibrated
from workbench.errors import InputError
from workbench.exporter.options import (
    Compression,
    check_all_named,
    check_formats,
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
    """What is decided about the matrices before the bundle is written.

    Args:
        presets: checkpoint tensor → preset, of every matrix of a mixed bundle; empty for
            other bundles.
        matrices: the matrices that are fitted to a text; None: there is no text.
        allocation: how a search chose the presets; None: no search did.
    """

    presets: dict[str, Preset]
    matrices: "CompressedMatrices | None" = None
    allocation: "Allocation | None" = None


def _export(
    checkpoint: Checkpoint,
    options: Options,
    bundle: Path,
    compression: Compression = ROUNDED,
) -> Bundle:
    """Exports an opened checkpoint to the new folder `bundle`; see `export`."""
    coremltools()  # quietly, before a part of it is imported by itself
    plan = read_plan(checkpoint, options)
    if compression.formats is not None:
        check_all_named(checkpoint, plan, options, compression.formats)
    try:
        with ExitStack() as stack:
            compressed = _Compressed(find_presets(compression.formats))
            if compression.text is not None:
                paths.check_new_bundle(bundle)
                # numba and Hugging Face's models take seconds to import
                from workbench.exporter.calibrate import work_folder

                work = stack.enter_context(work_folder(bundle))
                compressed = _compress(checkpoint, plan, options, compression, work)
            folder = stack.enter_context(new_bundle(bundle))
            manifest = write_bundle(
                folder,
                checkpoint,
                plan,
                options,
                compressed.matrices,
                compressed.presets,
            )
            entries = _save_texts(folder, compression, compressed)
            manifest.model_copy(update=entries).save(folder)
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
    """Compresses matrices for their inputs on a text, in presets that are given or that a
    search chooses.

    Args:
        folder: a work folder.
    """
    if compression.search is None:
        from workbench.exporter.calibrate import calibrate

        presets = find_presets(compression.formats)
        weights = all_weights(checkpoint, plan, options, presets)
        matrices = calibrate(checkpoint, weights, compression.text, folder)
        return _Compressed(presets, matrices)
    from workbench.exporter.mixed import choose_and_compress

    mixed = choose_and_compress(
        checkpoint, plan, options, compression.text, compression.search, folder
    )
    presets = find_presets(mixed.allocation.chosen.formats)
    return _Compressed(presets, mixed.matrices, mixed.allocation)


def _save_texts(
    folder: Path, compression: Compression, compressed: _Compressed
) -> dict[str, Calibration | Selection]:
    """Writes the texts that decided the matrices, and the result of a search, to a
    bundle's folder; returns the fields of the manifest that list them."""
    entries = {}
    if compressed.matrices is not None:
        nearest = sorted(compressed.matrices.unfitted)
        entries["calibration"] = compression.text.save(folder, nearest)
    if compressed.allocation is not None:
        text = compression.search.text
        entries["selection"] = compressed.allocation.save(folder, text)
    return entries


def bundle_name(
    checkpoint_name: str,
    checkpoint_sha256: str,
    options: Options,
    compression: Compression = ROUNDED,
) -> str:
    """The name of a bundle's folder in `data/bundles`: the checkpoint's name and a hash
    of everything that decides the bundle's bytes, except those of its tokenizer."""
    parts = [
        MANIFEST_VERSION,
        checkpoint_sha256,
        options.model_dump(),
        versions(options),
        *compression.key,
    ]
    text = json.dumps(parts, sort_keys=True)
    return f"{checkpoint_name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(
    checkpoint: Checkpoint,
    options: Options,
    folder: Path,
    compression: Compression = ROUNDED,
) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened. A damaged one, and one with another tokenizer than the
    checkpoint's, is exported again, with a warning that states the reason.

    Raises:
        InputError: a checkpoint that cannot be exported. A cached bundle is then still
            there if the checkpoint's tokenizer is at fault.
    """
    path = folder / bundle_name(
        checkpoint.name, checkpoint.sha256, options, compression
    )
    # an error here is the checkpoint's: the cached bundle stays
    tokenizer = {file.name: sha256(file) for file in checkpoint.tokens.files()}
    with locked(path.with_name(f".{path.name}.lock")):
        try:
            cached = Bundle.open(path)
            if _tokenizer_files(cached) == tokenizer:
                return cached
            reason = "the checkpoint has another tokenizer now"
        except InputError as problem:
            if isinstance(problem.__cause__, OSError):  # unreadable, perhaps whole
                raise
            reason = problem
        if path.exists():
            text = f"the cached bundle {path.name} is exported again: {reason}"
            warnings.warn(text, stacklevel=2)
            shutil.rmtree(path)
        return _export(checkpoint, options, path, compression)


def _tokenizer_files(bundle: Bundle) -> dict[str, str]:
    """File name → SHA-256 of the tokenizer's files in a bundle."""
    entries = bundle.manifest.tokens.files
    return {Path(entry.path).name: entry.sha256 for entry in entries}
