"""Llama (2, 3, 3.1, 3.2): pre-norm, grouped queries, default or llama3 rope, SwiGLU."""

import torch
from torch import nn

from workbench.bundle import Dims, Layer, Rope

from .family import Plan, refuse, rope_table
from .layers import Attention, GatedMLP, Head, RMSNorm, Shape

ROPE_TYPES = ("default", "linear", "llama3")


class DecoderLayer(nn.Module):
    """One decoder layer with its own cache: x → hidden, both [B, C, T, 1]."""

    def __init__(self, config, options, *, qkv_bias: bool = False, o_bias: bool = False, qk_norm=None):
        super().__init__()
        C, eps, D = config.hidden_size, config.rms_norm_eps, head_dim(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        self.self_attn = Attention(C, shape(config, options), scale=D**-0.5, rotary=D,
                                   qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)  # fmt: skip
        self.mlp = GatedMLP(C, config.intermediate_size, nn.functional.silu, getattr(config, "mlp_bias", False))

    def forward(self, x: torch.Tensor, cache: nn.Module, io: dict) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, io)
        return x + self.mlp(self.post_attention_layernorm(x))


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def dims(config) -> Dims:
    return Dims(C=config.hidden_size, H=config.num_attention_heads, H_kv=config.num_key_value_heads,
                D=head_dim(config), L=config.num_hidden_layers, V=config.vocab_size)  # fmt: skip


def shape(config, options) -> Shape:
    return Shape(options.batch, config.num_attention_heads, config.num_key_value_heads, head_dim(config),
                 options.max_seq_len, options.layout)  # fmt: skip


def check(config) -> None:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        refuse(config, f"rope type {rope_type!r}", f"one of {', '.join(ROPE_TYPES)}")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    if config.hidden_act != "silu":
        refuse(config, f"activation {config.hidden_act!r}", "silu")


def plan(config) -> Plan:
    check(config)
    inv_freq, scale = rope_table(config)
    d = dims(config)
    return Plan(d, [Rope(inv_freq=inv_freq, scale=scale)], [Layer()] * d.L, tied=config.tie_word_embeddings)


def layer(config, index: int, options) -> nn.Module:
    bias = getattr(config, "attention_bias", False)
    return DecoderLayer(config, options, qkv_bias=bias, o_bias=bias)


def head(config, rows: int) -> nn.Module:
    return Head(RMSNorm(config.hidden_size, config.rms_norm_eps), config.hidden_size, rows)
