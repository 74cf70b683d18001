"""Gemma 3 (text): four norms of 1 + γ, per-head q/k norm, local and global attention
with a rotary base each.

Its residual stream outgrows fp16 (peaks of 292,969 are reported), so shards keep it as
2^-exponent of the model's: embeddings and whatever a layer adds are scaled down by a
power of two, and the norms that read it scale eps along."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from workbench.bundle import Options
from workbench.models.cache import Cache
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan, alternating, dims, refuse
from workbench.models.layers import NORMAL, Attention, GatedMLP, Head, RMSNorm

# what they return joins the residual stream
ADDING = "post_attention_layernorm", "post_feedforward_layernorm"
CHUNK = 16_384  # rows of the embedding table read at a time


class GemmaDecoderLayer(nn.Module):
    """One decoder layer: x → hidden, both [B, C, T, 1] or [B, C, 1, T] and
    2^-residual_exponent of the model's."""

    def __init__(self, plan: Plan, index: int, options: Options):
        super().__init__()
        config = plan.config
        d = plan.dims
        e = plan.residual_exponent
        norm = partial(RMSNorm, eps=config.rms_norm_eps, offset=1.0)
        self.input_layernorm = norm(d.C, exponent=e)
        self.pre_feedforward_layernorm = norm(d.C, exponent=e)
        self.post_attention_layernorm = norm(d.C, gain=2.0**-e)
        self.post_feedforward_layernorm = norm(d.C, gain=2.0**-e)
        self.self_attn = Attention(
            d.C,
            plan.shape(index, options),
            scale=config.query_pre_attn_scalar**-0.5,
            rotary=d.D,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=partial(norm, dim=3),
        )
        gelu = partial(nn.functional.gelu, approximate="tanh")
        self.mlp = GatedMLP(d.C, config.intermediate_size, gelu)

    def forward(self, x, cache: Cache, io: dict):
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), cache, io)
        )
        return x + self.post_feedforward_layernorm(
            self.mlp(self.pre_feedforward_layernorm(x))
        )


def plan(config) -> Plan:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (softcap := getattr(config, name)) is not None:
            refuse(config, f"{name} = {softcap}", "no softcap (Gemma 3 has none)")
    if config.use_bidirectional_attention:
        refuse(config, "use_bidirectional_attention = true", "causal attention")
    if config.hidden_activation != "gelu_pytorch_tanh":
        refuse(config, f"activation {config.hidden_activation!r}", "gelu_pytorch_tanh")
    ropes, layers = alternating(config, "full_attention", "sliding_attention")
    if any(2 * len(rope.inv_freq) != config.head_dim for rope in ropes):
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    return Plan(
        config,
        dims(config),
        ropes,
        layers,
        config.tie_word_embeddings,
        embedding_scale=config.hidden_size**0.5,
    )


def settle(plan: Plan, source: Checkpoint) -> Plan:
    """The plan with the smallest residual exponent that keeps the stream inside fp16
    whatever the input.

    No channel of an RMSNorm over C exceeds √C · |weight|, so embeddings and adding norms bound
    every channel.
    """
    bound = torch.zeros(plan.dims.C)
    for start in range(0, plan.dims.V, CHUNK):
        rows = slice(start, min(start + CHUNK, plan.dims.V))
        table = source.tensor(f"{source.prefix}embed_tokens.weight", rows)
        bound = torch.maximum(bound, table.abs().amax(0))
    for i in range(plan.dims.L):
        for name in ADDING:
            bound += (
                1 + source.tensor(f"{source.prefix}layers.{i}.{name}.weight")
            ).abs()
    peak = float(bound.max()) * plan.dims.C**0.5
    exponent = max(0, math.frexp(peak / NORMAL[1])[1])
    scale = plan.embedding_scale * 2.0**-exponent
    return replace(plan, residual_exponent=exponent, embedding_scale=scale)


layer = GemmaDecoderLayer


def head(plan: Plan, rows: int) -> nn.Module:
    C = plan.dims.C
    eps = plan.config.rms_norm_eps
    return Head(RMSNorm(C, eps, offset=1.0, exponent=plan.residual_exponent), C, rows)
