"""A checkpoint in Hugging Face's own layers around another exporter's caches and masks, and the
conversion to packages with that exporter's interface."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from miltorch import shim
from miltorch.coremltools_import import (
    coremltools,
    frozen_gc,
    lean_passes,
    no_progress,
    quiet,
    seldom_validated,
)


class Model(nn.Module):
    """A Llama, Qwen 3 or Gemma 3 checkpoint, for one sequence of up to S tokens."""

    def __init__(self, path: Path, S: int = 32):
        super().__init__()
        whole = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.config, self.body, self.head = whole.config, whole.model, whole.lm_head
        self.S, self.C, self.L = S, self.config.hidden_size, len(self.body.layers)
        self.kv, self.D = self.config.num_key_value_heads, self.config.head_dim
        full = ["full_attention"] * self.L
        self.kinds = getattr(self.config, "layer_types", None) or full
        for kind in set(self.kinds):
            # only Gemma has a rotary table for each kind of layer
            kinds = (kind,) if self.config.model_type == "gemma3_text" else ()
            tables = self.body.rotary_emb(torch.zeros(1), torch.arange(S)[None], *kinds)
            for name, table in zip(("cos", "sin"), tables):
                self.register_buffer(f"{name}_{kind}", table[0])

        self.halves = self.head.weight.detach().tensor_split(2)

    def caches(self, planes: int) -> torch.Tensor:
        return torch.zeros(planes, self.kv, self.S, self.D)

    def rope(self, positions, kind):
        tables = [getattr(self, f"{name}_{kind}") for name in ("cos", "sin")]
        return [table[positions][None] for table in tables]

    def run(self, x, append: Callable, mask: Callable, rope: Callable, layers=None):
        """x [1, T, C] through all layers, or some. mask(kind) [1, 1, T, columns] and
        rope(kind) are those of a kind of layer; append(i, k, v) writes rows [1, kv, T,
        D] and returns all keys and values."""
        for i in range(self.L) if layers is None else layers:
            kind = self.kinds[i]
            x = self.body.layers[i](
                x,
                attention_mask=mask(kind),
                position_embeddings=rope(kind),
                past_key_values=SimpleNamespace(
                    update=lambda k, v, layer: append(layer, k, v)
                ),
            )
        return x

    def logits(self, x, weight=None):
        """Those of some rows of the head's weight, by default of all."""
        weight = self.head.weight if weight is None else weight
        return nn.functional.linear(self.body.norm(x), weight)


class Exported(nn.Module):
    """A function of a model, its caches (of dotted names) and inputs as a module."""

    def __init__(self, m: Model, function: Callable, caches: dict[str, torch.Tensor]):
        super().__init__()
        self.m, self.function, self.names = m, function, list(caches)
        for name, cache in caches.items():
            *path, leaf = name.split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(leaf, cache)

    def forward(self, *inputs):
        caches = [self.get_buffer(name) for name in self.names]
        return self.function(caches, *inputs)


def plain(name, *shape, kind=np.float16):
    """An input."""
    return coremltools().TensorType(name=name, shape=shape, dtype=kind)


integers = partial(plain, kind=np.int32)


def saved(
    path: Path, m, function, inputs, outputs, caches=None, *, stored=None, **options
) -> None:
    """Converts a function (see `Exported`) and saves it at `path`.

    Args:
        inputs: as `plain` gives them.
        stored: how weights are stored, keywords of coremltools' configuration.
        options: of `coremltools.convert`.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil.types import nptype_from_builtin

    types = {np.int32: torch.int32, np.float16: torch.float32}
    examples = [
        torch.zeros(
            tensor.shape.default, dtype=types[nptype_from_builtin(tensor.dtype)]
        )
        for tensor in inputs
    ]
    states = []
    for name, cache in (caches or {}).items():
        tensor = ct.TensorType(shape=tuple(cache.shape), dtype=np.float16)
        states.append(ct.StateType(wrapped_type=tensor, name=name))
    module = Exported(m, function, caches or {}).eval()
    defaults = {"minimum_deployment_target": ct.target.iOS18, "skip_model_load": True}
    pipeline = ct.PassPipeline.DEFAULT
    if stored:
        append_compression(pipeline, stored)
    with (
        quiet(),
        no_progress(),
        seldom_validated(),
        lean_passes(),
        frozen_gc(),
        torch.no_grad(),
        shim.mended_converter(),
    ):
        package = ct.convert(
            torch.jit.trace(module, examples, check_trace=False),
            inputs=inputs,
            outputs=[ct.TensorType(name=n) for n in outputs],
            states=states or None,
            pass_pipeline=pipeline,
            **defaults | options,
        )
        package.save(str(path))


def append_compression(pipeline, stored: dict) -> None:
    """Appends the pass that stores weights so. coremltools' functions that compress a package run
    the same pass, but convert a second time."""
    optimize = coremltools().optimize.coreml
    name, config = "linear_quantize_weights", optimize.OpLinearQuantizerConfig
    if "nbits" in stored:
        name, config = "palettize_weights", optimize.OpPalettizerConfig
    name = f"compression::{name}"
    pipeline.append_pass(name)
    config = optimize.OptimizationConfig(config(**stored))
    pipeline.set_options(name, {"config": config})
