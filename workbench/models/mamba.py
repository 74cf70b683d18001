"""Mamba 2 (arXiv 2405.21060): a matrix state, which decays and to which each token
adds, replaces attention.

    S ← e^g S + (dt · x) Bᵀ;  y = S C + D · x        for every head

x, B and C come from a short convolution over time; heads of one group share B and C. A
layer keeps `conv_state` [B, taps - 1, W], the last inputs of the convolution, and
`matrix_state` [B, H, P, N], where P is the width of a head and N that of B and C."""

from dataclasses import replace

import torch
from torch import nn

from workbench.bundle.names import (
    CONV_STATE,
    MATRIX_STATE,
    ORDER,
    TAIL_KEEP,
    TAIL_SELECT,
)
from workbench.models.cache import Cache
from workbench.models.layers import AttentionGeometry, Conv, RMSNorm
from workbench.models.recurrence import (
    add_tokens,
    among_tokens,
    decays,
    log_decay,
    per_head,
    repeated,
    softplus,
)
from workbench.models.tail import depthwise, extended


class Mamba2(nn.Module):
    """x → [B, C, T, 1] or [B, C, 1, T].

    Args:
        shape: sizes of the heads, D the width P of one, `H_kv` the number of groups.
        state_width: N.
        biases: of the convolution, of both projections.
        norm: RMSNorm over axis 2 of [B, groups, channels of a group, T].
    """

    def __init__(
        self,
        C: int,
        shape: AttentionGeometry,
        state_width: int,
        taps: int,
        biases: tuple[bool, bool],
        norm: RMSNorm,
    ):
        super().__init__()
        self.shape = shape
        self.inner = shape.H * shape.D
        self.groups = replace(shape, H=shape.H_kv, D=state_width)
        self.width = width = self.inner + 2 * shape.H_kv * state_width
        of_conv, of_projections = biases
        self.in_proj = Conv(C, self.inner + width + shape.H, of_projections)
        self.conv1d = depthwise(width, taps, of_conv)
        self.A_log, self.dt_bias, self.D = (per_head(shape.H) for _ in range(3))
        self.norm = norm
        self.out_proj = Conv(self.inner, C, of_projections)
        self.norm.weight = nn.Parameter(
            torch.zeros(1, shape.H_kv, self.inner // shape.H_kv, 1)
        )

    def xbc(self, u, cache: Cache, io: dict):
        """x [B, H, T, P], B and C [B, H, T, N]."""
        s = self.shape
        groups = self.groups
        tail = io[TAIL_SELECT], io.get(TAIL_KEEP)
        mixed = nn.functional.silu(
            self.conv1d(extended(s.B, CONV_STATE, u, cache, *tail))
        )
        split = self.inner + groups.H * groups.D
        parts = mixed[:, self.inner : split], mixed[:, split:]
        heads = (groups.heads(part, groups.H) for part in parts)
        times = s.H // groups.H
        shared = (repeated(part, groups, times) for part in heads)
        return s.heads(mixed[:, : self.inner], s.H), *shared

    def forward(self, x, cache: Cache, io: dict):
        s = self.shape
        order = io[ORDER]
        projected = self.in_proj(x)
        gate = projected[:, : self.inner]
        u = projected[:, self.inner : self.inner + self.width]
        step = replace(s, D=1).heads(projected[:, self.inner + self.width :], s.H)
        step = softplus(step + self.dt_bias) * order.clamp(0, 1)
        x, b, c = self.xbc(u, cache, io)
        g = log_decay(self.A_log, step)
        matrix = cache.read(MATRIX_STATE)
        scaled_x = x * step
        among = decays(g, order)
        y = (c @ matrix.transpose(2, 3)) * among.enter + among_tokens(
            c, b, scaled_x, among
        )
        add_tokens(matrix, scaled_x, b, among, cache)
        y = s.merge(y + x * self.D) * nn.functional.silu(gate)
        y = self.norm(y.reshape(s.B, s.H_kv, self.inner // s.H_kv, -1))
        return self.out_proj(s.plane(y, self.inner))
