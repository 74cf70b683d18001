"""Measures how much of a layer's error each compressed weight causes, and what storing
the worst few in fp16 would save.

Hugging Face's model runs on the values that the bundle stores, with one tensor at a
time replaced by its fp16 value, and every layer's update is measured again on the
golden's input. Layers that are fed the golden's input are independent, so one pass
tries the same tensor in all of them. Gate `program` shows that the bundle computes the
same."""

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
    model = Reference(checkpoint)
    stored = stored_weights(checkpoint, bundle)
    fp16 = fp16_weights(checkpoint, bundle)
    names = set().union(*(shard.weights for shard in bundle.manifest.shards))
    compressed = set()  # (layer, tensor)
    for name in names:
        layer, tensor = split_layer(name)
        if layer is not None and not torch.equal(stored(name), fp16(name)):
            compressed.add((layer, tensor))
    if not compressed:
        actual = "no weight was compressed"
        step = "give one of another --compress"
        raise InputError(bundle.root.name, actual, "a compressed bundle", step)

    def run_updates(in_fp16: Collection[tuple[int, str]]) -> np.ndarray:
        """Updates of each layer [L, n · C] with these tensors in fp16."""

        def read(name: str) -> torch.Tensor:
            return fp16(name) if split_layer(name) in in_fp16 else stored(name)

        # one model for all runs: building one takes longer than changing what it reads
        model.weights = read
        trace = model.run(golden.ids, feed=golden.trace, head=False)
        return updates(trace).reshape(golden.layers, -1)

    reference = run_updates(compressed)

    def errors(in_fp16: Collection[tuple[int, str]]) -> np.ndarray:
        """Relative RMS [L] of the updates with these tensors in fp16."""
        distance = compare.rms(reference, run_updates(in_fp16))
        return compare.safe_ratio(distance, compare.rms(reference))

    as_stored = errors(())
    parts = []
    for tensor in sorted({tensor for _, tensor in compressed}):
        layers = [layer for layer, name in compressed if name == tensor]
        without = errors({(layer, tensor) for layer in layers})
        part = {"tensor": tensor, "layer": layers, "error": as_stored[layers]}
        parts.append(pd.DataFrame(part | {"without": without[layers]}))
    frame = pd.concat(parts)
    share = 1 - (frame["without"] / frame["error"]) ** 2
    frame["share"] = share.where(frame["error"] > 0, 0.0)
    order = ["layer", "share"]
    frame = frame.sort_values(order, ascending=[True, False], ignore_index=True)
    few = frame.groupby("layer").head(worst)
    by_layer = few.groupby("layer", as_index=False)
    remedies = by_layer.agg(tensors=("tensor", ", ".join), error=("error", "first"))
    remaining = errors(set(zip(few["layer"], few["tensor"])))
    return frame, remedies.assign(fp16=remaining[remedies["layer"]])
