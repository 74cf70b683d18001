"""LFM 2: Llama with short convolutions in most layers, and an RMSNorm on every head of q
and k."""

import copy

from torch import nn

from workbench.bundle import Options
from workbench.models import llama
from workbench.models.family import Plan, Recurrence, plan_hybrid_layers, refuse
from workbench.models.layers import ActivationShape, Conv, cut
from workbench.models.recurrence import Depthwise

NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "norm": "embedding_norm",
}
head = llama.head


class ShortConv(nn.Module):
    """out(c ∘ conv(b ∘ x)), where one projection makes b, c and x, and `conv` has a few
    taps over time for each channel."""

    def __init__(self, plan: Plan, options: Options):
        super().__init__()
        config = plan.config
        self.C = C = plan.dims.C
        self.shape = ActivationShape(options.batch, options.layout)
        self.in_proj = Conv(C, 3 * C, config.conv_bias)
        self.out_proj = Conv(C, C, config.conv_bias)
        self.conv = Depthwise(options.batch, C, config.conv_L_cache, config.conv_bias)

    def forward(self, x, cache: dict, io: dict):
        b, c, x = cut(self.in_proj(x), self.C, self.C, self.C)
        mixed = self.conv(b * x, cache, io)
        return self.out_proj(c * self.shape.plane(mixed, self.C))


def plan(config) -> Plan:
    """The plan of an LFM 2 model; its configuration is given Llama's names for the
    fields that LFM 2 names differently."""
    recurrence = Recurrence(
        "conv", taps=config.conv_L_cache, channels=config.hidden_size
    )
    layers, side_states = plan_hybrid_layers(config, recurrence)
    if config.conv_L_cache < 2:
        refuse(config, f"conv_L_cache = {config.conv_L_cache}", "at least two taps")
    # transformers' object stays as it is: others read it
    as_llama = copy.copy(config)
    as_llama.rms_norm_eps = config.norm_eps
    if config.block_auto_adjust_ff_dim:
        multiple = config.block_multiple_of
        width = int(2 * config.intermediate_size / 3)
        width = int(config.block_ffn_dim_multiplier * width)
        as_llama.intermediate_size = -(-width // multiple) * multiple
    return llama.plan(as_llama, names=NAMES, layers=layers, side_states=side_states)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    mixer = None
    if not plan.layers[index].attends:
        mixer = llama.Mixer("conv", ShortConv(plan, options))
    settings = llama.LayerSettings(norm_at="heads")
    return llama.layer(plan, index, options, settings, mixer)
