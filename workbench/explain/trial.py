"""Changes Hugging Face's model in one way at a time and measures a bundle's distance
from it."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.check import compare, golden, hf, run
from workbench.check.program import exact_runtime
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

# changes a built model in place, or also gives what has to be entered while it runs
Change = Callable[[nn.Module], AbstractContextManager | None]
Read = Callable[[str, hf.Weights], torch.Tensor]  # of a weight, by name
# relative RMS above which weights are another layer's; compression stays below it
UNLIKE = 0.5
# An update is measured against so much of the stream at least, whose rounding in fp32
# enters it.
STREAM = 2.0**-5
# of which every layer with attention, or every other one, has the weight
OWN = "self_attn.o_proj.weight", "feed_forward.w2.weight"


class Trial:
    """A bundle's outputs on Hugging Face's inputs, and the errors of variants against
    them."""

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint):
        decoder = Decoder(bundle, exact_runtime(bundle), "exact")
        self.manifest = bundle.manifest
        self.checkpoint = checkpoint
        self.read = golden.stored_weights(checkpoint, bundle)
        ids = _prompt(bundle, checkpoint)
        about = ids, self.read, "stored"
        self.source = golden.make_golden(checkpoint, *about, head=False)
        # where layers show no hidden state, caches of a chained run are all there is
        self.isolated = bundle.manifest.shows_hidden
        how = (decoder.options.t_max, "isolated") if self.isolated else (1, "chained")
        self.outputs = run.run_golden(decoder, self.source, *how)
        embedded = bundle.embed(self.source.ids)
        self.outputs["x.0"] = embedded * bundle.manifest.stream_scale

    def errors(
        self,
        count: int,
        *,
        config: Mapping = MappingProxyType({}),
        change: Change = lambda base: None,
        read: Read = lambda name, read: read(name),
        embedding: float = 1.0,
    ) -> np.ndarray:
        """Relative RMS [1 + count] of the embeddings and of the first `count` layers of
        a variant, for each layer the worst of update, K and V; inf where a value is not
        finite.

        Args:
            config: attributes of the configuration to set.
            read: called with a weight's name and what reads it unchanged.
            embedding: factor of the first layer's input.
        """
        feed = self.source.values
        embedded = feed["x.0"] * np.float32(embedding)
        if not self.isolated:
            feed = {"x.0": embedded}
        configuration = copy.deepcopy(self.checkpoint.config)
        for name, value in config.items():
            setattr(configuration, name, copy.deepcopy(value))
        model = hf.empty_model(configuration)
        model.model.layers = model.model.layers[:count]
        with change(model.model) or nullcontext():
            weights = partial(read, read=self.read)
            reference = hf.Reference(self.checkpoint, weights, model=model)
            values = reference.run(self.source.ids, feed=feed, head=False)
        sizes = {}
        for layer in range(count):
            sizes[f"update.{layer}"] = STREAM * compare.rms(values[f"x.{layer}"])
        how = {"sizes": sizes, "tensors": ("update", "k", "v"), "similar": False}
        rows = compare.compare(values, self.outputs, **how)
        squares = rows["error"].fillna(np.inf) ** 2
        means = squares.groupby([rows["layer"], rows["tensor"]]).mean()
        layers = means.groupby("layer").max().reindex(range(count), fill_value=0.0)
        first = compare.relative_rms(embedded, self.outputs["x.0"])
        return np.array([first, *layers**0.5])

    def order(self) -> dict[int, int]:
        """Layer → the neighbour in the checkpoint whose weights it stores, where it is
        another."""
        name = f"{self.checkpoint.prefix}layers.{{}}."
        name += next(own for own in OWN if name.format(0) + own in self.checkpoint)
        L = self.manifest.dims.L
        order = {}
        for layer in range(L):
            stored = self.read(name.format(layer)).numpy()
            errors = {}
            for other in range(max(0, layer - 1), min(L, layer + 2)):
                own = self.checkpoint.tensor(name.format(other)).numpy()
                errors[other] = compare.relative_rms(own, stored)
            best = min(errors, key=errors.get)
            if errors[layer] > UNLIKE > errors[best]:
                order[layer] = best
        return order


def _prompt(bundle: Bundle, checkpoint: Checkpoint) -> list[int]:
    """Seeded random ids, more than twice the largest window unless the cache is
    shorter."""
    windows = [layer.window or 0 for layer in bundle.manifest.layers]
    windows.append(getattr(checkpoint.config, "sliding_window", None) or 0)
    count = min(max(24, 2 * max(windows) + 8), bundle.manifest.options.max_seq_len)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count)
    return ids.tolist()
