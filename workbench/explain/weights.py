"""Measures the error of each compressed weight, and of storing the worst few in a
better format.

Hugging Face's model runs on the values that the bundle stores, one tensor at a time
replaced by its fp16 value, and every layer's update is measured again on the golden's
input. Isolated layers are independent, so one pass tries the same tensor in all of
them. Gate `program` shows that the bundle computes the same."""

from collections.abc import Collection

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import compare
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference
from workbench.errors import InputError
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint


class WeightTrial:
    """A checkpoint's model on the weights of a compressed bundle, and the golden of its
    layers' inputs.

    Attributes:
        tensors: (layer, name below it) of those that compression changed.
        reference: updates [L, n, C] with all weights at fp16.
    """

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint, golden: Golden):
        self.model = Reference(checkpoint)
        self.golden = golden
        self.stored = stored_weights(checkpoint, bundle)
        self.fp16 = error.fp16_weights(checkpoint, bundle)
        self.tensors = set()
        for name in set().union(*(shard.weights for shard in bundle.manifest.shards)):
            layer, kind = split_layer(name)
            if layer is not None:
                if not torch.equal(self.stored(name), self.fp16(name)):
                    self.tensors.add((layer, kind))
        if not self.tensors:
            found = "no weight was compressed"
            step = "give one of another --compress"
            raise InputError(bundle.root.name, found, "a compressed bundle", step)
        self.reference = self.updates(self.tensors)

    def updates(self, at_fp16: Collection[tuple[int, str]] = ()) -> np.ndarray:
        """Updates [L, n, C] with these tensors at fp16 and the others as stored."""

        def read(name: str) -> torch.Tensor:
            if split_layer(name) in at_fp16:
                return self.fp16(name)
            return self.stored(name)

        self.model.weights = read
        feed = self.golden.values
        return error.updates(self.model.run(self.golden.ids, feed=feed, head=False))

    def errors(self, at_fp16: Collection[tuple[int, str]] = ()) -> np.ndarray:
        """Relative RMS [L] of each layer's update with these tensors at fp16, against
        all weights at fp16."""
        reference = self.reference.reshape(len(self.reference), -1)
        current = self.updates(at_fp16).reshape(reference.shape)
        return compare.over(compare.rms(reference, current), compare.rms(reference))


def costs(weights: WeightTrial) -> pd.DataFrame:
    """One row per layer and compressed tensor, costliest first in each layer.

    Columns: `error`, the relative RMS of the layer's update as stored; `without`, the
    same with this tensor alone at fp16; `share`, the share of error² that this tensor
    accounts for."""
    stored = weights.errors()
    layers = range(len(stored))
    parts = []
    for kind in sorted({kind for _, kind in weights.tensors}):
        without = weights.errors({(layer, kind) for layer in layers})
        part = {"tensor": kind, "layer": layers, "error": stored, "without": without}
        parts.append(pd.DataFrame(part))
    frame = pd.concat(parts)
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
    errors = weights.errors(set(zip(few["layer"], few["tensor"], strict=True)))
    frame["fp16"] = errors[frame["layer"]]
    return frame
