"""Gated DeltaNet (arXiv 2412.06464): a matrix state, which each token corrects,
replaces attention.

    S ← e^g S;  δ = β (v - Sᵀ k);  S ← S + k δᵀ;  o = Sᵀ q        for every value head

q, k and v come from a short convolution over time; q and k have unit length. A layer
keeps `conv_state` [B, taps - 1, W], the last inputs of the convolution, and
`matrix_state` [B, H_v, D_k, D_v]. For T tokens at once δ solves (I + A) δ = R with A
strictly lower triangular: T - 1 steps of δ ← R - A δ are exact. A product of powers of
A takes fewer, but in fp16 it errs by 1 at T = 16."""

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
from workbench.models.layers import AttentionGeometry, Conv, scaled
from workbench.models.recurrence import (
    add_tokens,
    among_tokens,
    decays,
    log_decay,
    per_head,
    repeated,
    softplus,
    unit,
)
from workbench.models.tail import depthwise, extended

EPS = 1e-6  # added to the sums of squares of q and k


class GatedDeltaNet(nn.Module):
    """x → [B, C, T, 1] or [B, C, 1, T].

    Args:
        shape: sizes of the value heads, `H_kv` the number of key heads; each of these
            serves H / H_kv value heads in a row.
        key_width: D_k.
        norm: RMSNorm over the D channels of a value head.
        t_max: the largest T.
    """

    def __init__(
        self,
        C: int,
        shape: AttentionGeometry,
        key_width: int,
        taps: int,
        norm,
        t_max: int,
    ):
        super().__init__()
        self.values = shape
        self.t_max = t_max
        self.keys = replace(shape, H=shape.H_kv, D=key_width)
        values = shape.H * shape.D
        keys = shape.H_kv * key_width
        width = 2 * keys + values
        self.in_proj_qkv = Conv(C, width)
        self.in_proj_z = Conv(C, values)
        self.in_proj_b = Conv(C, shape.H)
        self.in_proj_a = Conv(C, shape.H)
        self.conv1d = depthwise(width, taps)
        self.A_log = per_head(shape.H)
        self.dt_bias = per_head(shape.H)
        self.norm = norm
        self.out_proj = Conv(values, C)

    def qkv(self, x, cache: Cache, io: dict):
        """q and k [B, H, T, D_k], of unit length and q over √D_k, and v [B, H, T,
        D]."""
        keys = self.keys
        values = self.values
        tail = io[TAIL_SELECT], io.get(TAIL_KEEP)
        joined = extended(values.B, CONV_STATE, self.in_proj_qkv(x), cache, *tail)
        mixed = nn.functional.silu(self.conv1d(joined))
        width = keys.H * keys.D
        q = unit(keys.heads(mixed[:, :width], keys.H), EPS)
        k = unit(keys.heads(mixed[:, width : 2 * width], keys.H), EPS)
        q, k = (
            repeated(a, keys, values.H // keys.H) for a in (scaled(q, keys.D**-0.5), k)
        )
        return q, k, values.heads(mixed[:, 2 * width :], values.H)

    def forward(self, x, cache: Cache, io: dict):
        s = self.values
        order = io[ORDER]
        single = replace(s, D=1)
        q, k, v = self.qkv(x, cache, io)
        step = softplus(single.heads(self.in_proj_a(x), s.H) + self.dt_bias)
        g = log_decay(self.A_log, step)
        matrix = cache.read(MATRIX_STATE)
        beta = torch.sigmoid(single.heads(self.in_proj_b(x), s.H)) * order.clamp(0, 1)
        among = decays(g, order)
        system = (k @ k.transpose(2, 3)) * among.between * beta
        right = delta = (v - (k @ matrix) * among.enter) * beta
        for _ in range(self.t_max - 1):
            delta = right - system @ delta
        o = (q @ matrix) * among.enter + among_tokens(q, k, delta, among)
        add_tokens(matrix, k, delta, among, cache)
        gate = nn.functional.silu(s.heads(self.in_proj_z(x), s.H))
        return self.out_proj(s.merge(self.norm(o) * gate))
