"""Transformer parts in the shape the Neural Engine likes: rank 4, channels on axis 1, linears as 1×1 convolutions.

Every module works on x [B, C, T, 1] or [B, C, 1, T] alike: only channels are told apart, T is found by reshaping.
Constants that fp16 would round are kept as a product of two that it rounds far less (`split`), so that the exported
arithmetic differs from the original's only by what the stored weights differ.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn


@lru_cache
def split(value: float) -> tuple[float, ...]:
    """fp16 factors of `value`: itself when fp16 holds it, else two whose product is within about 1e-7 of it."""
    if value == 0 or float(np.float16(value)) == value:
        return (value,)
    start = np.float16(abs(value) ** 0.5).view(np.uint16)
    first = np.arange(start, start + 1024, dtype=np.uint16).view(np.float16).astype(np.float64)
    second = (value / first).astype(np.float16).astype(np.float64)
    best = int(np.argmin(np.abs(first * second - value)))
    return float(first[best]), float(second[best])


def scaled(x: torch.Tensor, value: float) -> torch.Tensor:
    """x · value through `split`: one or two multiplications."""
    for factor in split(value):
        x = x if factor == 1 else x * factor
    return x


class Conv(nn.Module):
    """A linear layer as a 1×1 convolution: weight [out, in, 1, 1]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over `dim`, safe in fp16 for every finite x.

    Dividing by the largest magnitude first keeps every square within [0, 1]; eps is divided along.
    `offset` is what the stored weight adds to the checkpoint's (1 for Gemma's `1 + γ`).
    """

    def __init__(self, width: int, eps: float, dim: int = 1, offset: float = 0.0):
        super().__init__()
        shape = [1, 1, 1, 1]
        shape[dim] = width
        self.dim, self.offset = dim, offset
        self.weight = nn.Parameter(torch.zeros(shape))
        for i, factor in enumerate(split(eps)):
            # a tensor, not a float: `float / tensor` converts to MIL's `inverse`, which adds 1e-4
            self.register_buffer(f"eps{i}", torch.full((1, 1, 1, 1), factor), persistent=False)
        self.factors = len(split(eps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        peak = x.abs().amax(self.dim, keepdim=True).clamp(2.0**-14, 65504.0)
        y = x / peak
        eps = self.eps0 / peak
        eps = eps * (self.eps1 / peak) if self.factors == 2 else eps / peak
        return y * torch.rsqrt((y * y).mean(self.dim, keepdim=True) + eps) * self.weight


@dataclass(frozen=True)
class Shape:
    """Static sizes of one attention layer. Traced code takes sizes from here: reading them off a tensor would put
    shape arithmetic into the program. T is the only free size and is always the -1 of a reshape."""

    B: int
    H: int
    H_kv: int
    D: int
    S: int
    layout: str

    def heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[B, count·D, T, 1] (or [B, count·D, 1, T]) → [B, count, T, D]."""
        return x.reshape(self.B, count, self.D, -1).transpose(2, 3)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] → [B, H·D, T, 1] (layout bct1) or [B, H·D, 1, T] (bc1t)."""
        tail = (-1, 1) if self.layout == "bct1" else (1, -1)
        return x.transpose(2, 3).reshape(self.B, self.H * self.D, *tail)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """softmax(q kᵀ + mask) v with grouped heads; q [B, H, T, D] already scaled, k and v [B, H_kv, S, D].

        The query heads of one group are rows of one product, so nothing is repeated and no tensor has rank 5.
        """
        scores = q.reshape(self.B, self.H_kv, -1, self.D) @ k.transpose(2, 3)  # [B, H_kv, H/H_kv·T, S]
        weights = torch.softmax(scores.reshape(self.B, self.H, -1, self.S) + mask, dim=-1)
        return (weights.reshape(self.B, self.H_kv, -1, self.S) @ v).reshape(self.B, self.H, -1, self.D)


def rotate(x: torch.Tensor, io: dict, width: int, D: int) -> torch.Tensor:
    """Rotary embedding on the first `width` of the D dims of x [B, H, T, D]; rope_cos, rope_sin [B, 1, T, width/2].

    Dims i and i + width/2 form a pair (transformers' `rotate_half`); dims from `width` on pass through.
    """
    a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    cos, sin = io["rope_cos"], io["rope_sin"]
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts if width == D else [*parts, rest], dim=-1)


def write_cache(state: torch.Tensor, new: torch.Tensor, io: dict) -> torch.Tensor:
    """Writes rows `new` [B, H_kv, T, D] into `state` [B, H_kv, S, D] in place and returns it.

    With `kv_write_mask` [B, 1, S, T], one-hot columns say which slot each token takes (a zero column: none);
    with `pos` [1], tokens take slots pos … pos + T − 1.
    """
    if "pos" in io:
        state[:, :, io["pos"] : io["pos"] + new.shape[2]] = new
        return state
    mask = io["kv_write_mask"]
    state[:] = state * (1 - mask.sum(-1, keepdim=True)) + mask @ new
    return state


class Attention(nn.Module):
    """Causal self-attention over a cache held as state buffers `k_state`, `v_state` [B, H_kv, S, D].

    Scaling q before q kᵀ keeps scores small in fp16; `qk_norm` is a per-head RMSNorm factory or None.
    """

    def __init__(self, C: int, shape: Shape, *, scale, rotary: int, qkv_bias=False, o_bias=False, qk_norm=None):
        super().__init__()
        self.shape, self.scale, self.rotary = shape, scale, rotary
        H, H_kv, D = shape.H, shape.H_kv, shape.D
        self.q_proj, self.k_proj = Conv(C, H * D, qkv_bias), Conv(C, H_kv * D, qkv_bias)
        self.v_proj, self.o_proj = Conv(C, H_kv * D, qkv_bias), Conv(H * D, C, o_bias)
        self.q_norm, self.k_norm = (qk_norm(), qk_norm()) if qk_norm else (None, None)

    def forward(self, x: torch.Tensor, cache: nn.Module, io: dict) -> torch.Tensor:
        s = self.shape
        q, k, v = s.heads(self.q_proj(x), s.H), s.heads(self.k_proj(x), s.H_kv), s.heads(self.v_proj(x), s.H_kv)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, io, self.rotary, s.D), rotate(k, io, self.rotary, s.D)
        k, v = write_cache(cache.k_state, k, io), write_cache(cache.v_state, v, io)
        return self.o_proj(s.merge(s.attend(scaled(q, self.scale), k, v, io["attn_mask"])))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, C: int, inner: int, act, bias: bool = False):
        super().__init__()
        self.act = act
        self.gate_proj, self.up_proj = Conv(C, inner, bias), Conv(C, inner, bias)
        self.down_proj = Conv(inner, C, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Head(nn.Module):
    """Final norm and one slice of the vocabulary: x [B, C, T, 1] → logits [B, rows, T, 1]."""

    def __init__(self, norm: RMSNorm, C: int, rows: int):
        super().__init__()
        self.norm, self.lm_head = norm, Conv(C, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(x))
