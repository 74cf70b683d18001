"""LFM 2: Llama whose layers are short convolutions but for a few, with an RMSNorm on
every head of q and k."""

import copy
from functools import partial

from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import CONV_STATE
from workbench.models import llama
from workbench.models.family import Plan, hybrid_layers, refuse
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
    """The plan of an LFM 2 model; its configuration is given Llama's names for the
    fields that LFM 2 names differently."""
    layers = hybrid_layers(config, "conv")
    if config.conv_L_cache < 2:
        refuse(config, f"conv_L_cache = {config.conv_L_cache}", "at least two taps")
    as_llama = copy.copy(config)
    tail = config.conv_L_cache - 1
    as_llama.rms_norm_eps = config.norm_eps
    as_llama.hidden_act = "silu"
    as_llama.intermediate_size = _mlp_width(config)
    state = {CONV_STATE: (tail, config.hidden_size)}
    sides = [{} if layer.attends else state for layer in layers]
    own = {"layers": layers, "side_states": sides, "tail": tail, "names": NAMES}
    return llama.plan_alike(as_llama, **own)


def _mlp_width(config) -> int:
    width = config.intermediate_size
    unit = config.block_multiple_of
    if not config.block_auto_adjust_ff_dim:
        return width
    return -(-int(config.block_ffn_dim_multiplier * int(2 * width / 3)) // unit) * unit


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    if plan.layers[index].attends:
        return llama.layer(plan, index, options, qk_norm=partial(plan.norm, dim=3))
    config = plan.config
    shape = plan.shape(index, options)
    conv = ShortConv(plan.dims.C, shape, config.conv_L_cache, config.conv_bias)
    return llama.layer(plan, index, options, mixer=("conv", conv))
