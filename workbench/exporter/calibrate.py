"""Compresses a checkpoint's matrices with the inputs that they have on a text.

Hugging Face's own layers run one after the other over all windows of the text. A layer
first runs with its weights in fp16, while E[x xᵀ] of the inputs of each of its linear
modules is summed (`inputs.py`). Then its matrices are compressed, and it runs again with
their stored values, so that the layers behind it are calibrated on the inputs that they
will have. Memory holds one layer and the activations of the text. The head and a
projection of the embeddings for all layers are compressed in the slices that shards have
of them.

Matrices that are no linear module of their own, such as stacks of experts, cannot be
fitted: `CompressedMatrices` lists them, and the export rounds them to the nearest.

`calibrate` replaces Hugging Face's layers and linear modules by modules that compress
(`CompressingLayer`, `CompressingLinear`) and runs the model once. Finished matrices are in
a work folder (`MatrixFiles`), in which an interrupted export finds them again."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.bundle import Calibration, file_entries
from workbench.errors import InputError
from workbench.exporter.compress import InputStatistics, compress_matrix, decompress
from workbench.exporter.inputs import InputSum, summed_inputs
from workbench.exporter.threads import call_for_each
from workbench.exporter.weights import HEAD_WEIGHT, Arrays, WeightSource, load_values
from workbench.files import locked, write_whole
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer, empty_model, run_base
from workbench.progress import bar, stage

# Short windows, since most heads attend to the first token of each: its keys and values
# are in all outputs, and with 64 of them they weigh more and vary more.
WINDOW = 128  # tokens
WINDOWS = 64
CALIBRATION_IDS = "calibration.npy"  # in a bundle
WORK_KEY = "key.json"  # in a work folder


@dataclass(frozen=True)
class Text:
    """Token ids of a text, for calibration or for the selection of presets.

    Args:
        ids: [windows, window] int32.
        source: the name of the text.
        seed: of the draw of the windows.
    """

    ids: np.ndarray
    source: str
    seed: int = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of the ids, little-endian int32, row after row."""
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()

    def save(self, folder: Path, nearest: list[str]) -> Calibration:
        """Writes the ids to the folder of a bundle that they calibrated; returns their entry
        in its manifest.

        Args:
            nearest: the compressed tensors that were not fitted to the text.
        """
        np.save(folder / CALIBRATION_IDS, self.ids.astype("<i4"))
        windows, window = self.ids.shape
        return Calibration(
            file=file_entries(folder, folder / CALIBRATION_IDS)[0],
            ids_sha256=self.sha256,
            tokens=windows * window,
            window=window,
            seed=self.seed,
            source=self.source,
            nearest=nearest,
        )


def draw_windows(
    ids: Sequence[int],
    source: str,
    *,
    bos: int | None = None,
    seed: int = 0,
    window: int = WINDOW,
    windows: int = WINDOWS,
) -> Text:
    """Cuts a text into windows and draws `windows` of them, in the text's order; takes all
    windows where the text has no more.

    Args:
        bos: the token before every window, where the text begins with it.

    Raises:
        InputError: fewer than two tokens.
    """
    ids = np.asarray(ids, np.int32)
    prefix = ids[:0]
    if len(ids) and ids[0] == bos:
        prefix, ids = ids[:1], ids[1:]
    if len(ids) < 2:
        step = "give a longer text: 8,192 tokens serve well"
        raise InputError(source, f"{len(ids)} tokens", "a text to calibrate with", step)
    length = min(window - len(prefix), len(ids))
    pieces = ids[: len(ids) // length * length].reshape(-1, length)
    order = np.random.default_rng(seed).permutation(len(pieces))[:windows]
    pieces = pieces[np.sort(order)]
    before = np.broadcast_to(prefix, (len(pieces), len(prefix)))
    return Text(np.concatenate([before, pieces], 1), source, seed)


@dataclass(frozen=True)
class MatrixFiles:
    """Matrices that are compressed already, in a work folder.

    Args:
        folder: one file for each matrix, or slice of a matrix.
    """

    folder: Path

    def has(self, weight: WeightSource) -> bool:
        """Whether a matrix is finished."""
        return self._path(weight).is_file()

    def load(self, weight: WeightSource) -> Arrays:
        """The arrays of a finished matrix."""
        with np.load(self._path(weight)) as file:
            return dict(file)

    def save(self, weight: WeightSource, arrays: Arrays) -> None:
        """Writes the arrays of a matrix."""
        write_whole(self._path(weight), partial(np.savez, **arrays))

    def _path(self, weight: WeightSource) -> Path:
        start = f".{weight.rows.start}" if weight.rows else ""
        return self.folder / f"{weight.tensor}{start}.npz"


@dataclass(frozen=True)
class CompressedMatrices:
    """The result of a calibration: the compressed matrices of a checkpoint.

    Args:
        files: of the matrices that were fitted to the text.
        unfitted: names of the compressed tensors that were not, since no linear module
            has them; an export rounds them to the nearest.
    """

    files: MatrixFiles
    unfitted: frozenset[str]

    def has(self, weight: WeightSource) -> bool:
        """Whether a weight of the checkpoint is a matrix that was fitted."""
        return weight.is_compressed and weight.tensor not in self.unfitted

    def load(self, weight: WeightSource) -> Arrays:
        """The arrays of a fitted matrix."""
        return self.files.load(weight)


@dataclass(frozen=True)
class CalibrationRun:
    """The checkpoint, work folder and progress bar that the modules of one calibration
    share.

    Args:
        checkpoint: the modules read its tensors.
        weights: checkpoint tensor → the weight that stores it; only tensors that one weight
            stores whole.
        files: the matrices that are compressed already.
        progress: a bar that counts layers and slices of other matrices.
    """

    checkpoint: Checkpoint
    weights: dict[str, WeightSource]
    files: MatrixFiles
    progress: Any

    def compress_slices(self, slices: list[WeightSource], x: torch.Tensor) -> None:
        """Compresses and saves the slices of a matrix that are not finished, for inputs x
        [windows, window, C] of all of them."""
        missing = [weight for weight in slices if not self.files.has(weight)]
        if missing:
            statistics = InputSum.of(x).compute_statistics()
            self.compress([(weight, statistics) for weight in missing])
        self.progress.update(len(slices))

    def compress(self, matrices: list[tuple[WeightSource, InputStatistics]]) -> None:
        """Compresses and saves matrices, or slices of one, for the inputs of each."""

        def compress_one(matrix: tuple[WeightSource, InputStatistics]) -> None:
            weight, statistics = matrix
            values = load_values(weight, self.checkpoint).reshape(weight.shape[:2])
            self.files.save(weight, compress_matrix(values, weight.preset, statistics))

        def multiplications(matrix: tuple[WeightSource, InputStatistics]) -> int:
            rows, width = matrix[0].shape[:2]
            return rows * width**2

        # the longest first: the last one of a layer leaves other threads without work
        call_for_each(compress_one, sorted(matrices, key=multiplications, reverse=True))

    def stored_values(self, weight: WeightSource) -> torch.Tensor:
        """The values [R, C] float32 of a finished matrix."""
        arrays = self.files.load(weight)
        return decompress(arrays, weight.preset, weight.shape[:2]).float()


class CompressingLayer(WrappedLayer):
    """A decoder layer that compresses its matrices when it is called, and computes its
    outputs with what is stored.

    Args:
        prefix: of the names of the layer's tensors in the checkpoint.
    """

    def __init__(self, layer: nn.Module, prefix: str, run: CalibrationRun):
        super().__init__(layer)
        self.prefix = prefix
        self.run = run

    def forward(self, *args, **kwargs):
        values = self._checkpoint_values()
        weights = self._linear_weights()
        if not all(map(self.run.files.has, weights.values())):
            linear = {
                name: self.layer.get_submodule(name.removesuffix(".weight"))
                for name in weights
            }
            with summed_inputs(linear) as sums:
                functional_call(self.layer, values, args, kwargs)
            self._compress(weights, sums)
        for name, weight in weights.items():
            # a module that the layer does not call has no inputs, and is not compressed
            if self.run.files.has(weight):
                values[name] = self.run.stored_values(weight)
        self.run.progress.update()
        return functional_call(self.layer, values, args, kwargs)

    def _checkpoint_values(self) -> dict[str, torch.Tensor]:
        """Parameter → its values in the checkpoint, rounded to fp16, in float32."""
        read = self.run.checkpoint.tensor
        names = self.layer.state_dict()
        return {name: read(self.prefix + name).half().float() for name in names}

    def _linear_weights(self) -> dict[str, WeightSource]:
        """Parameter → the weight that stores it, of the matrix of every linear module that
        a preset compresses."""
        weights = {}
        for name, module in self.layer.named_modules():
            weight = self.run.weights.get(f"{self.prefix}{name}.weight")
            if isinstance(module, nn.Linear) and weight:
                weights[f"{name}.weight"] = weight
        return weights

    def _compress(
        self, weights: dict[str, WeightSource], sums: dict[str, InputSum]
    ) -> None:
        """Compresses and saves matrices.

        Args:
            weights: parameter → the weight that stores it.
            sums: parameter → the sum of its inputs; none of a module that was not called.
        """
        statistics: dict[int, InputStatistics] = {}  # matrices of one input share them
        matrices = []
        for name, total in sums.items():
            if id(total) not in statistics:
                statistics[id(total)] = total.compute_statistics()
            matrices.append((weights[name], statistics[id(total)]))
        self.run.compress(matrices)


class CompressingLinear(nn.Module):
    """A linear module outside the layers, without a bias, that compresses its matrix when
    it is called, and computes its outputs with what is stored. It has no parameters.

    Args:
        slices: the weights that store the matrix, in the order of their rows.
    """

    def __init__(self, slices: list[WeightSource], run: CalibrationRun):
        super().__init__()
        self.slices = slices
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.run.compress_slices(self.slices, x)
        pieces = [self.run.stored_values(weight) for weight in self.slices]
        return nn.functional.linear(x, torch.cat(pieces))


@torch.inference_mode()
def calibrate(
    checkpoint: Checkpoint, weights: list[WeightSource], text: Text, folder: Path
) -> CompressedMatrices:
    """Compresses every matrix of `weights` that is a linear module of a layer, of the
    model around the layers, or the head.

    Matrices in `folder` that an earlier call with the same checkpoint, weights and text has
    finished are kept; anything else in the folder is removed.

    Args:
        weights: of all shards.
        folder: a work folder.
    """
    matrices = [weight for weight in weights if weight.is_compressed]
    key = {
        "code": code_version(),
        "checkpoint": checkpoint.sha256,
        "ids": text.sha256,
        "presets": [[w.tensor, repr(w.rows), w.preset.name] for w in matrices],
        "seed": text.seed,
    }
    prepare_work_folder(folder, key)
    files = MatrixFiles(folder)
    head = [weight for weight in matrices if weight.path == HEAD_WEIGHT]
    whole = {weight.tensor: weight for weight in matrices if weight.rows is None}
    base = empty_model(checkpoint.config, "sdpa").model
    outer = _outer_slices(base, checkpoint, matrices)
    total = len(base.layers) + len(head) + sum(map(len, outer.values()))
    stage("export: calibrating weights")
    with bar(total=total, desc="calibrate", unit="layer", leave=False) as progress:
        run = CalibrationRun(checkpoint, whole, files, progress)
        for name, slices in outer.items():
            setattr(base, name, CompressingLinear(slices, run))
        for index, layer in enumerate(base.layers):
            prefix = f"{checkpoint.prefix}layers.{index}."
            base.layers[index] = CompressingLayer(layer, prefix, run)

        def read(name: str) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + name).half()

        def embed(table: str, ids: np.ndarray) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + table, ids.tolist()).half()

        hidden = run_base(base, text.ids, embed, read, use_cache=False)
        run.compress_slices(head, hidden)
    unfitted = frozenset(w.tensor for w in matrices if not files.has(w))
    return CompressedMatrices(files, unfitted)


def _outer_slices(
    base: nn.Module, checkpoint: Checkpoint, matrices: list[WeightSource]
) -> dict[str, list[WeightSource]]:
    """Name of each linear module of the model that is around the layers → the slices of
    its matrix."""
    outer = {}
    for name, module in base.named_children():
        tensor = f"{checkpoint.prefix}{name}.weight"
        slices = [weight for weight in matrices if weight.tensor == tensor]
        if isinstance(module, nn.Linear) and module.bias is None and slices:
            outer[name] = slices
    return outer


@cache
def code_version() -> str:
    """SHA-256 of the source files of this package. A work folder that other code has
    filled is emptied."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def prepare_work_folder(folder: Path, key: dict) -> None:
    """Makes a work folder for results that `key`, as JSON, decides. One with another key
    is emptied first."""
    text = json.dumps(key, sort_keys=True)
    file = folder / WORK_KEY
    if folder.is_dir() and not (file.is_file() and file.read_text() == text):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@contextmanager
def work_folder(bundle: Path) -> Iterator[Path]:
    """The folder beside a new bundle in which its calibration is kept until the bundle
    is written. A run that is killed leaves it, and the next one goes on from there."""
    folder = bundle.parent / f".{bundle.name}.calibration"
    busy = InputError(
        f"bundle {bundle}",
        "another export calibrating for it",
        "one export to one target",
        "wait for that one, or choose another target",
    )
    # `bundle_for` locks the bundle's name with another suffix
    lock = folder.with_name(f"{folder.name}.lock")
    with locked(lock, busy):
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    lock.unlink(missing_ok=True)
