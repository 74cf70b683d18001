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
from workbench.explain.error import fp16_weights, updates
from workbench.models.checkpoint import Checkpoint


def costs(
    bundle: Bundle, checkpoint: Checkpoint, golden: Golden, worst: int = 2
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the compression of each weight costs, and what storing the `worst` few of
    every layer as fp16 would buy.

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
    model = Reference(checkpoint)
    stored = stored_weights(checkpoint, bundle)
    fp16 = fp16_weights(checkpoint, bundle)
    names = set().union(*(shard.weights for shard in bundle.manifest.shards))
    tensors = set()
    for name in names:
        layer, kind = split_layer(name)
        if layer is not None and not torch.equal(stored(name), fp16(name)):
            tensors.add((layer, kind))
    if not tensors:
        found = "no weight was compressed"
        step = "give one of another --compress"
        raise InputError(bundle.root.name, found, "a compressed bundle", step)

    def rows(better: Collection[tuple[int, str]]) -> np.ndarray:
        """Updates of each layer [L, n · C] with these tensors at fp16."""
        model.weights = lambda name: (
            fp16(name) if split_layer(name) in better else stored(name)
        )
        values = model.run(golden.ids, feed=golden.values, head=False)
        return updates(values).reshape(golden.layers, -1)

    reference = rows(tensors)

    def errors(better: Collection[tuple[int, str]]) -> np.ndarray:
        return compare.over(
            compare.rms(reference, rows(better)), compare.rms(reference)
        )

    as_stored = errors(())
    parts = []
    for kind in sorted({kind for _, kind in tensors}):
        own = [layer for layer, each in tensors if each == kind]
        without = errors({(layer, kind) for layer in own})
        part = {"tensor": kind, "layer": own, "error": as_stored[own]}
        parts.append(pd.DataFrame(part | {"without": without[own]}))
    frame = pd.concat(parts)
    share = 1 - (frame["without"] / frame["error"]) ** 2
    frame["share"] = share.where(frame["error"] > 0, 0.0)
    order = ["layer", "share"]
    frame = frame.sort_values(order, ascending=[True, False], ignore_index=True)
    few = frame.groupby("layer").head(worst)
    by_layer = few.groupby("layer", as_index=False)
    remedies = by_layer.agg(tensors=("tensor", ", ".join), error=("error", "first"))
    better = errors(set(zip(few["layer"], few["tensor"])))
    return frame, remedies.assign(fp16=better[remedies["layer"]])
