"""Gemma 3 (text): four norms of 1 + γ, per-head q/k norm, local and global attention
with a rotary base each.

Its residual stream outgrows fp16 (peaks of 292,969 are reported), so shards hold it as
2^-exponent of the model's: embeddings and the updates of layers are scaled down by a
power of two, and the norms that read the stream scale eps alike."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from workbench.bundle import Options
from workbench.models import llama
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan, alternating, refuse
from workbench.models.layers import NORMAL

# the norms whose results are added to the residual stream
ADDING = "post_attention_layernorm", "post_feedforward_layernorm"
NORMS = "input_layernorm", ADDING[0], "pre_feedforward_layernorm", ADDING[1]
CHUNK = 16_384  # rows of the embedding table that are read at a time
head = llama.head


def plan(config) -> Plan:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (softcap := getattr(config, name)) is not None:
            refuse(config, f"{name} = {softcap}", "no softcap (Gemma 3 has none)")
    if config.use_bidirectional_attention:
        refuse(config, "use_bidirectional_attention = true", "causal attention")
    return llama.plan(
        config,
        act="gelu_pytorch_tanh",
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        **alternating(config, "full_attention", "sliding_attention"),
    )


def settle(plan: Plan, source: Checkpoint) -> Plan:
    """The plan with the smallest residual exponent that keeps the stream inside fp16
    for every input.

    No channel of an RMSNorm over C exceeds √C · |weight|, so embeddings and adding
    norms bound every channel.
    """
    # the largest magnitude that each channel of the stream can have
    table = f"{source.prefix}embed_tokens.weight"
    bound = torch.zeros(plan.dims.C)
    for start in range(0, plan.dims.V, CHUNK):
        rows = source.tensor(table, slice(start, start + CHUNK))
        bound = torch.maximum(bound, rows.abs().amax(0))
    for i in range(plan.dims.L):
        for name in ADDING:
            weight = source.tensor(f"{source.prefix}layers.{i}.{name}.weight")
            bound += (1 + weight).abs()
    peak = float(bound.max()) * plan.dims.C**0.5
    # 2^-exponent of the peak is below the largest fp16 number
    exponent = max(0, math.frexp(peak / NORMAL[1])[1])
    scale = plan.embedding_scale * 2.0**-exponent
    return replace(plan, residual_exponent=exponent, embedding_scale=scale)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    gelu = partial(nn.functional.gelu, approximate="tanh")
    scale = plan.config.query_pre_attn_scalar**-0.5
    return llama.layer(
        plan, index, options, norms=NORMS, act=gelu, norm_at="heads", scale=scale
    )
