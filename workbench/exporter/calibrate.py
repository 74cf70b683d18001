"""Compresses a checkpoint's matrices with the inputs that they have on a text.

Hugging Face's own layers run one after the other over all windows of the text. A layer
first runs with its weights in fp16, while E[x xᵀ] of the inputs of each of its linear
modules is summed; then its matrices are compressed; then it runs again with what is
stored, so that the layers behind it are calibrated on the inputs that they will have.
Memory holds one layer and the activations of the text. The head and a projection of the
embeddings for all layers are compressed in the slices that shards have of them.

Matrices that are no linear module of their own, such as stacks of experts, cannot be
fitted: `CompressedMatrices` lists them, and the export rounds them to the nearest.

`calibrate` puts modules that compress (`CompressingLayer`, `CompressingLinear`) in the
place of Hugging Face's and runs the model once. Finished matrices are in a work folder
(`MatrixFiles`), in which an interrupted export finds them again."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.bundle import Calibration, file_entries
from workbench.errors import InputError
from workbench.exporter.compress import InputStatistics, compress_matrix, decompress
from workbench.exporter.weights import HEAD_WEIGHT, Arrays, WeightSource, load_values
from workbench.files import locked, write_whole
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer, empty_model, run_base
from workbench.progress import bar, stage

# Short windows, since most heads attend to the first token of each: its keys and values
# are in all outputs, and with 64 of them they weigh more and vary more.
WINDOW = 128  # tokens
WINDOWS = 64
IDS = "calibration.npy"  # in a bundle
KEY = "key.json"  # in a work folder
Result = TypeVar("Result")


@dataclass(frozen=True)
class Text:
    """Token ids to calibrate with.

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
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()

    def record(self, folder: Path, nearest: list[str]) -> Calibration:
        """Writes the ids to a bundle's folder; returns their entry in its manifest.

        Args:
            nearest: the compressed tensors that were not fitted to them.
        """
        np.save(folder / IDS, self.ids.astype("<i4"))
        windows, window = self.ids.shape
        return Calibration(
            file=file_entries(folder, folder / IDS)[0],
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
    """Cuts a text into windows and draws `windows` of them, in the text's order; all of
    a shorter text.

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
    """What the layers of one calibration share.

    Args:
        checkpoint: from which a layer reads its tensors.
        weights: checkpoint tensor → the weight that stores it whole.
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
            statistics = input_statistics(x)
        for weight in missing:
            self.compress(weight, statistics)
        self.progress.update(len(slices))

    def compress(self, weight: WeightSource, statistics: InputStatistics) -> None:
        """Compresses and saves a matrix, or a slice of one, for its inputs."""
        matrix = load_values(weight, self.checkpoint).reshape(weight.shape[:2])
        arrays = compress_matrix(matrix, weight.preset, statistics)
        self.files.save(weight, arrays)

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
        read = self.run.checkpoint.tensor
        values = {
            name: read(self.prefix + name).half().float()
            for name in self.layer.state_dict()
        }
        weights: dict[str, WeightSource] = {}  # of the linear modules, by parameter
        for name, module in self.layer.named_modules():
            weight = self.run.weights.get(f"{self.prefix}{name}.weight")
            if isinstance(module, nn.Linear) and weight:
                weights[f"{name}.weight"] = weight
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

    def _compress(
        self, weights: dict[str, WeightSource], sums: "dict[str, InputSum]"
    ) -> None:
        """Compresses and saves matrices.

        Args:
            weights: of the layer, by the name of the parameter.
            sums: of the inputs, by the same names.
        """
        statistics: dict[int, InputStatistics] = {}  # matrices of one input share them
        for name, total in sums.items():
            if id(total) not in statistics:
                statistics[id(total)] = total.compute_statistics()
            self.run.compress(weights[name], statistics[id(total)])


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


class LastInput(Generic[Result]):
    """The result that was computed for the last input of linear modules. Modules such as q,
    k and v read one tensor in turn, for which the result is computed once."""

    def __init__(self):
        # The tensor is kept, not its address: another one at the address of a freed one
        # would be taken for it.
        self._x: torch.Tensor | None = None
        self._result: Result | None = None

    def find(self, x: torch.Tensor) -> Result | None:
        """The result for the tensor `x` itself; None: it is not the last one."""
        return self._result if x is self._x else None

    def set(self, x: torch.Tensor, result: Result) -> None:
        """Remembers a result in place of the one before."""
        self._x, self._result = x, result


class InputSum:
    """The sum of x xᵀ over the inputs x of linear modules."""

    def __init__(self):
        self.total = torch.zeros(())
        self.squares: list[torch.Tensor] = []  # |x|² of every input

    def add(self, x: torch.Tensor) -> None:
        """Adds inputs [.., C], a window at a time."""
        for window in x.reshape(-1, *x.shape[-2:]):
            self.total = self.total + (window.T @ window).double()
        self.squares.append(x.square().sum(-1).flatten())

    @property
    def count(self) -> int:
        """The number of inputs."""
        return sum(map(len, self.squares))

    def compute_statistics(self) -> InputStatistics:
        """What the rounding of the modules' matrices needs to know. It takes a Cholesky
        decomposition of a matrix [C, C].

        The damping is the median |x|² over the number of inputs: the sampling error of
        an ordinary input's correlations. The mean of H's diagonal would not do. An
        attention sink's input of a down projection can be hundreds of times as long as
        any other, and damping that grows with it would drown all others."""
        median = float(torch.cat(self.squares).median())
        return InputStatistics.of(self.total / self.count, median / self.count)


def input_statistics(x: torch.Tensor) -> InputStatistics:
    """The statistics of inputs [windows, window, C]."""
    total = InputSum()
    total.add(x)
    return total.compute_statistics()


@contextmanager
def summed_inputs(linear: dict[str, nn.Module]) -> Iterator[dict[str, InputSum]]:
    """Sums the inputs of modules by their names while they run; modules that read one
    tensor share a sum."""
    sums: dict[str, InputSum] = {}
    last_input: LastInput[InputSum] = LastInput()

    def record(name: str, module: nn.Module, arguments: tuple) -> None:
        x = arguments[0]
        total = last_input.find(x)
        if total is not None:
            sums.setdefault(name, total)
            return
        total = sums.setdefault(name, InputSum())
        total.add(x)
        last_input.set(x, total)

    with ExitStack() as hooks:
        for name, module in linear.items():
            hook = partial(record, name)
            hooks.enter_context(module.register_forward_pre_hook(hook))
        yield sums


@torch.inference_mode()
def calibrate(
    checkpoint: Checkpoint, weights: list[WeightSource], text: Text, folder: Path
) -> CompressedMatrices:
    """Compresses every matrix of `weights` that is a linear module of a layer, of the
    model around the layers, or the head.

    What an earlier call with the same checkpoint, weights and text has finished in
    `folder` is kept; anything else in it is removed.

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
    file = folder / KEY
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
