"""Compressed convolutional attention (CCA, arXiv 2510.04476): ZAYA's attention, with
the state its convolutions carry.

Queries and keys are mixed over time by two short convolutions and pulled towards their
means; half of the value channels are the previous token's. Beyond K and V a layer
therefore keeps `conv_state` [B, 2, (H + H_kv)·D], the last two inputs of the
convolutions, oldest first, and `v_delayed_state` [B, 1, H_kv·D / 2]. Both start as
zeros."""

import torch
from torch import nn

from workbench.bundle.names import CONV_STATE, TAIL_SELECT, V_DELAYED_STATE
from workbench.models.cache import Cache
from workbench.models.layers import NORMAL, AttentionGeometry, Conv, by_peak
from workbench.models.tail import extended

TAPS = 2  # kernel size of each convolution, hence TAPS · 2 - 2 earlier inputs


class Projection(nn.Module):
    """x → q [B, H, T, D], k and v [B, H_kv, T, D], before norm and rope."""

    def __init__(self, C: int, shape: AttentionGeometry):
        super().__init__()
        self.shape = shape
        H = shape.H
        H_kv = shape.H_kv
        D = shape.D
        width = (H + H_kv) * D
        kernel = (1, TAPS)
        self.q_proj = Conv(C, H * D)
        self.k_proj = Conv(C, H_kv * D)
        self.v_proj_current = Conv(C, H_kv * D // 2)
        self.v_proj_delayed = Conv(C, H_kv * D // 2)
        self.conv_qk_depthwise = Conv(width, width, True, kernel=kernel, groups=width)
        self.conv_qk_grouped = Conv(width, width, True, kernel=kernel, groups=H + H_kv)

    def forward(self, x, cache: Cache, select):
        s = self.shape
        q = self.q_proj(x)
        k = self.k_proj(x)
        mixed = self.conv_qk_depthwise(
            self.extended(CONV_STATE, torch.cat([q, k], 1), cache, select)
        )
        mixed = self.conv_qk_grouped(mixed)
        mean_q, mean_k = self.means(s.heads(q, s.H), s.heads(k, s.H_kv))
        q = s.heads(mixed[:, : s.H * s.D], s.H) + mean_q
        k = s.heads(mixed[:, s.H * s.D :], s.H_kv) + mean_k
        # with a tail that is one shorter than that of the convolutions
        delayed = self.extended(
            V_DELAYED_STATE, self.v_proj_delayed(x), cache, select[:, 1:]
        )[..., :-1]
        v = torch.cat(
            [self.v_proj_current(x).reshape(s.B, s.H_kv * s.D // 2, 1, -1), delayed], 1
        )
        return q, k, s.heads(v, s.H_kv)

    def means(self, q, k):
        """Mean of each query with its group's key, and the mean of those over the
        group; [B, H, T, D], [B, H_kv, T, D]."""
        s = self.shape
        groups = s.B * s.H_kv
        mean_q = (
            q.reshape(groups, s.H // s.H_kv, -1, s.D) + k.reshape(groups, 1, -1, s.D)
        ) * 0.5
        mean_k = mean_q.mean(1, keepdim=True)
        return mean_q.reshape(s.B, s.H, -1, s.D), mean_k.reshape(s.B, s.H_kv, -1, s.D)

    def extended(self, name: str, x, cache: Cache, select):
        return extended(self.shape.B, name, x, cache, select)


class QKNorm(nn.Module):
    """q to unit length, k to length √D times its head's temperature, per head.

    The score scale D^-½ and q's own √D cancel, so neither is applied.
    """

    def __init__(self, shape: AttentionGeometry):
        super().__init__()
        self.temp = nn.Parameter(torch.zeros(1, shape.H_kv, 1, 1))

    def forward(self, q, k):
        return self.over(q, torch.sum), self.over(k, torch.mean) * self.temp

    @staticmethod
    def over(x, reduce):
        """x / sqrt(reduce(x²)) along its last axis; 0 stays 0."""
        y, _ = by_peak(x, 3)
        return y / reduce(y * y, 3, keepdim=True).sqrt().clamp(*NORMAL)


class CompressedConvAttention(nn.Module):
    """CCA over a cache of states: x → [B, C, T, 1]; rope turns the first `rotary` dims
    of each head."""

    def __init__(self, C: int, shape: AttentionGeometry, *, rotary: int):
        super().__init__()
        self.shape = shape
        self.rotary = rotary
        self.qkv_proj = Projection(C, shape)
        self.qk_norm = QKNorm(shape)
        self.o_proj = Conv(shape.H * shape.D, C)

    def forward(self, x, cache: Cache, io: dict):
        s = self.shape
        q, k, v = self.qkv_proj(x, cache, io[TAIL_SELECT])
        q, k = self.qk_norm(q, k)
        q = s.rotate(q, io, self.rotary)
        k = s.rotate(k, io, self.rotary)
        return self.o_proj(s.merge(s.attend(q, k, v, cache, io)))
