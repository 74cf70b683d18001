"""Qwen 3.5 (text): gated DeltaNet in most layers, gated attention with q/k norm in the
others; norms of 1 + γ, except the norm of DeltaNet's outputs."""

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import MATRIX_STATE, ORDER
from workbench.models import llama
from workbench.models.family import Plan, Recurrence, plan_hybrid_layers
from workbench.models.layers import Conv, Heads, cut, scaled, vector
from workbench.models.recurrence import (
    Depthwise,
    add_tokens,
    decays,
    log_decay,
    recall,
    repeated,
    softplus,
    unit_length,
)

EPS = 1e-6  # added to the sums of squares of q and k
head = llama.head


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464): a matrix state, which each token corrects,
    replaces attention. x → [B, C, T, 1] or [B, C, 1, T].

        S ← e^g S;  δ = β (v - Sᵀ k);  S ← S + k δᵀ;  o = Sᵀ q    for every value head

    q, k and v come from a short convolution over time; q and k have unit length, and
    each of their heads serves several value heads in a row. A layer keeps
    `matrix_state` [B, H_v, D_k, D_v]. For T tokens at once δ solves (I + A) δ = R with
    A strictly lower triangular: t_max - 1 steps of δ ← R - A δ are exact. A product of
    powers of A takes fewer, but in fp16 it errs by 1 at T = 16."""

    def __init__(self, plan: Plan, options: Options):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        H = config.linear_num_value_heads
        D = config.linear_value_head_dim
        self.t_max = options.t_max
        shape = options.batch, options.layout
        self.values = Heads(*shape, count=H, D=D)
        self.keys = Heads(
            *shape, count=config.linear_num_key_heads, D=config.linear_key_head_dim
        )
        self.widths = self.keys.width, self.keys.width, self.values.width
        width = sum(self.widths)
        self.in_proj_qkv = Conv(C, width)
        self.in_proj_z = Conv(C, self.values.width)
        self.in_proj_b = Conv(C, H)
        self.in_proj_a = Conv(C, H)
        self.conv1d = Depthwise(options.batch, width, config.linear_conv_kernel_dim)
        self.A_log = vector(H)
        self.dt_bias = vector(H)
        self.norm = plan.norm(D, dim=3, offset=0.0)
        self.out_proj = Conv(self.values.width, C)

    def forward(self, x, cache: dict, io: dict):
        values = self.values
        keys = self.keys
        order = io[ORDER]
        mixed = nn.functional.silu(self.conv1d(self.in_proj_qkv(x), cache, io))
        q, k, v = cut(mixed, *self.widths)
        q = scaled(unit_length(keys.split(q), EPS), keys.D**-0.5)
        k = unit_length(keys.split(k), EPS)
        q, k = (repeated(part, keys, values.count // keys.count) for part in (q, k))
        v = values.split(v)
        step = softplus(values.numbers(self.in_proj_a(x)) + self.dt_bias)
        among = decays(log_decay(self.A_log, step), order)
        matrix = cache[MATRIX_STATE]
        beta = torch.sigmoid(values.numbers(self.in_proj_b(x))) * order.clamp(0, 1)
        system = (k @ k.transpose(2, 3)) * among.between * beta
        right = delta = (v - (k @ matrix) * among.enter) * beta
        # A is strictly lower triangular: its power of T is 0, and T - 1 steps are exact
        for _ in range(self.t_max - 1):
            delta = right - system @ delta
        o = recall(q, k, delta, matrix, among)
        add_tokens(matrix, k, delta, among)
        gate = nn.functional.silu(values.split(self.in_proj_z(x)))
        return self.out_proj(values.merge(self.norm(o) * gate))


def plan(config) -> Plan:
    H = config.linear_num_value_heads
    D_k = config.linear_key_head_dim
    D_v = config.linear_value_head_dim
    recurrence = Recurrence(
        "linear_attention",
        taps=config.linear_conv_kernel_dim,
        channels=2 * config.linear_num_key_heads * D_k + H * D_v,
        matrix=(H, D_k, D_v),
    )
    layers, side_states = plan_hybrid_layers(config, recurrence)
    return llama.plan(
        config,
        partial_rotary=True,
        norm_offset=1.0,
        layers=layers,
        side_states=side_states,
    )


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    mixer = None
    if not plan.layers[index].attends:
        mixer = llama.Mixer("linear_attn", GatedDeltaNet(plan, options))
    settings = llama.LayerSettings(gated=True, norm_at="heads")
    return llama.layer(plan, index, options, settings, mixer)
