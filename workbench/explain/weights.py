"""Measures how much of a layer's error each compressed weight causes, and what storing
the worst few in fp16 would save.

Hugging Face's model runs on the values that the bundle stores, with one tensor at a
time replaced by its fp16 value, and every layer's update is measured again on the
golden's input. Layers that are fed the golden's input are independent, so one pass
tries the same tensor in all of them. Gate `program` shows that the bundle computes the
same."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import compare
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference, Weights
from workbench.errors import InputError
from workbench.explain.error import fp16_weights, updates
from workbench.models.checkpoint import Checkpoint

LayerTensor = tuple[int, str]  # a layer, and the name of a tensor in it


@dataclass
class MixedWeights:
    """Hugging Face's model with the weights that a bundle stores, some of them at fp16.

    Attributes:
        model: runs every mixture: building one takes longer than changing what it
            reads.
        golden: whose inputs the layers read.
        stored, fp16: read a tensor of the checkpoint as the bundle stores it, and
            rounded to fp16 alone.
        compressed: the tensors of layers in which the two differ.
    """

    model: Reference
    golden: Golden
    stored: Weights
    fp16: Weights
    compressed: set[LayerTensor]

    @classmethod
    def of(
        cls, bundle: Bundle, checkpoint: Checkpoint, golden: Golden
    ) -> "MixedWeights":
        """The weights of a bundle.

        Raises:
            InputError: no weight of a layer is compressed.
        """
        stored = stored_weights(checkpoint, bundle)
        fp16 = fp16_weights(checkpoint, bundle)
        names = set()
        for shard in bundle.manifest.shards:
            names.update(shard.weights)
        compressed = set()
        for name in names:
            layer, tensor = split_layer(name)
            if layer is not None and not torch.equal(stored(name), fp16(name)):
                compressed.add((layer, tensor))
        if not compressed:
            actual = "no weight was compressed"
            step = "export with another --compress than fp16"
            subject = f"bundle {bundle.root.name}"
            raise InputError(subject, actual, "a compressed bundle", step)
        return cls(Reference(checkpoint), golden, stored, fp16, compressed)

    def run_updates(self, in_fp16: Collection[LayerTensor]) -> np.ndarray:
        """The updates of each layer, [L, n · C] float64, with these tensors at fp16 and the
        others as stored."""

        def read(name: str) -> torch.Tensor:
            is_fp16 = split_layer(name) in in_fp16
            return self.fp16(name) if is_fp16 else self.stored(name)

        self.model.weights = read
        trace = self.model.run(self.golden.ids, feed=self.golden.trace, head=False)
        return updates(trace).reshape(len(trace.layers), -1)

    @cached_property
    def expected(self) -> np.ndarray:
        """The updates with all tensors at fp16."""
        return self.run_updates(self.compressed)

    def relative_rms(self, in_fp16: Collection[LayerTensor]) -> np.ndarray:
        """Relative RMS [L] of the updates with these tensors at fp16, against those with
        all of them at fp16."""
        distance = compare.rms(self.expected, self.run_updates(in_fp16))
        return compare.safe_ratio(distance, compare.rms(self.expected))


def measure_costs(
    bundle: Bundle, checkpoint: Checkpoint, golden: Golden, worst: int = 2
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The error that the compression of each weight causes, and the error that remains
    with the `worst` few tensors of every layer in fp16.

    Returns:
        One row per layer and compressed tensor, costliest first in each layer: `error`,
        the relative RMS of the layer's update as stored, against all weights at fp16;
        `without`, the same with this tensor alone at fp16; `share`, the share of error²
        that this tensor accounts for, below 0 where fp16 makes it worse. One row per
        layer: the `tensors` with the largest shares, its `error`, and its error with
        these tensors stored as `fp16`.

    Raises:
        InputError: a bundle without a compressed weight.
    """
    weights = MixedWeights.of(bundle, checkpoint, golden)
    as_stored = weights.relative_rms(())
    parts = []
    for tensor in sorted({tensor for _, tensor in weights.compressed}):
        layers = [layer for layer, name in weights.compressed if name == tensor]
        # layers that read the golden's inputs are independent: one run for all of them
        without = weights.relative_rms({(layer, tensor) for layer in layers})
        columns = {"tensor": tensor, "layer": layers, "error": as_stored[layers]}
        parts.append(pd.DataFrame(columns | {"without": without[layers]}))
    costs = pd.concat(parts)
    share = 1 - (costs["without"] / costs["error"]) ** 2
    costs["share"] = share.where(costs["error"] > 0, 0.0)
    order = ["layer", "share"]
    costs = costs.sort_values(order, ascending=[True, False], ignore_index=True)
    # the worst few tensors of all layers at once: layers are independent
    costliest = costs.groupby("layer").head(worst)
    by_layer = costliest.groupby("layer", as_index=False)
    remedies = by_layer.agg(tensors=("tensor", ", ".join), error=("error", "first"))
    remaining = weights.relative_rms({*zip(costliest["layer"], costliest["tensor"])})
    return costs, remedies.assign(fp16=remaining[remedies["layer"]])
