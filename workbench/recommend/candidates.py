"""The values and the bytes of a checkpoint's matrices in presets other than that of its
bundle. Nothing is exported."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from workbench import escape, paths
from workbench.bundle import PRESETS, Bundle, Options
from workbench.bundle.presets import FP16
from workbench.check.golden import stored_weights
from workbench.check.hf import Weights
from workbench.errors import InputError
from workbench.exporter import make_options, read_plan
from workbench.exporter.allocation import matrix_bytes
from workbench.exporter.weights import (
    WeightSource,
    all_weights,
    encode_weight,
    find_presets,
    load_values,
)
from workbench.files import output_root
from workbench.models.checkpoint import Checkpoint

# Options of `workbench export` that `export_command` writes beside --compress.
NAMED_OPTIONS = (
    "max_seq_len",
    "tokens",
    "batch",
    "layers_per_shard",
    "kv_write",
    "layout",
    "moe",
    "sliding",
    "target",
)
CALIBRATION_TEXT = "data/calibration.txt"
# An export of SmolLM2-135M-Instruct (134.5 million weights) in lut6-g16 with 64 windows
# of 128 tokens took 57 s on two cores.
CALIBRATION_SECONDS_PER_WEIGHT = 57 / 134.5e6


@dataclass(frozen=True)
class PresetWeights:
    """Reads a checkpoint's tensors with the values that an export without a calibration
    text would store: bit for bit those of `check.golden.stored_weights`.

    Attributes:
        sources: every weight of every shard.
    """

    checkpoint: Checkpoint
    sources: list[WeightSource]

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor by its name in the checkpoint. One that no shard stores is rounded to
        fp16."""
        return self._head if name == self.checkpoint.head else self._read(name)

    @cached_property
    def _head(self) -> torch.Tensor:
        # every batch of logits reads it
        return self._read(self.checkpoint.head)

    @cached_property
    def _by_tensor(self) -> dict[str, list[WeightSource]]:
        by_tensor: dict[str, list[WeightSource]] = {}
        for source in self.sources:
            if source.tensor:
                by_tensor.setdefault(source.tensor, []).append(source)
        return by_tensor

    def _read(self, name: str) -> torch.Tensor:
        sources = self._by_tensor.get(name)
        if not sources:
            return self.checkpoint.tensor(name).half().float()
        shape = self.checkpoint.shape(name)
        if sources[0].rows is None:
            # several sources are copies: every slice of a head has the whole final norm
            value = decompressed(sources[0], self.checkpoint).reshape(shape)
        else:
            value = self._join_rows(sources, shape)
        # in fp32, since fp16 would round the difference once more
        if offset := sources[0].offset:
            return value.float() - offset
        return value

    def _join_rows(
        self, sources: list[WeightSource], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor of a shape from the parts of its rows, such as the slices of a head."""
        parts = [
            decompressed(source, self.checkpoint).reshape(-1, *shape[1:])
            for source in sorted(sources, key=lambda source: source.rows.start)
        ]
        return torch.cat(parts)


def decompressed(weight: WeightSource, checkpoint: Checkpoint) -> torch.Tensor:
    """The values [R, C] fp16 that an export stores of a weight, with its offset."""
    from workbench.exporter.compress import decompress  # numba takes a moment to import

    values = load_values(weight, checkpoint)
    if weight.preset == FP16:
        return values
    shape = weight.shape[0], math.prod(weight.shape[1:])
    return decompress(encode_weight(weight, values), weight.preset, shape)


def stored_bytes(weight: WeightSource) -> int:
    """Bytes of a weight in a package, its scales and tables included."""
    rows = weight.shape[0] if weight.shape else 1
    return matrix_bytes(rows, math.prod(weight.shape[1:]), weight.preset)


@dataclass(frozen=True)
class Candidate:
    """One way to store a checkpoint's matrices.

    Attributes:
        compress: the preset's name.
        bytes: of the whole bundle; exact where it is finished, else computed from the
            sizes of the matrices.
        weights: reads the tensors; None where a calibration would have to choose their
            values first.
        command: exports the candidate, or validates it where it is finished.
        export_seconds: an estimate of the export's time, where it needs a calibration;
            None otherwise.
        finished: the bundle, where it is finished.
    """

    compress: str
    bytes: int
    weights: Weights | None
    command: str
    export_seconds: float | None = None
    finished: Bundle | None = field(default=None, repr=False)


def list_candidates(checkpoint: Checkpoint, bundle: Bundle) -> list[Candidate]:
    """Every other way to store the matrices of a bundle, the smallest first: the presets
    that `export` offers, and finished bundles of the checkpoint whose matrices were
    fitted to a calibration text. An allocation of presets to matrices is such a bundle
    too.

    Presets that the checkpoint or the bundle's target does not allow are left out."""
    manifest = bundle.manifest
    plan = read_plan(checkpoint, manifest.options)
    presets = find_presets(manifest.formats)  # of a mixed bundle, of every matrix
    weights = all_weights(checkpoint, plan, manifest.options, presets)
    # programs, embeddings, tokenizer
    other_bytes = bundle.bytes - sum(map(stored_bytes, weights))
    result = list(_finished_bundles(checkpoint, bundle))
    excluded = {candidate.compress for candidate in result}
    excluded.add(manifest.options.compress)
    for name in PRESETS:
        if name in excluded:
            continue
        fields = manifest.options.model_dump() | {"compress": name}
        try:
            options = make_options(**fields)
            sources = all_weights(checkpoint, plan, options)
        except InputError:
            continue
        result.append(_unexported(checkpoint, options, sources, other_bytes))
    return sorted(result, key=lambda candidate: candidate.bytes)


def _unexported(
    checkpoint: Checkpoint,
    options: Options,
    sources: list[WeightSource],
    other_bytes: int,
) -> Candidate:
    """A candidate that no bundle stores.

    Args:
        options: of the export.
        sources: every weight of every shard, with its preset.
        other_bytes: of the bundle's files beside weights.
    """
    if options.preset.needs_calibration:
        reader = None
        export_seconds = CALIBRATION_SECONDS_PER_WEIGHT * sum(
            math.prod(w.shape) for w in sources
        )
    else:
        reader, export_seconds = PresetWeights(checkpoint, sources), None
    size = other_bytes + sum(map(stored_bytes, sources))
    command = export_command(checkpoint, options)
    return Candidate(options.compress, size, reader, command, export_seconds)


def export_command(checkpoint: Checkpoint, options: Options) -> str:
    """The command that exports a checkpoint with these options, for a shell in the current
    folder."""
    folder = checkpoint.path
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    words = ["workbench", "export", str(folder)]
    words.append(f"build/{checkpoint.name}-{options.compress}")
    words += ["--compress", options.compress]
    for name in NAMED_OPTIONS:
        value = getattr(options, name)
        if value != Options.model_fields[name].default or name == "max_seq_len":
            words += [f"--{name.replace('_', '-')}", str(value)]
    if options.preset.needs_calibration:
        text = CALIBRATION_TEXT if Path(CALIBRATION_TEXT).is_file() else "TEXT"
        words += ["--calibrate", text]
    return escape.shell(words)


def _finished_bundles(checkpoint: Checkpoint, bundle: Bundle) -> Iterator[Candidate]:
    """Yields finished bundles of the checkpoint whose matrices were fitted to a text, one
    for each preset other than that of `bundle`: the first by its path. They are looked
    for beside `bundle` and in the project's data/bundles."""
    folders = {bundle.root.parent, (output_root() / "data" / "bundles").resolve()}
    roots = [
        file.parent
        for folder in sorted(folders)
        for file in sorted(folder.glob(f"*/{paths.BUNDLE}"))
    ]
    excluded = {bundle.manifest.options.compress}
    for root in roots:
        try:
            other = Bundle.open(root)
        except InputError:  # another version, or unfinished
            continue
        manifest = other.manifest
        name = manifest.options.compress
        is_of_checkpoint = manifest.checkpoint["sha256"] == checkpoint.sha256
        if name in excluded or not is_of_checkpoint or not manifest.calibration:
            continue
        excluded.add(name)
        weights = stored_weights(checkpoint, other, keep_dtype=True)
        words = ["workbench", "validate", str(other.root)]
        command = escape.shell([*words, "--checkpoint", str(checkpoint.path)])
        yield Candidate(name, other.bytes, weights, command, finished=other)
