"""Transformer parts in the shape that suits the Neural Engine: rank 4, channels on axis
1, linear layers as 1×1 convolutions (the form that Apple published for its
Transformers on the Neural Engine, github.com/apple/ml-ane-transformers).

Every module accepts x [B, C, T, 1] or [B, C, 1, T]: it relies on the channel axis alone
and gets T by reshaping. A constant that fp16 would round is kept as a product of two or
three constants that fp16 holds (`fp16_factors`), so that the exported arithmetic differs
from the original's only by the rounding of the stored weights. torch.jit.trace names
values of a program after local variables: another name in traced code changes the bytes
of bundles.

A decoder layer and its mixer (attention, or what replaces it) are called as `forward(x,
cache, io)`. Both dicts are those of `exporter.shards.LayerStack`, which makes a new
`cache` for every layer and one `io` for all layers of a shard:

- `cache`: name of a state → its tensor. Layers write into these tensors in place.
- `io`: the shard's inputs by name. Layers add values that a later layer of the shard
  reads, or that are outputs of the shard. What is not an input is written by:

| entry | written by | read by |
|---|---|---|
| `LAYER_INPUT` | `LayerStack`, before each layer | `gemma4.DecoderLayer` |
| `k_rows`, `v_rows` of a source | `gemma4.Attention` of that layer | that of the copying layers |
| `ROUTER_STATE_OUT` | `zaya.ZayaDecoderLayer` | that of the next layer |
| `EXPERT_IN`, `ROUTER_PROBS`, `ROUTER_SCORES`, `BASE` | `zaya.ZayaDecoderLayer` | the host |
| `HIDDEN` | `LayerStack`, after the last layer | the host |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn

from workbench.bundle.names import (
    ATTN_MASK,
    K_STATE,
    KV_WRITE_MASK,
    MAX_FP16,
    MIN_NORMAL,
    POS,
    ROPE_COS,
    ROPE_SIN,
    V_STATE,
)

NORMAL = (MIN_NORMAL, MAX_FP16)  # magnitudes that fp16 holds in full precision


@lru_cache
def fp16_factors(value: float) -> tuple[float, ...]:
    """fp16 numbers whose product is `value`: one number where fp16 holds the value, otherwise
    two numbers whose product has a relative error below 1e-6. Where no two have, as for
    1e-5, the best three; the third is at least 1 and below 2."""
    if float(np.float16(value)) == value:
        return (value,)
    # Candidates for the first factor: the 1,024 fp16 numbers from the square root of the value
    # on, which is a whole binade.
    start = np.float16(abs(value) ** 0.5).view(np.uint16)
    first = (
        np.arange(start, start + 1024, dtype=np.uint16)
        .view(np.float16)
        .astype(np.float64)
    )

    def nearest(third: float) -> tuple[float, tuple[float, float, float]]:
        """The relative error of the best factors with this third one, and the factors."""
        second = (value / third / first).astype(np.float16).astype(np.float64)
        errors = np.abs(first * second * third / value - 1)
        best = int(np.argmin(errors))
        return errors[best], (float(first[best]), float(second[best]), third)

    error, factors = nearest(1.0)
    if error < 1e-6:
        return factors[:2]
    # tuples are compared by their first entry, the error
    _, factors = min(map(nearest, (1 + np.arange(1024) / 1024).tolist()))
    return factors


def scaled(x, value: float):
    """x · value, as multiplications by the factors of `fp16_factors`."""
    for factor in fp16_factors(value):
        x = x if factor == 1 else x * factor
    return x


def by_peak(x, dim: int):
    """x divided by its largest magnitude along `dim`, and that magnitude. Squares of
    the quotient are in [0, 1], so that no sum of them overflows fp16."""
    peak = x.abs().amax(dim, keepdim=True).clamp(*NORMAL)
    return x / peak, peak


def cut(x, *widths: int) -> list:
    """Cuts the channels of x [B, C, ...] into parts of these widths."""
    edges = accumulate(widths, initial=0)
    return [x[:, start:stop] for start, stop in pairwise(edges)]


def vector(width: int) -> nn.Parameter:
    """One number for each channel or head, as it multiplies [B, width, ...]."""
    return nn.Parameter(torch.zeros(1, width, 1, 1))


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
    """x / sqrt(mean(x²) + eps) · weight over `dim`, safe in fp16 for every finite x
    (arXiv 1910.07467).

    Args:
        offset: what the stored weight adds to the checkpoint's (1 for Gemma's `1 + γ`).
        exponent: x is 2^-exponent of the model's, so eps is scaled alike and the result
            is the model's.
        gain: power of two that multiplies the result before the weight does.
        has_weight: whether a weight multiplies the result.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        dim: int = 1,
        *,
        offset=0.0,
        exponent=0,
        gain=1.0,
        has_weight=True,
    ):
        super().__init__()
        shape = [1, 1, 1, 1]
        shape[dim] = width
        self.dim = dim
        self.offset = offset
        self.input_scale = 2.0**-exponent  # x is the model's times this
        self.gain = gain
        self.weight = nn.Parameter(torch.zeros(shape)) if has_weight else None
        # one to three factors, always read as three: eps0 · eps1 · third = eps
        eps0, eps1, self.third = (*fp16_factors(eps), 1.0, 1.0)[:3]
        for name, factor in (("eps0", eps0), ("eps1", eps1)):
            # a tensor, not a float: `float / tensor` converts to MIL's `inverse`, which
            # adds 1e-4
            factor = torch.full((1, 1, 1, 1), factor)
            self.register_buffer(name, factor, persistent=False)

    def forward(self, x):
        y, peak = by_peak(x, self.dim)
        # mean(x²) + eps = peak² · (mean(y²) + eps / peak²); eps alone underflows in fp16,
        # so that each of its factors is divided by the peak once
        eps = scaled(self.eps0 / peak, self.input_scale * self.third)
        eps = eps * scaled(self.eps1 / peak, self.input_scale)
        root = torch.rsqrt((y * y).mean(self.dim, keepdim=True) + eps)
        if self.weight is None:
            return y * scaled(root, self.gain)
        return y * scaled(root, self.gain) * self.weight


@dataclass(frozen=True)
class ActivationShape:
    """The shape of activations: [B, channels, T, 1] (layout bct1) or [B, channels, 1, T]
    (bc1t). Sizes are static: they enter the program as constants. T is the only free size
    and is always the -1 of a reshape."""

    B: int
    layout: str

    def plane(self, x, width: int):
        """[B, ..., T] of `width` channels in all → [B, width, T, 1] or [B, width, 1,
        T]."""
        return x.reshape(
            self.B, width, *((-1, 1) if self.layout == "bct1" else (1, -1))
        )


@dataclass(frozen=True)
class Heads(ActivationShape):
    """The channels of `count` heads, D channels each."""

    count: int
    D: int

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.count * self.D

    def split(self, x):
        """[B, count·D, T, 1] (or [B, count·D, 1, T]) → [B, count, T, D]."""
        return x.reshape(self.B, self.count, self.D, -1).transpose(2, 3)

    def numbers(self, x):
        """[B, count, T, 1] (or [B, count, 1, T]) → [B, count, T, 1], one number for each
        head."""
        return x.reshape(self.B, self.count, -1, 1)

    def merge(self, x):
        """[B, count, T, D] → [B, count·D, T, 1] (or [B, count·D, 1, T])."""
        return self.plane(x.transpose(2, 3), self.width)


@dataclass(frozen=True)
class CachedAttention:
    """The part of an attention layer without weights: rotation, the write of this call's
    rows into the cache, and softmax over all of it.

    `queries` are H heads, `keys` H_kv heads, which hold values, too; each key head serves
    H / H_kv query heads, and all have D channels. A cache has S rows. Rope rotates the
    first `rotary` channels of a head. `suffix` ends the names of the layer's rope and
    mask inputs."""

    queries: Heads
    keys: Heads
    S: int
    rotary: int
    suffix: str = ""

    def rotate(self, x, io: dict):
        """Rotary embedding on the first `rotary` of the D dims of x [B, H, T, D];
        rope_cos, rope_sin [B, 1, T, rotary / 2].

        Dims i and i + rotary / 2 form a pair (transformers' `rotate_half`); dims from
        `rotary` on pass through."""
        width = self.rotary
        a = x[..., : width // 2]
        b = x[..., width // 2 : width]
        cos = io[ROPE_COS + self.suffix]
        sin = io[ROPE_SIN + self.suffix]
        parts = [a * cos - b * sin, b * cos + a * sin]
        if width < self.keys.D:
            parts.append(x[..., width:])
        return torch.cat(parts, dim=-1)

    def append_to_cache(self, cache, rows, io: dict):
        """Writes `rows` [B, H_kv, T, D] of this call into `cache` [B, H_kv, S, D], in
        place, so that the write becomes a state update in Core ML; returns the cache.

        With `kv_write_mask` [B, 1, S, T] (or the mask of this layer's rope table, where
        the cache is a ring), a one-hot column selects the row of each token, and a zero
        column no row; with `pos` [1], tokens take rows pos … pos + T − 1."""
        # in place: coremltools turns an assignment to a buffer into `write_state`
        if POS in io:
            pos = io[POS]
            cache[:, :, pos : pos + rows.shape[2]] = rows
        else:
            mask = io.get(KV_WRITE_MASK + self.suffix, io.get(KV_WRITE_MASK))
            cache[:] = cache * (1 - mask.sum(-1, keepdim=True)) + mask @ rows
        return cache

    def attend(self, q, k, v, cache: dict, io: dict):
        """Appends k, v [B, H_kv, T, D] to the cache and returns softmax(q kᵀ + mask) v
        over all of it.

        q [B, H, T, D] is already scaled. The query heads of one group are rows of one
        product, so nothing is repeated and no tensor has rank 5."""
        # first the rows of this call: a token attends to itself
        k = self.append_to_cache(cache[K_STATE], k, io)
        v = self.append_to_cache(cache[V_STATE], v, io)
        mask = io[ATTN_MASK + self.suffix]
        B, H, D = self.queries.B, self.queries.count, self.queries.D
        H_kv, S = self.keys.count, self.S
        # [B, H_kv, H/H_kv·T, S]
        scores = q.reshape(B, H_kv, -1, D) @ k.transpose(2, 3)
        weights = torch.softmax(scores.reshape(B, H, -1, S) + mask, dim=-1)
        return (weights.reshape(B, H_kv, -1, S) @ v).reshape(B, H, -1, D)


class Attention(nn.Module):
    """Causal self-attention over a cache of states `k_state`, `v_state` [B, H_kv, S,
    D].

    Scaling q before q kᵀ keeps scores small in fp16.

    Args:
        core: the attention itself, which has no weights.
        scale: multiplies q.
        fused_qkv: whether one projection computes q, k and v, in this order.
        gated: whether `q_proj` computes q and then a gate of D channels for each head;
            the sigmoid of the gate multiplies the head's output.
        norm_at: what the RMSNorms of q and k normalize: each head (`heads`), each head
            after rope (`rotated`), all heads together (`channels`); "": there are none.
        norm: builds such a norm from a width and an axis.
    """

    def __init__(
        self,
        C: int,
        core: CachedAttention,
        *,
        scale: float,
        qkv_bias: bool = False,
        o_bias: bool = False,
        fused_qkv: bool = False,
        gated: bool = False,
        norm_at: str = "",
        norm: Callable[..., RMSNorm],
    ):
        super().__init__()
        self.core = core
        self.scale = scale
        self.gated = gated
        queries, keys = core.queries, core.keys
        # gated: q_proj gives each head D channels of q, then D of its gate
        self.projected = replace(queries, D=2 * queries.D) if gated else queries
        self.widths = queries.width, keys.width, keys.width
        if fused_qkv:
            self.qkv_proj = Conv(C, sum(self.widths), qkv_bias)
        else:
            self.q_proj = Conv(C, self.projected.width, qkv_bias)
            self.k_proj = Conv(C, keys.width, qkv_bias)
            self.v_proj = Conv(C, keys.width, qkv_bias)
        self.o_proj = Conv(queries.width, C, o_bias)
        self.norm_at = norm_at
        if norm_at == "channels":
            self.q_norm, self.k_norm = norm(queries.width), norm(keys.width)
        elif norm_at:
            self.q_norm, self.k_norm = (norm(queries.D, dim=3) for _ in range(2))

    def normed(self, place: str, q, k):
        """q and k, normalized if their norms are at this place; see `norm_at`."""
        return (self.q_norm(q), self.k_norm(k)) if self.norm_at == place else (q, k)

    def forward(self, x, cache: dict, io: dict):
        core = self.core
        if hasattr(self, "qkv_proj"):
            q, k, v = cut(self.qkv_proj(x), *self.widths)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k = self.normed("channels", q, k)
        q = self.projected.split(q)
        k = core.keys.split(k)
        v = core.keys.split(v)
        if self.gated:
            D = core.queries.D
            q, gate = q[..., :D], q[..., D:]
        q, k = self.normed("heads", q, k)
        q = core.rotate(q, io)
        k = core.rotate(k, io)
        q, k = self.normed("rotated", q, k)
        # q, not the scores: q kᵀ itself may exceed fp16
        mixed = core.attend(scaled(q, self.scale), k, v, cache, io)
        if self.gated:
            mixed = mixed * torch.sigmoid(gate)
        return self.o_proj(core.queries.merge(mixed))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)); `fused`: one projection computes gate(x) and up(x), in
    this order."""

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
            gate, up = cut(self.gate_up_proj(x), self.inner, self.inner)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act(gate) * up)


class Head(nn.Module):
    """Final norm and one slice of the vocabulary: x [B, C, T, 1] → logits [B, rows, T,
    1], divided by `divisor`; with a softcap s, s · tanh(logits / s)."""

    def __init__(
        self,
        norm: RMSNorm,
        C: int,
        rows: int,
        divisor: float,
        softcap: float | None = None,
    ):
        super().__init__()
        self.softcap = softcap
        self.norm = norm
        self.lm_head = Conv(C, rows)
        self.factor = 1 / divisor

    def forward(self, x):
        if not self.softcap:
            return scaled(self.lm_head(self.norm(x)), self.factor)
        logits = scaled(self.lm_head(self.norm(x)), self.factor / self.softcap)
        return scaled(torch.tanh(logits), self.softcap)
