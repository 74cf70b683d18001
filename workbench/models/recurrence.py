"""Parts of a layer whose state is a matrix: decays of T tokens at once, and functions
that fp16 needs written out.

A state S [B, H, D_k, D_v] takes token t as S ← e^g S + k vᵀ, g ≤ 0 being the logarithm
of its decay. For the T tokens of a call, with the `Decays` of their g,

    o = enter ∘ (q S) + ((q kᵀ) ∘ between + diag(q·k)) v
    S ← S + S ∘ expm1(total) + (k ∘ leave)ᵀ v

Columns that hold no token have order 0: they decay nothing, and their k or v must be
    zeros."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from workbench.bundle.names import MATRIX_STATE
from workbench.models.cache import Cache
from workbench.models.layers import NORMAL, AttentionGeometry, scaled, split


class Decays(NamedTuple):
    """Decay factors among the T tokens of a call: from token j to a later token i in
    `between` [B, H, T, T] (zeros elsewhere); from the state to token i in `enter`, from
    token j to the end in `leave`, both [B, H, T, 1]. `total` [B, H, 1, 1] is the
    logarithm of the state's own decay."""

    between: torch.Tensor
    enter: torch.Tensor
    leave: torch.Tensor
    total: torch.Tensor


def decays(g, order) -> Decays:
    """Decay factors from the logarithms g [B, H, T, 1] and the tokens' `order` [B, 1,
    T, 1], 1, 2, … and 0 for columns without one.

    Every sum runs over the tokens between two others alone: differences of sums from
    the start cancel, and above the diagonal they overflow."""
    g = g * order.clamp(0, 1)
    # [B, 1, T, T]: 1 where column j is earlier
    before = (order - order.transpose(2, 3)).clamp(0, 1)
    own = g * before
    between = torch.exp(before @ own + own) * before
    leave = torch.exp(before.transpose(2, 3) @ g)
    return Decays(between, torch.exp(before @ g + g), leave, g.sum(2, keepdim=True))


def constant(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Values of the dtype of `like`, fp16 or float32, that a trace takes as they
    are."""
    return torch.from_numpy(values.astype(str(like.dtype).removeprefix("torch.")))


def add_tokens(matrix, k, v, among: Decays, cache: Cache) -> None:
    """Decays the state `matrix` [B, H, K, V] and adds this call's tokens to it."""
    added = (k * among.leave).transpose(2, 3) @ v
    cache.write(MATRIX_STATE, matrix + (matrix * expm1(among.total) + added))


def among_tokens(q, k, v, among: Decays):
    """The part of the output that the tokens of a call read from one another and from
    themselves: [B, H, T, V]."""
    earlier = ((q @ k.transpose(2, 3)) * among.between) @ v
    return earlier + (q * k).sum(-1, keepdim=True) * v


def repeated(x, shape: AttentionGeometry, times: int):
    """The heads x [B, H, T, D] of `shape` → [B, H · times, T, D], each `times` times in
    a row."""
    if times == 1:
        return x
    return torch.cat([x] * times, 2).reshape(shape.B, shape.H * times, -1, shape.D)


def per_head(count: int) -> nn.Parameter:
    """One number for each of `count` heads, as it multiplies [B, H, T, D]."""
    return nn.Parameter(torch.zeros(1, count, 1, 1))


def log_decay(A_log, step):
    """-e^A · step, of `step` [B, H, T, 1]. step - step: zeros that keep e^A, which fp16
    would round, out of the stored weights."""
    return -torch.exp(A_log + (step - step)) * step


def expm1(x):
    """e^x - 1 without cancellation: S + S·expm1(g) keeps a slow decay, where fp16 has
    no number between e^g and 1."""
    return torch.tanh(x * 0.5) * (torch.exp(x) + 1)


def softplus(x):
    """ln(1 + e^x), the logarithm as a series: 1 + e^-|x| is 1 in fp16 from |x| = 8 on."""
    e = torch.exp(-x.abs())
    s = e / (e + 2)
    square = s * s
    series = scaled(square, 1 / 9)
    for divisor in (7, 5, 3):
        series = scaled(square, 1 / divisor) + series * square
    return torch.relu(x) + s * 2 * (series + 1)


def unit(x, eps: float):
    """x over the root of Σx² + eps along its last axis, in fp16 for every finite x."""
    peak = x.abs().amax(-1, keepdim=True).clamp(*NORMAL)
    y = x / peak
    first, *second = split(eps**0.5)
    # a tensor, as in `RMSNorm`
    root = constant(np.full((1,) * peak.dim(), first), peak) / peak
    root = root * second[0] if second else root
    return y * torch.rsqrt((y * y).sum(-1, keepdim=True) + root * root)
