"""Granite 4 (hybrid, dense): Mamba 2 in most layers, attention in the others, by
default without rope; embeddings, branches, scores and logits have multipliers."""

import copy
from dataclasses import replace

from torch import nn

from workbench.bundle import Options, Rope
from workbench.bundle.names import CONV_STATE, MATRIX_STATE
from workbench.models import llama
from workbench.models.family import Plan, head_dim, hybrid_layers, refuse, rope
from workbench.models.layers import GatedMLP, Head
from workbench.models.mamba import Mamba2

NAMES = {
    "mlp": "shared_mlp",
    "gate_up_proj": "input_linear",
    "down_proj": "output_linear",
}


def plan(config) -> Plan:
    if config.num_local_experts:
        refuse(config, f"num_local_experts = {config.num_local_experts}", "no experts")
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        refuse(
            config,
            f"time_step_limit = {config.time_step_limit}",
            "steps without a limit",
        )
    layers = hybrid_layers(config, "linear_attention")
    dense = copy.copy(config)
    dense.intermediate_size = config.shared_intermediate_size
    table = Rope(name="nope", inv_freq=[0.0] * (head_dim(config) // 2))
    if config.position_embedding_type == "rope":
        table = rope(config)
    layers = [layer.model_copy(update={"rope": table.name}) for layer in layers]
    heads = config.mamba_n_heads
    P = config.mamba_d_head
    N = config.mamba_d_state
    width = heads * P + 2 * config.mamba_n_groups * N
    tail = config.mamba_d_conv - 1
    state = {CONV_STATE: (tail, width), MATRIX_STATE: (heads, P, N)}
    sides = [{} if layer.attends else state for layer in layers]
    return llama.plan_alike(
        dense,
        rope=[table],
        layers=layers,
        side_states=sides,
        tail=tail,
        names=NAMES,
        embedding_scale=float(config.embedding_multiplier),
    )


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    config = plan.config
    mixer = None
    if not plan.layers[index].attends:
        heads = config.mamba_n_heads
        groups = config.mamba_n_groups
        P = config.mamba_d_head
        shape = replace(plan.shape(index, options), H=heads, H_kv=groups, D=P)
        biases = config.mamba_conv_bias, config.mamba_proj_bias
        norm = plan.norm(heads * P // groups, dim=2)
        sizes = config.mamba_d_state, config.mamba_d_conv
        mixer = "mamba", Mamba2(plan.dims.C, shape, *sizes, biases, norm)
    gain = config.residual_multiplier
    scale = config.attention_multiplier
    made = llama.layer(plan, index, options, mixer=mixer, gain=gain, scale=scale)
    made.mlp = GatedMLP(
        plan.dims.C, config.intermediate_size, nn.functional.silu, fused=True
    )
    return made


def head(plan: Plan, rows: int) -> nn.Module:
    C = plan.dims.C
    return Head(plan.norm(C), C, rows, plan.config.logits_scaling)
