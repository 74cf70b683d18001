"""Transformer parts in the shape that suits the Neural Engine: rank 4, channels on axis
1, linear layers as 1×1 convolutions. Every module accepts x [B, C, T, 1] or [B, C, 1,
T]: it relies on the channel axis alone and gets T by reshaping. Constants that fp16
would round are kept as a product of two that it rounds far less (`split`), so that the
exported arithmetic differs from the original's only by what the stored weights differ.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import nn

from workbench.bundle.names import (
    ATTN_MASK,
    K_STATE,
    MAX_FP16,
    MIN_NORMAL,
    ROPE_COS,
    ROPE_SIN,
    V_STATE,
)
from workbench.models.cache import Cache

NORMAL = (MIN_NORMAL, MAX_FP16)  # magnitudes that fp16 holds in full precision


@lru_cache
def split(value: float) -> tuple[float, ...]:
    """fp16 factors of `value`: itself when fp16 holds it, else two whose product is
    within about 1e-7 of it."""
    if value == 0 or float(np.float16(value)) == value:
        return (value,)
    start = np.float16(abs(value) ** 0.5).view(np.uint16)
    first = (
        np.arange(start, start + 1024, dtype=np.uint16)
        .view(np.float16)
        .astype(np.float64)
    )
    second = (value / first).astype(np.float16).astype(np.float64)
    best = int(np.argmin(np.abs(first * second - value)))
    return float(first[best]), float(second[best])


@lru_cache
def split_closely(value: float) -> tuple[float, ...]:
    """Two fp16 factors as `split` gives them, and a third from 1 to 2, with which the
    product is nearest to `value`: within 1e-8 of it, where the product of two misses
    1e-5 by 3e-6 of it."""
    thirds = (1 + np.arange(1024) / 1024).tolist()
    products = [(*(*split(value / third), 1.0)[:2], third) for third in thirds]
    return min(products, key=lambda factors: abs(math.prod(factors) - value))


def scaled(x, value: float):
    """x · value through `split`: one or two multiplications."""
    for factor in split(value):
        x = x if factor == 1 else x * factor
    return x


def by_peak(x, dim: int):
    """x divided by its largest magnitude along `dim`, and that magnitude; squares of
    the quotient are in [0, 1]."""
    peak = x.abs().amax(dim, keepdim=True).clamp(*NORMAL)
    return x / peak, peak


class Conv(nn.Module):
    """A convolution with weight [outputs, inputs / groups, *kernel]; by default a
    linear layer as a 1×1 convolution."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        kernel=(1, 1),
        groups: int = 1,
    ):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // groups, *kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, self.bias, groups=self.groups)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over `dim`, safe in fp16 for every finite x.

    Args:
        offset: what the stored weight adds to the checkpoint's (1 for Gemma's `1 + γ`).
        exponent: x is 2^-exponent of the model's, so eps is scaled along and the result
            is the model's.
        gain: power of two that multiplies the result before its weight does.
        close_eps: keep eps as three factors (see `split_closely`).
    """

    def __init__(
        self,
        width: int,
        eps: float,
        dim: int = 1,
        *,
        offset=0.0,
        exponent: int = 0,
        gain: float = 1.0,
        close_eps: bool = False,
    ):
        super().__init__()
        shape = [1, 1, 1, 1]
        shape[dim] = width
        self.dim = dim
        self.offset = offset
        self.unit = 2.0**-exponent
        self.gain = gain
        self.weight = nn.Parameter(torch.zeros(shape))
        *factors, self.third = (
            split_closely(eps) if close_eps else (*split(eps), 1.0, 1.0)[:3]
        )
        for name, factor in zip(("eps0", "eps1"), factors, strict=True):
            # a tensor, not a float: `float / tensor` converts to MIL's `inverse`, which
            # adds 1e-4
            self.register_buffer(
                name, torch.full((1, 1, 1, 1), factor), persistent=False
            )

    def forward(self, x):
        y, peak = by_peak(x, self.dim)
        eps = scaled(self.eps0 / peak, self.unit * self.third) * scaled(
            self.eps1 / peak, self.unit
        )
        root = torch.rsqrt((y * y).mean(self.dim, keepdim=True) + eps)
        return y * scaled(root, self.gain) * self.weight


@dataclass(frozen=True)
class AttentionGeometry:
    """Static sizes of one attention layer: S slots of cache, H query heads on H_kv
    key/value heads of D channels.

    Traced code takes sizes from here: reading them off a tensor would put shape
    arithmetic into the program. T is the only free size and is always the -1 of a
    reshape. `suffix` is that of the layer's rope and mask inputs."""

    B: int
    H: int
    H_kv: int
    D: int
    S: int
    layout: str
    suffix: str = ""

    def plane(self, x, width: int):
        """[B, ..., T] of `width` channels in all → [B, width, T, 1] (layout bct1) or
        [B, width, 1, T] (bc1t)."""
        return x.reshape(
            self.B, width, *((-1, 1) if self.layout == "bct1" else (1, -1))
        )

    def heads(self, x, count: int):
        """[B, count·D, T, 1] (or [B, count·D, 1, T]) → [B, count, T, D]."""
        return x.reshape(self.B, count, self.D, -1).transpose(2, 3)

    def merge(self, x):
        """[B, H, T, D] → [B, H·D, T, 1] (or [B, H·D, 1, T])."""
        return self.plane(x.transpose(2, 3), self.H * self.D)

    def rotate(self, x, io: dict, width: int):
        """Rotary embedding on the first `width` of the D dims of x [B, H, T, D];
        rope_cos, rope_sin [B, 1, T, width/2].

        Dims i and i + width/2 form a pair (transformers' `rotate_half`); dims from
        `width` on pass through."""
        a = x[..., : width // 2]
        b = x[..., width // 2 : width]
        rest = x[..., width:]
        cos = io[ROPE_COS + self.suffix]
        sin = io[ROPE_SIN + self.suffix]
        parts = [a * cos - b * sin, b * cos + a * sin]
        return torch.cat(parts if width == self.D else [*parts, rest], dim=-1)

    def attend(self, q, k, v, cache: Cache, io: dict):
        """Appends k, v [B, H_kv, T, D] to the cache and returns softmax(q kᵀ + mask) v
        over all of it.

        q [B, H, T, D] is already scaled. The query heads of one group are rows of one
        product, so nothing is repeated and no tensor has rank 5."""
        k = cache.append(K_STATE, k, io, self.suffix)
        v = cache.append(V_STATE, v, io, self.suffix)
        mask = io[ATTN_MASK + self.suffix]
        # [B, H_kv, H/H_kv·T, S]
        scores = q.reshape(self.B, self.H_kv, -1, self.D) @ k.transpose(2, 3)
        weights = torch.softmax(
            scores.reshape(self.B, self.H, -1, self.S) + mask, dim=-1
        )
        return (weights.reshape(self.B, self.H_kv, -1, self.S) @ v).reshape(
            self.B, self.H, -1, self.D
        )


class Attention(nn.Module):
    """Causal self-attention over a cache of states `k_state`, `v_state` [B, H_kv, S,
    D].

    Scaling q before q kᵀ keeps scores small in fp16.

    Args:
        fused: one projection makes q, k and v, in this order.
        gated: `q_proj` makes q and then a gate of D channels for each head; the sigmoid
            of the gate multiplies what the head attends to.
        qk_norm: makes the RMSNorms of q and k from a width, or None.
        norm_at: what these norm: each head (`heads`), each head after rope (`rotated`),
            or all heads together (`channels`).
    """

    def __init__(
        self,
        C: int,
        shape: AttentionGeometry,
        *,
        scale,
        rotary: int,
        qkv_bias=False,
        o_bias=False,
        fused=False,
        gated=False,
        qk_norm=None,
        norm_at: Literal["heads", "rotated", "channels"] = "heads",
    ):
        super().__init__()
        self.shape = shape
        self.scale = scale
        self.rotary = rotary
        self.gated = gated
        queries = shape.H * shape.D
        keys = shape.H_kv * shape.D
        if fused:
            self.qkv_proj = Conv(C, queries + 2 * keys, qkv_bias)
        else:
            self.q_proj = Conv(C, queries * (1 + gated), qkv_bias)
            self.k_proj = Conv(C, keys, qkv_bias)
            self.v_proj = Conv(C, keys, qkv_bias)
        self.o_proj = Conv(queries, C, o_bias)
        self.norm_at = norm_at
        widths = (queries, keys) if norm_at == "channels" else (shape.D, shape.D)
        self.q_norm, self.k_norm = map(qk_norm, widths) if qk_norm else (None, None)

    def heads(self, x):
        """q [B, H, T, D], k and v [B, H_kv, T, D], before rope and the norms of
        heads."""
        s = self.shape
        if hasattr(self, "qkv_proj"):
            qkv = self.qkv_proj(x)
            a = s.H * s.D
            b = (s.H + s.H_kv) * s.D
            parts = s.heads(qkv[:, :a], s.H), s.heads(qkv[:, a:b], s.H_kv)
            return *parts, s.heads(qkv[:, b:], s.H_kv)
        if self.q_norm is not None and self.norm_at == "channels":
            q = self.q_norm(self.q_proj(x))
            k = self.k_norm(self.k_proj(x))
            return s.heads(q, s.H), s.heads(k, s.H_kv), s.heads(self.v_proj(x), s.H_kv)
        wide = replace(s, D=2 * s.D) if self.gated else s
        q = wide.heads(self.q_proj(x), s.H)
        k = s.heads(self.k_proj(x), s.H_kv)
        return q, k, s.heads(self.v_proj(x), s.H_kv)

    def forward(self, x, cache: Cache, io: dict):
        s = self.shape
        q, k, v = self.heads(x)
        if self.gated:
            q, gate = q[..., : s.D], q[..., s.D :]
        if self.q_norm is not None and self.norm_at == "heads":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = s.rotate(q, io, self.rotary)
        k = s.rotate(k, io, self.rotary)
        if self.q_norm is not None and self.norm_at == "rotated":
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.gated:
            mixed = s.attend(scaled(q, self.scale), k, v, cache, io)
            return self.o_proj(s.merge(mixed * torch.sigmoid(gate)))
        return self.o_proj(s.merge(s.attend(scaled(q, self.scale), k, v, cache, io)))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)); `fused`: one projection makes the gate and what it
    multiplies, in this order."""

    def __init__(
        self, C: int, inner: int, act, bias: bool = False, fused: bool = False
    ):
        super().__init__()
        self.act = act
        self.inner = inner
        if fused:
            self.gate_up_proj = Conv(C, 2 * inner, bias)
        else:
            self.gate_proj = Conv(C, inner, bias)
            self.up_proj = Conv(C, inner, bias)
        self.down_proj = Conv(inner, C, bias)

    def forward(self, x):
        if hasattr(self, "gate_up_proj"):
            both = self.gate_up_proj(x)
            return self.down_proj(
                self.act(both[:, : self.inner]) * both[:, self.inner :]
            )
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Head(nn.Module):
    """Final norm and one slice of the vocabulary: x [B, C, T, 1] → logits [B, rows, T,
    1], which are divided by `divisor`."""

    def __init__(self, norm: RMSNorm, C: int, rows: int, divisor: float = 1.0):
        super().__init__()
        self.norm = norm
        self.lm_head = Conv(C, rows)
        self.divisor = divisor

    def forward(self, x):
        if self.divisor != 1:
            return scaled(self.lm_head(self.norm(x)), 1 / self.divisor)
        return self.lm_head(self.norm(x))
