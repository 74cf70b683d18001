"""Parts of a layer whose state is a matrix: decays of T tokens at once, and functions that fp16
needs written out.

A state S [B, H, D_k, D_v] takes token t as S ← e^g S + k vᵀ, g ≤ 0 being the logarithm of its
decay. For the T tokens of a call, with the `Decays` of their g,

    o = enter ∘ (q S) + ((q kᵀ) ∘ between + diag(q·k)) v
    S ← S + S ∘ expm1(total) + (k ∘ leave)ᵀ v

Columns that hold no token have order 0: they decay nothing, and their k or v must be zeros.
"""

from typing import NamedTuple

import torch

from workbench.models.layers import NORMAL, scaled


class Decays(NamedTuple):
    """Decay factors among the T tokens of a call: from token j to a later token i in `between` [B,
    H, T, T] (zeros elsewhere); from the state to token i in `enter`, from token j to the end in
    `leave`, both [B, H, T, 1]. `total` [B, H, 1, 1] is the logarithm of the state's own decay."""

    between: torch.Tensor
    enter: torch.Tensor
    leave: torch.Tensor
    total: torch.Tensor


def decays(g, order) -> Decays:
    """Of the logarithms g [B, H, T, 1] and the tokens' `order` [B, 1, T, 1], 1, 2, … and 0 for
    columns without one.

    Every sum runs over the tokens between two others alone: differences of sums from the start
    cancel, and above the diagonal they overflow.
    """
    g = g * order.clamp(0, 1)
    before = (order - order.transpose(2, 3)).clamp(
        0, 1
    )  # [B, 1, T, T]: 1 where column j is earlier
    own = g * before
    between = torch.exp(before @ own + own) * before
    leave = torch.exp(before.transpose(2, 3) @ g)
    return Decays(between, torch.exp(before @ g + g), leave, g.sum(2, keepdim=True))


def expm1(x):
    """e^x - 1 without cancellation: S + S·expm1(g) keeps a slow decay, where fp16 has no number
    between e^g and 1."""
    return torch.tanh(x * 0.5) * (torch.exp(x) + 1)


def softplus(x):
    """ln(1 + e^x), the logarithm as a series: 1 + e^-|x| is 1 in fp16 from |x| = 8 on."""
    e = torch.exp(-x.abs())
    s = e / (e + 2)
    square = s * s
    series = scaled(square, 1 / 9)
    for divisor in (7, 5, 3):
        series = (scaled(torch.ones_like(s), 1 / divisor) + series) * square
    return torch.relu(x) + s * 2 * (series + 1)


def unit(x, eps: float):
    """x over the root of Σx² + eps along its last axis, in fp16 for every finite x."""
    peak = x.abs().amax(-1, keepdim=True).clamp(*NORMAL)
    y = x / peak
    root = scaled(torch.ones_like(peak), eps**0.5) / peak
    return y * torch.rsqrt((y * y).sum(-1, keepdim=True) + root * root)
