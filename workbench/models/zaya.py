"""ZAYA1: compressed convolutional attention, one expert per token, learned scales on
both sides of every residual sum."""

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import (
    BASE,
    CONV_STATE,
    EXPERT_IN,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    V_DELAYED_STATE,
)
from workbench.models import llama
from workbench.models.cache import Cache
from workbench.models.cca import TAPS, CompressedConvAttention
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan, alternating, dims, refuse
from workbench.models.layers import RMSNorm
from workbench.models.moe import Experts, Mixture, Router

# in tensor names of the layout of 80 alternating blocks
LEGACY = ("zaya_block.", "self_attn.qkv.")


def vector(width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, width, 1, 1))


class ResidualScaling(nn.Module):
    """(hidden + bias) · scale + (residual + bias) · scale, each with its own vectors.

    Bias and scale stay factors: their product would be rounded to fp16 once more.
    """

    def __init__(self, C: int):
        super().__init__()
        self.hidden_states_scale = vector(C)
        self.hidden_states_bias = vector(C)
        self.residual_scale = vector(C)
        self.residual_bias = vector(C)

    def forward(self, hidden, residual):
        hidden = (hidden + self.hidden_states_bias) * self.hidden_states_scale
        return hidden + (residual + self.residual_bias) * self.residual_scale


class ZayaDecoderLayer(nn.Module):
    """One decoder layer: x → hidden; reads the router state of the layer before and
    leaves its own in `io`.

    With routed experts it ends at the router: `io` gets what the host and the expert
    shards need to finish the layer."""

    def __init__(self, plan: Plan, index: int, options: Options):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        eps = plan.config.rms_norm_eps
        shape = plan.shape(index, options)
        self.routed = options.moe == "routed"
        self.input_layernorm = RMSNorm(C, eps)
        self.post_attention_layernorm = RMSNorm(C, eps)
        self.self_attn = CompressedConvAttention(C, shape, rotary=plan.rotary(index))
        gate = Router(C, plan.router_width, plan.experts, eps, first=index == 0)
        sizes = plan.experts, C, config.moe_intermediate_size, shape
        self.mlp = Mixture(gate, None if self.routed else Experts(*sizes))
        self.post_attention_residual_scale = ResidualScaling(C)
        self.post_mlp_residual_scale = ResidualScaling(C)

    def forward(self, x, cache: Cache, io: dict):
        x = self.post_attention_residual_scale(
            self.self_attn(self.input_layernorm(x), cache, io), x
        )
        normed = self.post_attention_layernorm(x)
        state, probabilities, scores = self.mlp.gate(
            normed, io.get(ROUTER_STATE_OUT, io[ROUTER_STATE])
        )
        io[ROUTER_STATE_OUT] = state
        if not self.routed:
            return self.post_mlp_residual_scale(
                self.mlp.dense(normed, probabilities, scores), x
            )
        # x - x: zeros that no converter folds into bias · scale
        base = self.post_mlp_residual_scale(x - x, x)
        io |= {
            BASE: base,
            EXPERT_IN: normed,
            ROUTER_PROBS: probabilities,
            ROUTER_SCORES: scores,
        }
        return base


class Expert(nn.Module):
    """One expert of one layer: hidden = acc + expert_weight · expert(expert_in) ·
    scale."""

    def __init__(self, plan: Plan, options: Options):
        super().__init__()
        C = plan.dims.C
        experts = Experts(
            1, C, plan.config.moe_intermediate_size, plan.shape(0, options)
        )
        self.mlp = nn.ModuleDict({"experts": experts})
        self.post_mlp_residual_scale = nn.ParameterDict(
            {"hidden_states_scale": vector(C)}
        )

    def forward(self, x, weight, acc):
        return (
            acc
            + self.mlp["experts"](x, weight)
            * self.post_mlp_residual_scale["hidden_states_scale"]
        )


def plan(config) -> Plan:
    if config.attention_bias or config.lm_head_bias:
        refuse(config, "attention_bias or lm_head_bias", "neither, as in ZAYA1")
    if config.hidden_act != "silu":
        refuse(config, f"activation {config.hidden_act!r}", "silu")
    taps = config.cca_time0, config.cca_time1
    if taps != (TAPS, TAPS):
        refuse(
            config, f"cca_time0, cca_time1 = {taps[0]}, {taps[1]}", f"{TAPS} and {TAPS}"
        )
    ropes, layers = alternating(config, "hybrid", "hybrid_sliding")
    d = dims(config)
    side = {
        CONV_STATE: (2 * TAPS - 2, (d.H + d.H_kv) * d.D),
        V_DELAYED_STATE: (1, d.H_kv * d.D // 2),
    }
    return Plan(
        config,
        d,
        ropes,
        layers,
        config.tie_word_embeddings,
        embedding={
            "bias": "input_hidden_states_bias",
            "scale": "input_hidden_states_scale",
        },
        side_states=[side] * d.L,
        router_width=config.router_hidden_size,
        experts=config.num_experts,
    )


def settle(plan: Plan, source: Checkpoint) -> Plan:
    """Raises an InputError for a checkpoint in the legacy layout of alternating blocks;
    returns the plan unchanged."""
    for name in source.header:
        if any(part in name for part in LEGACY):
            refuse(
                plan.config,
                f"the legacy layout (tensor {name!r})",
                "transformers' layout (self_attn.qkv_proj, mlp.experts)",
            )
    return plan


layer = ZayaDecoderLayer
expert = Expert
head = llama.head
