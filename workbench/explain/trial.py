"""Changes Hugging Face's model in one way at a time and measures a bundle's distance
from it."""

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.check import golden, hf, metrics, run
from workbench.check.program import exact_runtime
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

Change = Callable[[Callable], Callable]  # a function of a module → the one in its place
# name of a weight, and what reads it unchanged → its values
WeightChange = Callable[[str, hf.Weights], torch.Tensor]
# relative RMS above which weights are another layer's; compression stays below it
UNLIKE = 0.5
# rounding of `hidden` relative to its RMS, which enters every update
STREAM_ULPS = 2.0**-22


@dataclass(frozen=True)
class Variant:
    """One way in which a model may differ from its checkpoint's configuration.

    Attributes:
        config: attributes of the configuration to set.
        model: changes the built model in place.
        functions: changes of functions of transformers' modelling file, by name.
        read: (name, its reader) → a weight.
        embedding: factor of the first layer's input.
        order: layer → the checkpoint's layer whose weights it has.
    """

    name: str
    config: dict = field(default_factory=dict)
    model: Callable[[nn.Module], None] = lambda model: None
    functions: dict[str, Change] = field(default_factory=dict)
    read: WeightChange = lambda name, read: read(name)
    embedding: float = 1.0
    order: dict[int, int] = field(default_factory=dict)


class Trial:
    """A bundle's outputs on Hugging Face's inputs, and the errors of variants against
    them."""

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint):
        runtime = exact_runtime(bundle)  # refuses a bundle that has none
        self.bundle = bundle
        self.checkpoint = checkpoint
        self.read = golden.stored_weights(checkpoint, bundle)
        self.ids = _prompt(bundle, checkpoint)
        self.source = golden.make_golden(
            checkpoint, self.ids, self.read, "stored", head=False
        )
        self.decoder = decoder = Decoder(bundle, runtime, "exact")
        # where layers show no hidden state, caches of a chained run are all there is
        self.isolated = bundle.manifest.shows_hidden
        how = (decoder.options.t_max, "isolated") if self.isolated else (1, "chained")
        self.outputs = run.run_golden(decoder, self.source, *how)
        scale = bundle.manifest.stream_scale
        embedded = bundle.embed(self.source.ids[None])
        self.embedded = embedded[0] * scale
        self.order = self._order()

    def errors(self, variant: Variant, count: int) -> np.ndarray:
        """Relative RMS [1 + count] of the embeddings and of the first `count` layers,
        for each the worst of update, K and V. A layer with the weights of another layer
        than the variant's has at least 1."""
        reference = self._run(variant, count)
        embedded = self.source["x.0"] * variant.embedding
        errors = [metrics.relative_rms(embedded, self.embedded)]
        for layer in range(count):
            stored = self.order.get(layer, layer)
            other = stored != variant.order.get(layer, layer)
            worst = max(self._layer_errors(reference, layer))
            errors.append(max(worst, float(other)))
        return np.nan_to_num(errors, nan=np.inf)

    def _layer_errors(self, reference: hf.Values, layer: int) -> list[float]:
        """Relative RMS of a layer's update and, if it attends, of K and V."""
        outputs, errors = self.outputs, []
        if self.isolated:
            name = f"update.{layer}"
            rounding = STREAM_ULPS * _rms(reference[f"x.{layer}"])
            beyond = max(0.0, _rms(outputs[name] - reference[name]) - rounding)
            errors.append(beyond / (_rms(reference[name]) or 1.0))
        for name in (f"k.{layer}", f"v.{layer}"):
            if name in outputs:
                rows = outputs[name]
                expected = reference[name][-len(rows) :]
                errors.append(metrics.relative_rms(expected, rows))
        return errors

    def _run(self, variant: Variant, count: int) -> hf.Values:
        def read(name: str) -> torch.Tensor:
            return variant.read(name, self.read)

        feed = self.source.values
        if not self.isolated:
            feed = {"x.0": feed["x.0"] * np.float32(variant.embedding)}
        with changed_model(self.checkpoint.config, variant, count) as model:
            reference = hf.Reference(self.checkpoint, read, model=model)
            return reference.run(self.ids, feed=feed, head=False)

    def _order(self) -> dict[int, int]:
        """Layer → the neighbour in the checkpoint whose weights it stores, where it is
        another."""
        layers = self.checkpoint.prefix + "layers.{}."
        name = layers + "self_attn.o_proj.weight"
        if name.format(0) not in self.checkpoint:
            name = layers + "feed_forward.w2.weight"
        L = self.bundle.manifest.dims.L
        order = {}
        for layer in range(L):
            stored = self.read(name.format(layer)).numpy()
            errors = {}
            first = max(0, layer - 1)
            for other in range(first, min(L, layer + 2)):
                own = self.checkpoint.tensor(name.format(other)).numpy()
                errors[other] = metrics.relative_rms(own, stored)
            best = min(errors, key=errors.get)
            if best != layer and errors[layer] > UNLIKE > errors[best]:
                order[layer] = best
        return order


@contextmanager
def changed_model(config, variant: Variant, count: int):
    """Yields the first `count` layers of a variant's model without weights, its
    functions replaced."""
    config = copy.deepcopy(config)
    for name, value in variant.config.items():
        setattr(config, name, copy.deepcopy(value))
    model = hf.empty_model(config)
    model.model.layers = model.model.layers[:count]
    variant.model(model.model)
    with _replaced(sys.modules[type(model).__module__], variant.functions):
        yield model


@contextmanager
def _replaced(module, changes: dict[str, Change]):
    """Replaces functions of a module within the block."""
    before = {name: getattr(module, name) for name in changes}
    try:
        for name, own in before.items():
            setattr(module, name, changes[name](own))
        yield
    finally:
        vars(module).update(before)


def _prompt(bundle: Bundle, checkpoint: Checkpoint) -> list[int]:
    """Seeded random ids, more than twice the largest window unless the cache is
    shorter."""
    windows = [layer.window or 0 for layer in bundle.manifest.layers]
    windows.append(getattr(checkpoint.config, "sliding_window", None) or 0)
    count = max(24, 2 * max(windows) + 8)
    count = min(count, bundle.manifest.options.max_seq_len)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count)
    return ids.tolist()


def _rms(values: np.ndarray) -> float:
    return float(metrics.rms(values.ravel()))
