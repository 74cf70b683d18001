"""LFM 2: Llama whose layers are short convolutions but for a few, with an RMSNorm on every head of
q and k."""

import copy
from dataclasses import replace
from functools import partial

from torch import nn

from workbench.bundle import Layer, Options
from workbench.bundle.names import CONV_STATE
from workbench.models import llama
from workbench.models.family import Plan, refuse
from workbench.models.tail import ShortConv

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


def plan(config) -> Plan:
    """The plan of an LFM 2 model; its configuration is given Llama's names for the fields that LFM 2 names differently."""
    if others := set(config.layer_types) - {"conv", "full_attention"}:
        refuse(config, f"layer types {sorted(others)}", "conv or full_attention")
    if "full_attention" not in config.layer_types:
        refuse(config, "convolutions alone", "a layer of full_attention, at least")
    if config.conv_L_cache < 2:
        refuse(config, f"conv_L_cache = {config.conv_L_cache}", "at least two taps")
    as_llama, tail = copy.copy(config), config.conv_L_cache - 1
    as_llama.rms_norm_eps, as_llama.hidden_act = config.norm_eps, "silu"
    as_llama.intermediate_size = _mlp_width(config)
    layers = [Layer(attends=kind != "conv") for kind in config.layer_types]
    state = {CONV_STATE: (tail, config.hidden_size)}
    sides = [{} if layer.attends else state for layer in layers]
    whole = llama.plan_alike(as_llama, layers=layers)
    return replace(whole, side_states=sides, tail=tail, names=NAMES)


def _mlp_width(config) -> int:
    width, unit = config.intermediate_size, config.block_multiple_of
    if not config.block_auto_adjust_ff_dim:
        return width
    return -(-int(config.block_ffn_dim_multiplier * int(2 * width / 3)) // unit) * unit


class ConvDecoderLayer(llama.DecoderLayer):
    """A decoder layer with a short convolution in place of attention."""

    def __init__(self, plan: Plan, index: int, options: Options):
        super().__init__(plan, index, options)
        config = plan.config
        del self.self_attn
        self.conv = ShortConv(
            plan.dims.C, plan.shape(index, options), config.conv_L_cache, config.conv_bias
        )

    def forward(self, x, cache, io: dict):
        x = x + self.conv(self.input_layernorm(x), cache, io)
        return x + self.mlp(self.post_attention_layernorm(x))


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    if not plan.layers[index].attends:
        return ConvDecoderLayer(plan, index, options)
    return llama.layer(plan, index, options, qk_norm=partial(plan.norm, dim=3))
