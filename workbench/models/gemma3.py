"""Gemma 3 (text): four norms of 1 + γ, per-head q/k norm, local and global attention
with a rotary base each.

Its residual stream outgrows fp16 (peaks of 292,969 are reported), so shards hold it as
2^-exponent of the model's: embeddings and the updates of layers are scaled down by a
power of two, and the norms that read the stream scale eps alike."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import MAX_FP16
from workbench.models import llama
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan, plan_alternating_layers, refuse

NORMS = llama.Norms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
# the norms whose results are added to the residual stream
ADDING = NORMS.after_mixer, NORMS.after_mlp
CHUNK = 16_384  # rows of the embedding table that are read at a time
head = llama.head


def plan(config) -> Plan:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (softcap := getattr(config, name)) is not None:
            refuse(config, f"{name} = {softcap}", "no softcap (Gemma 3 has none)")
    if config.use_bidirectional_attention:
        refuse(config, "use_bidirectional_attention = true", "causal attention")
    tables, layers = plan_alternating_layers(
        config, "full_attention", "sliding_attention"
    )
    return llama.plan(
        config,
        act="gelu_pytorch_tanh",
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        rope=tables,
        layers=layers,
    )


def with_weights(plan: Plan, source: Checkpoint) -> Plan:
    """The plan with the smallest residual exponent that keeps the stream inside fp16
    for every input.

    No channel of an RMSNorm over C exceeds √C · |weight|, so embeddings and adding
    norms bound every channel.
    """
    bound = embedding_bound(plan, source)
    for i in range(plan.dims.L):
        for name in ADDING:
            weight = source.tensor(f"{source.prefix}layers.{i}.{name}.weight")
            bound += (1 + weight).abs()
    return with_peak(plan, float(bound.max()))


def embedding_bound(plan: Plan, source: Checkpoint) -> torch.Tensor:
    """The largest magnitude [C] of every channel of the checkpoint's embeddings. The model
    multiplies them by √C: these are magnitudes of its stream in units of √C."""
    table = f"{source.prefix}embed_tokens.weight"
    bound = torch.zeros(plan.dims.C)
    for start in range(0, plan.dims.V, CHUNK):
        rows = source.tensor(table, slice(start, start + CHUNK))
        bound = torch.maximum(bound, rows.abs().amax(0))
    return bound


def with_peak(plan: Plan, peak: float) -> Plan:
    """The plan whose residual exponent brings a stream of magnitudes up to `peak` · √C
    below the largest fp16 number."""
    exponent = max(0, math.frexp(peak * plan.dims.C**0.5 / MAX_FP16)[1])
    scale = plan.embedding_scale * 2.0**-exponent
    return replace(plan, residual_exponent=exponent, embedding_scale=scale)


def gelu() -> Callable:
    """The activation of Gemma's MLPs."""
    return partial(nn.functional.gelu, approximate="tanh")


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    scale = plan.config.query_pre_attn_scalar**-0.5
    settings = llama.LayerSettings(NORMS, gelu(), scale=scale, norm_at="heads")
    return llama.layer(plan, index, options, settings)
