"""Measures the error of each compressed weight, and of storing the worst few in a
better format.

One tensor at a time is replaced by its fp16 value inside the loaded program, in exact
arithmetic, and every layer's update is measured again on the golden's input. Isolated
layers are independent, so one pass tries the same tensor in all of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pandas as pd
import torch

from miltorch.steps import Body
from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check.golden import Golden
from workbench.check.weights import checkpoint_values
from workbench.decode import Decoder
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint

# fp16 values of a tensor → the values to run with
Swap = Callable[[torch.Tensor], torch.Tensor]


class WeightTrial:
    """A compressed bundle in exact arithmetic, its checkpoint, and the golden of its
    layers' inputs."""

    def __init__(
        self,
        bundle: Bundle,
        checkpoint: Checkpoint,
        golden: Golden,
        T: int | None = None,
    ):
        error.needs_hidden(bundle)
        self.decoder = Decoder(bundle, "portable", "exact")
        self.checkpoint = checkpoint
        self.golden = golden
        self.T = T or bundle.manifest.options.t_max
        self._updates()  # loads the experts that the golden's tokens pick
        compressed = {(layer, kind) for kind, layer, *_ in self._tensors()}
        with self.swapped(compressed):
            self.reference = self._updates()

    def _updates(self) -> np.ndarray:
        return error.updates(self.decoder, self.golden, self.T, "isolated")

    def errors(self) -> np.ndarray:
        """Relative RMS [L] of each layer's update with the current weights, against all
        weights at fp16."""
        difference = self._updates() - self.reference
        squares = (difference**2).mean((1, 2))
        scale = (self.reference**2).mean((1, 2))
        return np.sqrt(squares / scale)

    @property
    def kinds(self) -> list[str]:
        """Names, below their layer, of the tensors that compression changed."""
        return sorted({kind for kind, *_ in self._tensors()})

    def _tensors(self) -> Iterator[tuple[str, int, object, str, torch.Tensor]]:
        """(name below its layer, layer, executable, constant, fp16 values) of every
        compressed tensor of a layer."""
        experts = self.decoder.experts.models.values()
        for model in (*self.decoder.layers, *experts):
            for tensor, constant in model.shard.weights.items():
                stored = torch.from_numpy(model.constant(constant))
                values, _ = checkpoint_values(
                    self.checkpoint, model.shard, tensor, stored.numel()
                )
                fp16 = values.half().float().reshape(stored.shape)
                if not torch.equal(fp16, stored):
                    layer, kind = split_layer(tensor)
                    for executable in model.executables.values():
                        yield kind, layer, executable, constant, fp16

    @contextmanager
    def swapped(self, tensors: set[tuple[int, str]], swap: Swap = lambda fp16: fp16):
        """Within the block, `tensors` (layer, kind) are as `swap` computes them from
        their fp16 values."""
        with ExitStack() as undo:
            for kind, layer, executable, constant, fp16 in list(self._tensors()):
                if (layer, kind) in tensors:
                    for held, key in _places(executable.body, constant):
                        undo.callback(held.__setitem__, key, held[key])
                        held[key] = swap(fp16).to(held[key].dtype)
            yield


def _places(body: Body, constant: str) -> Iterator[tuple[dict, str]]:
    """(table, key) wherever a program holds a constant: as a value that steps look up by
    name, or as an argument of a step."""
    if constant in body.constants:
        yield body.constants, constant
    for step in body.steps:
        for parameter in step.constants:
            if getattr(step.op.inputs.get(parameter), "name", None) == constant:
                yield step.constants, parameter


def costs(weights: WeightTrial) -> pd.DataFrame:
    """One row per layer and compressed tensor, costliest first in each layer.

    Columns: `error`, the relative RMS of the layer's update as stored; `without`, the
    same with this tensor alone at fp16; `share`, the share of error² that this tensor
    accounts for."""
    errors = weights.errors()
    rows = []
    for kind in weights.kinds:
        everywhere = {(layer, kind) for layer in range(len(errors))}
        with weights.swapped(everywhere):
            columns = {"error": errors, "without": weights.errors()}
            rows.append(pd.DataFrame(columns))
    frame = pd.concat(rows, keys=weights.kinds, names=["tensor", "layer"])
    frame = frame.reset_index()
    share = 1 - (frame["without"] / frame["error"]) ** 2
    frame["share"] = share.where(frame["error"] > 0, 0.0)
    order = ["layer", "share"]
    return frame.sort_values(order, ascending=[True, False], ignore_index=True)


def remedies(
    weights: WeightTrial, ranked: pd.DataFrame, worst: int = 2
) -> pd.DataFrame:
    """One row per layer: the `tensors` with the largest shares, its `error`, and its
    error with these tensors stored as `fp16`."""
    few = ranked.groupby("layer").head(worst)
    by_layer = few.groupby("layer", as_index=False)
    frame = by_layer.agg(tensors=("tensor", ", ".join), error=("error", "first"))
    names = zip(few["layer"], few["tensor"], strict=True)
    tensors = set(names)
    with weights.swapped(tensors):
        frame["fp16"] = weights.errors()[frame["layer"]]
    return frame
