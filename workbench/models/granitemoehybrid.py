"""Granite 4 (hybrid, dense): Mamba 2 in most layers, attention in the others, by
default without rope; embeddings, branches, scores and logits have multipliers."""

import copy

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import MATRIX_STATE, ORDER
from workbench.models import llama
from workbench.models.family import (
    Plan,
    Recurrence,
    no_rope_table,
    plan_hybrid_layers,
    refuse,
    rope_table,
)
from workbench.models.layers import Conv, Heads, cut, vector
from workbench.models.recurrence import (
    Depthwise,
    add_tokens,
    decays,
    log_decay,
    recall,
    repeated,
    softplus,
)

NAMES = {
    "mlp": "shared_mlp",
    "gate_up_proj": "input_linear",
    "down_proj": "output_linear",
}


class Mamba2(nn.Module):
    """Mamba 2 (arXiv 2405.21060): a matrix state, which decays and to which each token
    adds, replaces attention. x → [B, C, T, 1] or [B, C, 1, T].

        S ← e^g S + (dt · x) Bᵀ;  y = S C + D · x    for every head

    x, B and C come from a short convolution over time; heads of one group share B and
    C. A layer keeps `matrix_state` [B, H, P, N], where P is the width of a head and N
    that of B and C.

    `heads` are H heads of P channels, `groups` those of B and C, of N channels each."""

    def __init__(self, plan: Plan, options: Options):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        bias = config.mamba_proj_bias
        shape = options.batch, options.layout
        heads = Heads(*shape, count=config.mamba_n_heads, D=config.mamba_d_head)
        groups = Heads(*shape, count=config.mamba_n_groups, D=config.mamba_d_state)
        self.heads, self.groups = heads, groups
        # what the convolution gives: x, B, C
        self.parts = heads.width, groups.width, groups.width
        width = sum(self.parts)
        # what the first projection gives: gate, the convolution's input, dt
        self.widths = heads.width, width, heads.count
        self.in_proj = Conv(C, sum(self.widths), bias)
        taps, has_bias = config.mamba_d_conv, config.mamba_conv_bias
        self.conv1d = Depthwise(options.batch, width, taps, has_bias)
        self.A_log, self.dt_bias, self.D = (vector(heads.count) for _ in range(3))
        # over the channels of each group [B, groups, channels, T]
        self.channels = heads.width // groups.count
        self.norm = plan.norm(self.channels, dim=2)
        weight = torch.zeros(1, groups.count, self.channels, 1)
        self.norm.weight = nn.Parameter(weight)
        self.out_proj = Conv(heads.width, C, bias)

    def forward(self, x, cache: dict, io: dict):
        heads = self.heads
        groups = self.groups
        order = io[ORDER]
        gate, u, step = cut(self.in_proj(x), *self.widths)
        step = softplus(heads.numbers(step) + self.dt_bias)
        step = step * order.clamp(0, 1)  # 0 for dummies: they add and decay nothing
        mixed = nn.functional.silu(self.conv1d(u, cache, io))
        x, b, c = cut(mixed, *self.parts)
        x = heads.split(x)
        times = heads.count // groups.count
        b, c = (repeated(groups.split(part), groups, times) for part in (b, c))
        among = decays(log_decay(self.A_log, step), order)
        matrix = cache[MATRIX_STATE]
        added = x * step
        y = recall(c, b, added, matrix.transpose(2, 3), among)
        add_tokens(matrix, added, b, among)
        y = heads.merge(y + x * self.D) * nn.functional.silu(gate)
        y = self.norm(y.reshape(heads.B, groups.count, self.channels, -1))
        return self.out_proj(heads.plane(y, heads.width))


def plan(config) -> Plan:
    if config.num_local_experts:
        refuse(config, f"num_local_experts = {config.num_local_experts}", "no experts")
    if tuple(limit := config.time_step_limit) != (0.0, float("inf")):
        refuse(config, f"time_step_limit = {limit}", "steps without a limit")
    if not config.logits_scaling:
        refuse(config, f"logits_scaling = {config.logits_scaling}", "a number above 0")
    H = config.mamba_n_heads
    P = config.mamba_d_head
    N = config.mamba_d_state
    recurrence = Recurrence(
        "linear_attention",
        taps=config.mamba_d_conv,
        channels=H * P + 2 * config.mamba_n_groups * N,
        matrix=(H, P, N),
    )
    has_rope = config.position_embedding_type == "rope"
    table = rope_table(config) if has_rope else no_rope_table(config)
    layers, side_states = plan_hybrid_layers(config, recurrence, table.name)
    # `llama.plan` and its layers read the width of the MLP under Llama's name
    dense = copy.copy(config)
    dense.intermediate_size = config.shared_intermediate_size
    return llama.plan(
        dense,
        rope=[table],
        layers=layers,
        side_states=side_states,
        names=NAMES,
        embedding_scale=float(config.embedding_multiplier),
    )


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    config = plan.config
    mixer = None
    if not plan.layers[index].attends:
        mixer = llama.Mixer("mamba", Mamba2(plan, options))
    settings = llama.LayerSettings(
        fused_mlp=True,
        gain=config.residual_multiplier,
        scale=config.attention_multiplier,
    )
    return llama.layer(plan, index, options, settings, mixer)


def head(plan: Plan, rows: int) -> nn.Module:
    return llama.head(plan, rows, plan.config.logits_scaling)
