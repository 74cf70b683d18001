"""A small decoder in plain torch, and its conversion to packages with another
exporter's interface."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from miltorch import shim
from miltorch.quiet import coremltools, quiet
from workbench.check import hf
from workbench.export.convert import lean, no_progress
from workbench.models.checkpoint import Checkpoint, random

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=97,
)
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}


def rms(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x, cos, sin):
    """Rope on x [heads, T, D] with cos, sin [T, D]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Model(nn.Module):
    """A checkpoint's layers as plain torch: Llama, Qwen 3 or Gemma 3, one sequence."""

    def __init__(self, path: Path, S: int, fault: str = ""):
        super().__init__()
        source = Checkpoint(path)
        self.config = c = source.config
        self.S = S
        self.fault = fault
        self.gemma = hasattr(c, "query_pre_attn_scalar")
        self.H = c.num_attention_heads
        self.kv = c.num_key_value_heads
        self.L = c.num_hidden_layers
        self.D = c.head_dim
        self.C = c.hidden_size
        self.scale = getattr(c, "query_pre_attn_scalar", self.D) ** -0.5
        self.weights = {}
        for name in source.header:
            weight = source.tensor(name).float()
            short = name.removeprefix(source.prefix)
            self.weights[short] = weight + self.gemma * (weight.ndim == 1)
            self.register_buffer("w_" + short.replace(".", "_"), self.weights[short])
        self.kinds = getattr(c, "layer_types", None) or ["full_attention"] * self.L
        for kind in set(self.kinds):
            for name, table in zip(("cos", "sin"), self.tables(kind)):
                self.register_buffer(f"{name}_{kind}", table)

    def tables(self, kind):
        rotary = hf.empty_model(self.config).model.rotary_emb
        positions = torch.arange(self.S)[None]
        if self.fault == "theta":
            p = self.config.rope_parameters
            theta = p["rope_theta"] * p["factor"]
            frequencies = theta ** (-torch.arange(0, self.D, 2) / self.D)
            angles = positions[0, :, None] * frequencies
            angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()
        about = torch.zeros(1), positions
        if self.gemma:
            about += (kind,)
        return [table[0] for table in rotary(*about)]

    def w(self, layer, name):
        return getattr(self, f"w_layers_{layer}_{name.replace('.', '_')}_weight")

    def has(self, layer, name):
        return f"layers.{layer}.{name}.weight" in self.weights

    def rope(self, kind, positions):
        return [getattr(self, f"{name}_{kind}")[positions] for name in ("cos", "sin")]

    def linear(self, x, layer, name):
        return nn.functional.linear(x, self.w(layer, name))

    def layer(self, i, x, cos, sin, mask, cache, mlp=True):
        """x [1, T, C] through layer i; mask [1, T, columns]; `cache(i, k, v)` writes
        rows [kv, T, D] and returns all keys and values [kv, columns, D]."""
        y = self.layer_norm(x, i, "input_layernorm")
        q, k, v = (
            self.linear(y, i, f"self_attn.{n}_proj")
            .reshape(-1, heads, self.D)
            .transpose(0, 1)
            for n, heads in (("q", self.H), ("k", self.kv), ("v", self.kv))
        )
        if self.fault == "norm_order":
            q = turn(q, cos, sin)
            k = turn(k, cos, sin)
            q, k = self.qk_norms(i, q, k)
        else:
            q, k = self.qk_norms(i, q, k)
            q = turn(q, cos, sin)
            k = turn(k, cos, sin)
        group = self.H // self.kv
        keys, values = (t.repeat_interleave(group, 0) for t in cache(i, k, v))
        scores = torch.softmax(q @ keys.transpose(1, 2) * self.scale + mask, -1)
        out = (scores @ values).transpose(0, 1).reshape(1, -1, self.H * self.D)
        out = self.linear(out, i, "self_attn.o_proj")
        if self.gemma:
            out = self.layer_norm(out, i, "post_attention_layernorm")
        x = x + out
        if not mlp:
            return x
        before = "post_attention_layernorm"
        act = nn.functional.silu
        if self.gemma:
            before = "pre_feedforward_layernorm"
            act = partial(nn.functional.gelu, approximate="tanh")
        y = self.layer_norm(x, i, before)
        y = act(self.linear(y, i, "mlp.gate_proj")) * self.linear(y, i, "mlp.up_proj")
        y = self.linear(y, i, "mlp.down_proj")
        if self.gemma:
            y = self.layer_norm(y, i, "post_feedforward_layernorm")
        return x + y

    def layer_norm(self, x, layer, name):
        return rms(x, self.w(layer, name), self.config.rms_norm_eps)

    def qk_norms(self, layer, q, k):
        """Queries and keys after the layer's norms of them, if it has any."""
        if not self.has(layer, "self_attn.q_norm"):
            return q, k
        q = self.layer_norm(q, layer, "self_attn.q_norm")
        return q, self.layer_norm(k, layer, "self_attn.k_norm")

    def embed(self, ids):
        x = nn.functional.embedding(ids, self.w_embed_tokens_weight)
        if self.gemma:
            x = x * self.C**0.5
        return x

    def norm(self, x):
        return rms(x, self.w_norm_weight, self.config.rms_norm_eps)

    @property
    def head(self):
        return getattr(self, "w_lm_head_weight", self.w_embed_tokens_weight)


def convert(module, inputs, outputs, states=(), **options):
    """A Core ML model of a torch module.

    Args:
        inputs: (name, shape, dtype, example shape) of each; `states`: (name, shape).
        options: of `coremltools.convert`; `target` is its minimum deployment target.
    """
    ct = coremltools()
    types = {np.int32: torch.int32, np.float16: torch.float32}
    examples = [torch.zeros(example, dtype=types[kind]) for *_, kind, example in inputs]
    module_states = []
    for name, shape in states:
        tensor = ct.TensorType(shape=shape, dtype=np.float16)
        module_states.append(ct.StateType(wrapped_type=tensor, name=name))
    target = options.pop("target", ct.target.iOS18)
    with quiet(), no_progress(), lean(), torch.no_grad(), shim.mended_converter():
        return ct.convert(
            torch.jit.trace(module.eval(), examples, check_trace=False),
            inputs=[ct.TensorType(name=n, shape=s, dtype=k) for n, s, k, _ in inputs],
            outputs=[ct.TensorType(name=n) for n in outputs],
            states=module_states or None,
            minimum_deployment_target=target,
            skip_model_load=True,
            **options,
        )


def states_of(module, path=""):
    """The module's own buffers as `states` of `convert`; `path`: of the module."""
    buffers = module.named_buffers(path, recurse=False)
    return [(name, tuple(buffer.shape)) for name, buffer in buffers]


def plain(name, shape, kind=np.float16):
    return name, shape, kind, shape


class Apply(nn.Module):
    """A function of a model and its inputs as a module."""

    def __init__(self, model, function):
        super().__init__()
        self.m = model
        self.function = function

    def forward(self, *inputs):
        return self.function(self.m, *inputs)


def palettized(package, **options):
    """The model with its weights in palettes; `options` of `OpPalettizerConfig`."""
    optimize = coremltools().optimize.coreml
    config = optimize.OpPalettizerConfig(mode="uniform", **options)
    return _compressed(package, optimize.palettize_weights, config)


def quantized(package, **options):
    """The model with its weights as integers; `options` of
    `OpLinearQuantizerConfig`."""
    optimize = coremltools().optimize.coreml
    config = optimize.OpLinearQuantizerConfig(mode="linear_symmetric", **options)
    return _compressed(package, optimize.linear_quantize_weights, config)


def _compressed(package, compress, config):
    whole = coremltools().optimize.coreml.OptimizationConfig(config)
    with quiet(), no_progress(), lean():
        return compress(package, whole)


def tiny_checkpoint(family: str, folder: Path, layers: int = 2) -> Path:
    """A random checkpoint of a family in `folder`, written if it is missing; sliding
    layers have a window of 8, and the last layer is full attention."""
    path = folder / family
    if path.exists():
        return path
    config = SIZES | {"num_hidden_layers": layers}
    if family == "llama":
        config["rope_parameters"] = SCALING
    if family == "gemma3_text":
        kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        config |= dict(layer_types=kinds, sliding_window=8, query_pre_attn_scalar=24)
    return random(path, family, **config)
