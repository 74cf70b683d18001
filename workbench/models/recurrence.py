"""Layers that keep other states than keys and values: the last inputs of a short
convolution over time; a matrix, with the decays of T tokens at once and functions that
fp16 needs written out.

A matrix S [B, H, D_k, D_v] takes token t as S ← e^g S + k vᵀ, g ≤ 0 being the logarithm
of its decay. For the T tokens of a call, with the `Decays` of their g,

    o = enter ∘ (q S) + ((q kᵀ) ∘ between + diag(q·k)) v
    S ← S + S ∘ expm1(total) + (k ∘ leave)ᵀ v

Columns that hold no token have order 0: they decay nothing, and their k or v must be
    zeros."""

from typing import NamedTuple

import torch
from torch import nn

from workbench.bundle.names import CONV_STATE, TAIL_KEEP, TAIL_SELECT
from workbench.models.layers import (
    AttentionGeometry,
    Conv,
    by_peak,
    scaled,
    split,
    vector,
)

# channels from which on a depthwise convolution leaves the Neural Engine (lint rule S7)
WIDE = 1024


def extended(B: int, x, old, select, keep=None):
    """x of W channels behind the n columns that the state `old` [B, n, W] kept: [B, W,
    1, n + T]; the state takes the last n.

    `select` [B, n, T] has a one-hot row for each of the last n columns that are valid,
    zeros where there are fewer: invalid columns are never stored in the state. `keep`
    [B, n, n] likewise says which old ones stay; up to n = 2 that follows from `select`.
    """
    width = x.shape[1]
    joined = torch.cat(
        [old.transpose(1, 2).reshape(B, width, 1, -1), x.reshape(B, width, 1, -1)], 3
    )
    rows = x.reshape(B, width, -1).transpose(1, 2)
    if keep is None:
        counts = select.sum(-1, keepdim=True)  # [B, n, 1]
        last = counts[:, -1:]
        kept = (1 - last) * old + (last - counts) * old[:, -1:]
    else:
        kept = keep @ old
    old[:] = select @ rows + kept
    return joined


class Depthwise(Conv):
    """A convolution over time with `taps` taps for each channel: x → [B, width, 1, T].

    Its layer keeps `conv_state` [B, taps - 1, width], the last inputs, oldest first,
    zeros at the start. The Neural Engine takes no depthwise convolution of many
    channels: there it is a sum of products with shifted inputs."""

    def __init__(self, B: int, width: int, taps: int, bias: bool = False):
        super().__init__(width, width, bias, kernel=(1, taps), groups=width)
        self.B = B
        self.last = taps - 1
        self.is_wide = width >= WIDE
        if self.is_wide:
            self.weight = nn.Parameter(torch.zeros(1, width, taps, 1))
            if bias:
                self.bias = vector(width)

    def forward(self, x, cache: dict, io: dict):
        tail = io[TAIL_SELECT], io.get(TAIL_KEEP)
        x = extended(self.B, x, cache[CONV_STATE], *tail)
        if not self.is_wide:
            return super().forward(x)
        last = self.last
        shifted = [x[..., i : i - last] for i in range(last)] + [x[..., last:]]
        mixed = (torch.cat(shifted, 2) * self.weight).sum(2, keepdim=True)
        return mixed if self.bias is None else mixed + self.bias


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


def add_tokens(matrix, k, v, among: Decays) -> None:
    """Decays the state `matrix` [B, H, K, V] and adds this call's tokens to it, in
    place."""
    added = (k * among.leave).transpose(2, 3) @ v
    matrix[:] = matrix + (matrix * expm1(among.total) + added)


def recall(q, k, v, matrix, among: Decays):
    """What the tokens of a call read [B, H, T, V]: from the state `matrix` [B, H, K,
    V], from one another, and from themselves."""
    earlier = ((q @ k.transpose(2, 3)) * among.between) @ v
    own = (q * k).sum(-1, keepdim=True) * v
    return (q @ matrix) * among.enter + (earlier + own)


def repeated(x, shape: AttentionGeometry, times: int):
    """The heads x [B, H, T, D] of `shape` → [B, H · times, T, D], each `times` times in
    a row."""
    if times == 1:
        return x
    return torch.cat([x] * times, 2).reshape(shape.B, shape.H * times, -1, shape.D)


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
    y, peak = by_peak(x, -1)
    first, *others = split(eps**0.5)
    # a tensor, as in `RMSNorm`
    root = peak.new_full((1,) * peak.dim(), first) / peak
    for factor in others:
        root = root * factor
    return y * torch.rsqrt((y * y).sum(-1, keepdim=True) + root * root)
