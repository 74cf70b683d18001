"""Every matrix of a model in every format that it may have, compressed for the inputs that
it has in the unchanged model.

The values of all candidates are in a folder, which an interrupted export finds again.
Memory has those of one matrix at a time."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from workbench.bundle.presets import FP16, Preset
from workbench.exporter.calibrate import input_statistics
from workbench.exporter.compress import InputStatistics, compress_matrix, decompress
from workbench.exporter.replaceable import HEAD
from workbench.exporter.shards import HEAD_ROWS
from workbench.files import write_whole
from workbench.progress import bar, stage

MAX_THREADS = 2
"""Formats in which one matrix is compressed at a time."""


class CandidateValues:
    """The values of matrices in several formats.

    Args:
        folder: one file of fp16 values for each matrix and preset.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, tensor: str, preset: str) -> Path:
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
    """Stores every matrix in every format. Values that are stored already are left as
    they are.

    Args:
        model: Hugging Face's, in float32.
        modules: tensor name → name of the `nn.Linear`.
        ids: [windows, window] tokens of the text for calibration, int64.
        presets: tensor name → its formats.
    """
    last_input: torch.Tensor | None = None
    statistics: InputStatistics | None = None
    stage("export: compressing every matrix in every format")
    progress = bar(total=len(modules), desc="formats", unit="matrix", leave=False)

    def store_matrix(tensor: str, module: nn.Linear, arguments: tuple) -> None:
        nonlocal last_input, statistics
        missing = [
            preset
            for preset in presets[tensor]
            if not candidates.path(tensor, preset.name).is_file()
        ]
        needs_inputs = any(preset != FP16 for preset in missing)
        # q, k and v read the same tensor: its statistics are computed once
        if needs_inputs and arguments[0] is not last_input:
            last_input = arguments[0]
            statistics = input_statistics(last_input)
        values = module.weight.detach().half()
        store_in = partial(_store_values, candidates, tensor, values, statistics)
        list(pool.map(store_in, missing))  # raises what one of them has raised
        progress.update()

    # threads gain: most of the time none of them holds Python's lock
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        with torch.inference_mode(), ExitStack() as hooks:
            for tensor, name in modules.items():
                module = model.get_submodule(name)
                hook = partial(store_matrix, tensor)
                hooks.enter_context(module.register_forward_pre_hook(hook))
            # without the head: its logits of all tokens would fill the memory
            hidden = model.model(input_ids=ids, use_cache=False)[0]
        for tensor, name in modules.items():
            if name == HEAD:
                store_matrix(tensor, model.get_submodule(name), (hidden,))
    progress.close()


@torch.inference_mode()  # a mode of the thread
def _store_values(
    candidates: CandidateValues,
    tensor: str,
    values: torch.Tensor,
    inputs: InputStatistics | None,
    preset: Preset,
) -> None:
    """Stores one matrix [R, K] fp16 in one format."""
    if preset != FP16:
        values = compressed_values(values, preset, inputs)
    candidates.save(tensor, preset.name, values)


def compressed_values(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> torch.Tensor:
    """The values [R, K] fp16 that a matrix has when it is stored, a slice of rows at a
    time, as the slices of the head are stored."""
    pieces = []
    for piece in values.split(HEAD_ROWS):
        arrays = compress_matrix(piece, preset, inputs)
        pieces.append(decompress(arrays, preset, tuple(piece.shape)))
    return torch.cat(pieces)
