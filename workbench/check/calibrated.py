"""The part of gate `weights` for matrices whose values were fitted to a calibration text.

Such values are judged row by row, by the inputs that the rows multiply; `row_statistics`
has the figures and their limits. This file computes the inputs, without the exporter's
code. Hugging Face's layers run one after the other over the token ids that the bundle
keeps, with the stored matrices, and x xᵀ is summed over the inputs x of each linear
module.

An exporter may have fitted o_proj and down_proj while the other matrices of their layer
had the checkpoint's values. A matrix that exceeds a limit is therefore judged again by
its inputs in a layer with these values, and is sound if it keeps the limits in one of
the two cases.

Memory holds one layer, the H of its inputs, and one slice of the head.

`judge_matrices` is the entry: it exchanges the layers of Hugging Face's model for
`JudgedLayer`s, and linear modules around them for `JudgedLinear`s, and runs the model."""

import hashlib
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.bundle import Bundle
from workbench.check.deviation import Deviation, worst_of
from workbench.check.row_statistics import (
    FittedRows,
    InputWeights,
    Moment,
    matrix_deviations,
)
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer, empty_model, run_base
from workbench.progress import bar

# A tensor's name in the checkpoint → its slices, shard after shard, and in a package of
# several functions the copies of each.
ReadRows = Callable[[str], Iterator[FittedRows]]


def judge_by_moments(
    fitted: dict[str, list[FittedRows]], moments: dict[str, list[Moment]]
) -> dict[str, list[Deviation]]:
    """The deviations of matrices by their names.

    Args:
        fitted: a matrix's name → its slices.
        moments: the name → the moments of its inputs, one for each call; matrices that
            read the same inputs have the same objects.
    """
    inputs: dict[tuple[int, ...], InputWeights] = {}
    results = {}
    for name, calls in moments.items():
        key = tuple(id(moment) for moment in calls)
        if key not in inputs:
            inputs[key] = InputWeights.of(calls)
        results[name] = matrix_deviations(fitted[name], inputs[key])
    return results


def worst_ratio(deviations: list[Deviation]) -> float:
    """The largest ratio to a limit."""
    return worst_of(deviations).ratio_to_limit


@contextmanager
def recorded_moments(
    modules: dict[str, nn.Module],
) -> Iterator[dict[str, list[Moment]]]:
    """Yields the moments of what modules read, by the modules' names, one for each call;
    modules that read the same tensor have the same object. They are filled in while the
    modules run."""
    moments: dict[str, list[Moment]] = {}
    # The tensor is kept: another one at the address of a freed one would be taken for it.
    last_input: torch.Tensor | None = None
    last_moment: Moment | None = None

    def record(name: str, module: nn.Module, arguments: tuple) -> None:
        nonlocal last_input, last_moment
        if arguments[0] is not last_input:
            last_input = arguments[0]
            last_moment = Moment.of(last_input)
        moments.setdefault(name, []).append(last_moment)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = partial(record, name)
            hooks.enter_context(module.register_forward_pre_hook(hook))
        yield moments


@dataclass(frozen=True)
class Judgement:
    """What `JudgedLayer`s share: what they read, and `results`, which they fill in.

    Attributes:
        tensors: names of the matrices to judge.
        read_rows: reads a matrix as it is stored.
        results: deviations of the matrices that were judged, by their names.
        progress: a bar that counts layers.
    """

    checkpoint: Checkpoint
    tensors: set[str]
    read_rows: ReadRows
    results: dict[str, list[Deviation]]
    progress: Any


class JudgedLayer(WrappedLayer):
    """A decoder layer that runs on its stored matrices and judges them by their
    inputs."""

    def __init__(self, layer: nn.Module, prefix: str, judgement: Judgement):
        super().__init__(layer)
        self.prefix = prefix
        self.judgement = judgement

    def forward(self, *args, **kwargs):
        linear = {
            f"{name}.weight": module
            for name, module in self.layer.named_modules()
            if isinstance(module, nn.Linear)
        }
        stored, values = self._read_weights(linear)
        with recorded_moments({name: linear[name] for name in stored}) as moments:
            output = functional_call(self.layer, values, args, kwargs)
        results = judge_by_moments(stored, moments)
        doubtful = [name for name, result in results.items() if worst_ratio(result) > 1]
        if doubtful:
            for name in stored:
                values[name] = checkpoint_matrix(stored[name])
            with recorded_moments({name: linear[name] for name in doubtful}) as moments:
                functional_call(self.layer, values, args, _with_copied_caches(kwargs))
            for name, result in judge_by_moments(stored, moments).items():
                results[name] = min(results[name], result, key=worst_ratio)
        for name, result in results.items():
            self.judgement.results[self.prefix + name] = result
        self.judgement.progress.update()
        return output

    def _read_weights(
        self, linear: Collection[str]
    ) -> tuple[dict[str, list[FittedRows]], dict[str, torch.Tensor]]:
        """Parameter → slices, of the matrices to judge; and parameter → values float32, of
        all parameters of the layer, those matrices as they are stored.

        Args:
            linear: names of the parameters that are weights of linear modules.
        """
        judgement = self.judgement
        stored, values = {}, {}
        for name in self.layer.state_dict():
            tensor = self.prefix + name
            if tensor in judgement.tensors and name in linear:
                stored[name] = [*judgement.read_rows(tensor)]
                values[name] = stored_matrix(stored[name])
            else:
                values[name] = judgement.checkpoint.tensor(tensor).half().float()
        return stored, values


def _with_copied_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a layer with shallow copies of its dictionaries. A layer
    may put K and V rows in one for later layers, which are to have those of the run with
    the stored matrices."""
    return {
        name: copy(value) if isinstance(value, MutableMapping) else value
        for name, value in arguments.items()
    }


class JudgedLinear(nn.Module):
    """A linear module outside the layers, without a bias, that runs on its stored matrix
    and judges it by its inputs. It has no parameters."""

    def __init__(self, tensor: str, judgement: Judgement):
        super().__init__()
        self.tensor = tensor
        self.judgement = judgement

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [*self.judgement.read_rows(self.tensor)]
        inputs = InputWeights.of([Moment.of(x)])
        self.judgement.results[self.tensor] = matrix_deviations(rows, inputs)
        self.judgement.progress.update()
        return nn.functional.linear(x, stored_matrix(rows))


def stored_matrix(parts: Sequence[FittedRows]) -> torch.Tensor:
    """The matrix [R, C] that slices of it store."""
    return _join_rows((part.first, part.stored) for part in parts)


def checkpoint_matrix(parts: Sequence[FittedRows]) -> torch.Tensor:
    """The matrix [R, C] of the checkpoint, rounded to fp16, whose slices are stored."""
    return _join_rows((part.first, part.values) for part in parts)


def _join_rows(slices: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """One matrix of (number of the first row, rows). Every function of a package stores
    all rows; one copy of them is taken."""
    by_first_row = dict(slices)
    return torch.cat([by_first_row[first] for first in sorted(by_first_row)])


def calibration_ids(bundle: Bundle) -> np.ndarray:
    """The token ids [windows, window] of the text that a bundle's values were fitted to.

    Raises:
        ValueError: ids that are not the manifest's, or not in the vocabulary.
    """
    record, V = bundle.manifest.calibration, bundle.manifest.dims.V
    ids = bundle.calibration_ids
    is_shape = ids.ndim == 2 and ids.shape[1] == record.window
    if ids.dtype.kind not in "iu" or not is_shape or ids.size != record.tokens:
        raise ValueError(
            f"calibration: token ids {ids.dtype} {[*ids.shape]}, not the "
            f"{record.tokens} integers of the manifest in windows of {record.window}"
        )
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    if digest != record.ids_sha256:
        raise ValueError(
            "calibration: token ids of another SHA-256 than the manifest's"
        )
    if ids.min() < 0 or ids.max() >= V:
        raise ValueError(
            f"calibration: token ids from {ids.min()} to {ids.max()}, not all in the "
            f"vocabulary of {V}"
        )
    return ids


def fitted_tensors(checkpoint: Checkpoint) -> set[str]:
    """The checkpoint's tensors that calibration can fit: the weights of linear modules
    in and around the layers, and the head."""
    tensors = {checkpoint.head}
    base = empty_model(checkpoint.config).model
    names = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("layers.")
    ]
    for name in [*names, *outer_linear(base)]:
        tensors.add(f"{checkpoint.prefix}{name}.weight")
    return tensors


def outer_linear(base: nn.Module) -> list[str]:
    """The names of the linear modules outside the layers that have no bias."""
    return [
        name
        for name, module in base.named_children()
        if isinstance(module, nn.Linear) and module.bias is None
    ]


@torch.inference_mode()
def judge_matrices(
    bundle: Bundle, checkpoint: Checkpoint, tensors: set[str], read_rows: ReadRows
) -> dict[str, list[Deviation]]:
    """Deviations of matrices that were fitted to the bundle's calibration text, by their
    names. A matrix that no linear module read in the run is left out.

    Args:
        tensors: names of the matrices.
        read_rows: see `ReadRows`.
    """
    ids = calibration_ids(bundle)
    base = empty_model(checkpoint.config, "sdpa").model
    results: dict[str, list[Deviation]] = {}
    outer = [
        name
        for name in outer_linear(base)
        if f"{checkpoint.prefix}{name}.weight" in tensors
    ]
    total = len(base.layers) + len(outer) + 1
    with bar(total=total, desc="weights: inputs", unit="layer") as progress:
        judgement = Judgement(checkpoint, tensors, read_rows, results, progress)
        for name in outer:
            tensor = f"{checkpoint.prefix}{name}.weight"
            setattr(base, name, JudgedLinear(tensor, judgement))
        for index, layer in enumerate(base.layers):
            prefix = f"{checkpoint.prefix}layers.{index}."
            base.layers[index] = JudgedLayer(layer, prefix, judgement)

        def read(name: str) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + name).half()

        def embed(table: str, rows: np.ndarray) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + table, rows.tolist()).half()

        hidden = run_base(base, ids, embed, read, use_cache=False)
        if checkpoint.head in tensors:
            inputs = InputWeights.of([Moment.of(hidden)])
            results[checkpoint.head] = []
            for part in read_rows(checkpoint.head):
                results[checkpoint.head] += matrix_deviations([part], inputs)
        progress.update()
    return results
