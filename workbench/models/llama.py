"""Llama (2, 3, 3.1, 3.2): pre-norm, grouped queries, default, linear or llama3 rope, SwiGLU."""

from torch import nn

from workbench.bundle import Layer, Options
from workbench.models.cache import Cache
from workbench.models.family import Plan, dims, refuse, rope
from workbench.models.layers import Attention, GatedMLP, Head, RMSNorm


class DecoderLayer(nn.Module):
    """One decoder layer: x → hidden, both [B, C, T, 1] or [B, C, 1, T]; `attention`: keywords of `Attention`."""

    def __init__(self, plan: Plan, index: int, options: Options, **attention):
        super().__init__()
        config, C, D = plan.config, plan.dims.C, plan.dims.D
        self.input_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(C, config.rms_norm_eps)
        shape = plan.shape(index, options)
        self.self_attn = Attention(C, shape, scale=D**-0.5, rotary=D, **attention)
        self.mlp = GatedMLP(
            C, config.intermediate_size, nn.functional.silu, getattr(config, "mlp_bias", False)
        )

    def forward(self, x, cache: Cache, io: dict):
        x = x + self.self_attn(self.input_layernorm(x), cache, io)
        return x + self.mlp(self.post_attention_layernorm(x))


def plan(config) -> Plan:
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    if config.hidden_act != "silu":
        refuse(config, f"activation {config.hidden_act!r}", "silu")
    d = dims(config)
    return Plan(config, d, [rope(config)], [Layer()] * d.L, tied=config.tie_word_embeddings)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    bias = getattr(plan.config, "attention_bias", False)
    return DecoderLayer(plan, index, options, qkv_bias=bias, o_bias=bias)


def head(plan: Plan, rows: int) -> nn.Module:
    return Head(RMSNorm(plan.dims.C, plan.config.rms_norm_eps), plan.dims.C, rows)
