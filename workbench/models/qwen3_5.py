"""Qwen 3.5 (text): gated DeltaNet in most layers, gated attention with q/k norm in the
others; norms of 1 + γ, but for that of DeltaNet's own outputs."""

from dataclasses import replace
from functools import partial

from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import CONV_STATE, MATRIX_STATE
from workbench.models import llama
from workbench.models.deltanet import GatedDeltaNet
from workbench.models.family import Plan, hybrid_layers

head = llama.head


def plan(config) -> Plan:
    layers = hybrid_layers(config, "linear_attention")
    whole = llama.plan_alike(config, layers=layers, partial_rotary=True)
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads
    D_k = config.linear_key_head_dim
    D_v = config.linear_value_head_dim
    tail = config.linear_conv_kernel_dim - 1
    state = {
        CONV_STATE: (tail, 2 * keys * D_k + heads * D_v),
        MATRIX_STATE: (heads, D_k, D_v),
    }
    sides = [{} if layer.attends else state for layer in layers]
    return replace(whole, side_states=sides, tail=tail, norm_offset=1.0)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    if plan.layers[index].attends:
        norm = partial(plan.norm, dim=3)
        return llama.layer(plan, index, options, gated=True, qk_norm=norm)
    config = plan.config
    D = plan.config.linear_value_head_dim
    sizes = {
        "H": config.linear_num_value_heads,
        "H_kv": config.linear_num_key_heads,
        "D": D,
    }
    mixer = GatedDeltaNet(
        plan.dims.C,
        replace(plan.shape(index, options), **sizes),
        config.linear_key_head_dim,
        config.linear_conv_kernel_dim,
        replace(plan, norm_offset=0.0).norm(D, dim=3),
        options.t_max,
    )
    return llama.layer(plan, index, options, mixer=("linear_attn", mixer))
