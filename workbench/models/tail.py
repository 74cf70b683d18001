"""Short convolutions over time, whose last inputs are a state of their layer."""

import torch
from torch import nn

from workbench.bundle.names import CONV_STATE, TAIL_KEEP, TAIL_SELECT
from workbench.models.cache import Cache
from workbench.models.layers import AttentionGeometry, Conv

# channels from which on a depthwise convolution leaves the Neural Engine (lint rule S7)
WIDE = 1024


def extended(B: int, name: str, x, cache: Cache, select, keep=None):
    """x of W channels behind the n columns that state `name` kept: [B, W, 1, n + T];
    the state takes the last n.

    `select` [B, n, T] has a one-hot row for each of the last n columns that are valid,
    zeros where there are fewer: invalid columns are never stored in the state. `keep`
    [B, n, n] likewise says which old ones stay; up to n = 2 that follows from `select`.
    """
    width = x.shape[1]
    old = cache.read(name)
    joined = torch.cat(
        [old.transpose(1, 2).reshape(B, width, 1, -1), x.reshape(B, width, 1, -1)], 3
    )
    if keep is not None:
        rows = x.reshape(B, width, -1).transpose(1, 2)
        cache.write(name, select @ rows + keep @ old)
        return joined
    counts = select.sum(-1, keepdim=True)  # [B, n, 1]
    last = counts[:, -1:]
    rows = x.reshape(B, width, -1).transpose(1, 2)
    # ends what `old` held
    cache.write(name, select @ rows + (1 - last) * old + (last - counts) * old[:, -1:])
    return joined


def depthwise(width: int, taps: int, bias: bool = False) -> nn.Module:
    """A convolution over time with `taps` taps for each channel: [B, width, 1, taps - 1
    + T] → [B, width, 1, T]."""
    if width < WIDE:
        return Conv(width, width, bias, kernel=(1, taps), groups=width)
    return ShiftedProducts(width, taps, bias)


class ShiftedProducts(nn.Module):
    """The same as a sum of products with shifted inputs, which the Neural Engine runs
    at any width."""

    def __init__(self, width: int, taps: int, bias: bool):
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.zeros(1, width, taps, 1))
        self.bias = nn.Parameter(torch.zeros(1, width, 1, 1)) if bias else None

    def forward(self, x):
        last = self.taps - 1
        shifted = [x[..., i : i - last] for i in range(last)] + [x[..., last:]]
        mixed = (torch.cat(shifted, 2) * self.weight).sum(2, keepdim=True)
        return mixed if self.bias is None else mixed + self.bias


class ShortConv(nn.Module):
    """out(c ∘ conv(b ∘ x)), where one projection makes b, c and x, and `conv` has
    `taps` taps for each channel.

    It keeps `conv_state` [B, taps - 1, C], the last values of b ∘ x, oldest first,
    zeros at the start."""

    def __init__(self, C: int, shape: AttentionGeometry, taps: int, bias: bool):
        super().__init__()
        self.C = C
        self.shape = shape
        self.in_proj = Conv(C, 3 * C, bias)
        self.out_proj = Conv(C, C, bias)
        self.conv = depthwise(C, taps, bias)

    def forward(self, x, cache: Cache, io: dict):
        s = self.shape
        parts = self.in_proj(x)
        b = parts[:, : self.C]
        c = parts[:, self.C : 2 * self.C]
        x = parts[:, 2 * self.C :]
        tail = io[TAIL_SELECT], io.get(TAIL_KEEP)
        mixed = self.conv(extended(s.B, CONV_STATE, b * x, cache, *tail))
        return self.out_proj(c * s.plane(mixed, self.C))
