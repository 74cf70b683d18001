"""Layers that keep other states than keys and values: the last inputs of a short
convolution over time, or a matrix. This module has the decays of T tokens at once,
and functions written so that they stay accurate in fp16.

A matrix S [B, H, D_k, D_v] takes token t as S ← e^g S + k vᵀ, g ≤ 0 being the logarithm
of its decay. For the T tokens of a call, with the `Decays` of their g,

    o = enter ∘ (q S) + ((q kᵀ) ∘ between + diag(q·k)) v
    S ← S + S ∘ expm1(total) + (k ∘ leave)ᵀ v

Columns that hold no token have order 0: they decay nothing, and their k or v must be
zeros."""

# Traced code: local variables name values of the programs, so that another name changes
# the bytes of bundles.

from typing import NamedTuple

import torch
from torch import nn

from workbench.bundle.names import CONV_STATE, TAIL_KEEP, TAIL_SELECT
from workbench.models.layers import Conv, Heads, by_peak, fp16_factors, scaled, vector

# from this number of channels on, a depthwise convolution runs on another unit than the
# Neural Engine (lint rule S7)
WIDE = 1024


def append_to_tail(B: int, x, old, select, keep=None):
    """Returns the n columns of the state `old` [B, n, W] and, behind them, x of W
    channels: [B, W, 1, n + T]. Then changes the state, in place, to the last n columns of
    both.

    `select` [B, n, T] has a one-hot row for each of the last n valid columns, zeros
    where there are fewer: invalid columns are never stored in the state. `keep` [B, n,
    n] likewise selects the old columns that stay; up to n = 2 these follow from
    `select`.
    """
    width = x.shape[1]
    joined = torch.cat(
        [old.transpose(1, 2).reshape(B, width, 1, -1), x.reshape(B, width, 1, -1)], 3
    )
    rows = x.reshape(B, width, -1).transpose(1, 2)
    kept = _kept_up_to_two(old, select) if keep is None else keep @ old
    old[:] = select @ rows + kept
    return joined


def _kept_up_to_two(old, select):
    """The old columns that stay in the state `old` [B, n, W], n ≤ 2, in their new places,
    zeros elsewhere.

    For n = 2 and old columns a, b: without a token in this call a, b; with one token b, 0;
    with more 0, 0."""
    counts = select.sum(-1, keepdim=True)  # [B, n, 1]: 1 where a column comes from x
    last = counts[:, -1:]
    return (1 - last) * old + (last - counts) * old[:, -1:]


class Depthwise(Conv):
    """A convolution over time with `taps` taps for each channel: x → [B, width, 1, T].

    The layer keeps `conv_state` [B, taps - 1, width], the last inputs, oldest first,
    zeros at the start. The Neural Engine runs no depthwise convolution of many channels:
    a wide one is a sum of products with shifted inputs."""

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
        x = append_to_tail(self.B, x, cache[CONV_STATE], *tail)
        if not self.is_wide:
            return super().forward(x)
        last = self.last
        shifted = [x[..., i : i - last] for i in range(last)] + [x[..., last:]]
        mixed = (torch.cat(shifted, 2) * self.weight).sum(2, keepdim=True)
        return mixed if self.bias is None else mixed + self.bias


class Decays(NamedTuple):
    """Decay factors among the T tokens of a call.

    `between` [B, H, T, T] has the factor from token j to a later token i, zeros
    elsewhere; `enter` [B, H, T, 1] the factor from the state to token i; `leave` [B, H,
    T, 1] the factor from token j to the end. `total` [B, H, 1, 1] is the logarithm of
    the decay of the state itself."""

    between: torch.Tensor
    enter: torch.Tensor
    leave: torch.Tensor
    total: torch.Tensor


def decays(g, order) -> Decays:
    """Decay factors from the logarithms g [B, H, T, 1] and the tokens' `order` [B, 1,
    T, 1], 1, 2, … and 0 for columns without one.

    Every sum runs over the tokens between two others alone: differences of sums from
    the start would cancel, and above the diagonal they would overflow."""
    g = g * order.clamp(0, 1)
    # [B, 1, T, T]: 1 where column j is earlier
    before = (order - order.transpose(2, 3)).clamp(0, 1)
    earlier = g * before
    # [B, H, T, T]: before @ earlier sums g over the tokens between j and i
    between = torch.exp(before @ earlier + earlier) * before
    leave = torch.exp(before.transpose(2, 3) @ g)
    return Decays(between, torch.exp(before @ g + g), leave, g.sum(2, keepdim=True))


def add_tokens(matrix, k, v, among: Decays) -> None:
    """Decays the state `matrix` [B, H, K, V] and adds this call's tokens to it, in
    place."""
    added = (k * among.leave).transpose(2, 3) @ v
    matrix[:] = matrix + (matrix * expm1(among.total) + added)


def recall(q, k, v, matrix, among: Decays):
    """The values [B, H, T, V] that the tokens of a call read: from the state `matrix`
    [B, H, K, V], from earlier tokens of the call, and from themselves."""
    earlier = ((q @ k.transpose(2, 3)) * among.between) @ v
    themselves = (q * k).sum(-1, keepdim=True) * v
    return (q @ matrix) * among.enter + (earlier + themselves)


def repeated(x, heads: Heads, times: int):
    """x [B, count, T, D], every head `times` times in a row: [B, count · times, T, D]."""
    if times == 1:
        return x
    return torch.cat([x] * times, 2).reshape(heads.B, heads.count * times, -1, heads.D)


def log_decay(A_log, step):
    """-e^A · step, of `step` [B, H, T, 1].

    `step - step` is zeros: it keeps the converter from storing e^A, which fp16 would
    round, as a weight."""
    return -torch.exp(A_log + (step - step)) * step


def expm1(x):
    """e^x - 1 without cancellation. S + S·expm1(g) preserves a slow decay, for which
    fp16 has no number between e^g and 1."""
    return torch.tanh(x * 0.5) * (torch.exp(x) + 1)


def softplus(x):
    """ln(1 + e^x), the logarithm as a series of atanh, because 1 + e^-|x| is 1 in fp16
    from |x| = 8 on."""
    # ln(1 + e) = 2 · atanh(s) with s = e / (e + 2): odd powers of s, at most 1/3
    e = torch.exp(-x.abs())
    s = e / (e + 2)
    square = s * s
    series = scaled(square, 1 / 9)
    for divisor in (7, 5, 3):
        series = scaled(square, 1 / divisor) + series * square
    return torch.relu(x) + s * 2 * (series + 1)


def unit_length(x, eps: float):
    """x over the root of Σx² + eps along its last axis, in fp16 for every finite x."""
    y, peak = by_peak(x, -1)
    first, *others = fp16_factors(eps**0.5)
    # a tensor, as in `RMSNorm`
    root = peak.new_full((1,) * peak.dim(), first) / peak
    for factor in others:
        root = root * factor
    return y * torch.rsqrt((y * y).sum(-1, keepdim=True) + root * root)
