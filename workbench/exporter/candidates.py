"""Compresses every matrix of a model in every preset that a search may choose, for the
inputs that the matrix has in the unchanged model.

The values of all candidates are in a folder, which an interrupted export finds again.
Memory holds those of one matrix at a time."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.bundle.presets import FP16, Preset
from workbench.exporter.compress import InputStatistics, compress_matrix, decompress
from workbench.exporter.inputs import InputSum, LastInput
from workbench.exporter.replaceable import HEAD
from workbench.exporter.shards import HEAD_ROWS
from workbench.exporter.threads import call_for_each
from workbench.files import write_whole
from workbench.progress import bar, stage


class CandidateValues:
    """The values of matrices in several presets.

    Args:
        folder: one file of fp16 values for each matrix and preset.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, tensor: str, preset: str) -> Path:
        """The file of a matrix in a preset, by their names."""
        # a hash, since a tensor's name may be longer than a file's
        name = hashlib.sha256(f"{tensor} {preset}".encode()).hexdigest()
        return self.folder / f"{name[:32]}.npy"

    def save(self, tensor: str, preset: str, values: torch.Tensor) -> None:
        """Writes values [R, K] as fp16."""
        array = values.half().numpy()
        write_whole(self.path(tensor, preset), partial(np.save, arr=array))

    def load(self, tensor: str, preset: str) -> torch.Tensor:
        """Values [R, K] in float32."""
        return torch.from_numpy(np.load(self.path(tensor, preset))).float()


def store_candidates(
    model: nn.Module,
    modules: Mapping[str, str],
    ids: torch.Tensor,
    presets: Mapping[str, Sequence[Preset]],
    candidates: CandidateValues,
) -> None:
    """Stores every matrix in every preset. Values that are stored already are left as
    they are.

    Args:
        model: Hugging Face's, in float32.
        modules: tensor name → name of the `nn.Linear`.
        ids: [windows, window] tokens of the text for calibration, int64.
        presets: tensor name → its presets.
    """
    stage("export: compressing every matrix in every format")
    progress = bar(total=len(modules), desc="formats", unit="matrix", leave=False)
    writer = _CandidateWriter(presets, candidates, progress)
    with torch.inference_mode(), ExitStack() as hooks:
        for tensor, name in modules.items():
            module = model.get_submodule(name)
            hook = partial(writer.store_when_called, tensor)
            hooks.enter_context(module.register_forward_pre_hook(hook))
        # without the head: its logits of all tokens would fill the memory
        hidden = model.model(input_ids=ids, use_cache=False)[0]
    for tensor, name in modules.items():
        if name == HEAD:
            writer.store(tensor, model.get_submodule(name), hidden)
    progress.close()


@dataclass
class _CandidateWriter:
    """Stores matrices while the model runs, see `store_candidates`.

    Args:
        progress: counts matrices.
        statistics: of the last input that a module has read.
    """

    presets: Mapping[str, Sequence[Preset]]
    candidates: CandidateValues
    progress: Any
    statistics: LastInput[InputStatistics] = field(default_factory=LastInput)

    def store_when_called(
        self, tensor: str, module: nn.Linear, arguments: tuple
    ) -> None:
        """Stores the matrix of a module that is about to be called. With `tensor` bound it is
        a forward pre-hook."""
        self.store(tensor, module, arguments[0])

    def store(self, tensor: str, module: nn.Linear, x: torch.Tensor) -> None:
        """Stores the matrix of a module for its inputs x [windows, window, C] in every
        preset that is missing."""
        missing = [
            preset
            for preset in self.presets[tensor]
            if not self.candidates.path(tensor, preset.name).is_file()
        ]
        statistics = None
        if any(preset != FP16 for preset in missing):
            statistics = self._statistics_of(x)
        values = module.weight.detach().half()

        def store_in(preset: Preset) -> None:
            if preset == FP16:
                compressed = values
            else:
                compressed = compressed_values(values, preset, statistics)
            self.candidates.save(tensor, preset.name, compressed)

        call_for_each(store_in, missing)
        self.progress.update()

    def _statistics_of(self, x: torch.Tensor) -> InputStatistics:
        statistics = self.statistics.find(x)
        if statistics is None:
            statistics = InputSum.of(x).compute_statistics()
            self.statistics.set(x, statistics)
        return statistics


def compressed_values(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> torch.Tensor:
    """The values [R, K] fp16 of a matrix once it is compressed. `HEAD_ROWS` rows are
    compressed at a time, as an export stores a head in slices."""
    pieces = []
    for piece in values.split(HEAD_ROWS):
        arrays = compress_matrix(piece, preset, inputs)
        pieces.append(decompress(arrays, preset, tuple(piece.shape)))
    return torch.cat(pieces)
