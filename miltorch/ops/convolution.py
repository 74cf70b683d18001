"""Convolutions: x [N, C, *spatial], weight [C_out, C/groups, *kernel] (transposed: [C,
C_out/groups, *kernel]).

Every function without an underscore is a rule, see `registry`.
"""

import torch
import torch.nn.functional as F

from miltorch.ops.registry import bounded, padded, padding
from miltorch.ops.sums import TERMS, panel_product, summed


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [N, C, *spatial] and the bias [C], if there is one."""
    if bias is None:
        return y
    return y + bias.reshape(-1, *[1] * (y.dim() - 2))


def conv(
    x,
    weight,
    bias=None,
    *,
    strides=None,
    pad_type="valid",
    pad=None,
    dilations=None,
    groups=1,
):
    spatial = x.dim() - 2
    taps = weight.shape[2:]
    strides = strides or [1] * spatial
    dilations = dilations or [1] * spatial
    pairs = padding(x.shape[2:], taps, strides, dilations, pad_type, pad)
    grows = any(map(any, pairs))
    if groups == taps.numel() == max(strides) == 1 and not grows:
        # a 1×1 convolution is a matrix product: a row per position
        rows = x.flatten(2).mT
        y = panel_product(rows.flatten(0, 1), weight.flatten(1))
        y = y.unflatten(0, rows.shape[:2]).mT.reshape(len(x), -1, *x.shape[2:])
        return _biased(y, bias)
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]

    def of_channels(x, weight):
        x = x.flatten(1, 2)
        return function(x, weight, None, strides, 0, dilations, groups)

    if grows:
        x = padded(x, pairs)
    channels = (x.unflatten(1, (groups, -1)), 2), (weight.float(), 1)
    y = summed(of_channels, *channels, terms=max(1, TERMS // taps.numel()))
    return _biased(y, bias)


def conv_transpose(
    x,
    weight,
    bias=None,
    *,
    pad=None,
    output_shape=None,
    pad_type="valid",
    strides=None,
    dilations=None,
    groups=1,
):
    """The whole transposed convolution, then cut (or grown, where an output asks for
    more) to the padded size."""
    spatial = x.dim() - 2
    strides = strides or [1] * spatial
    dilations = dilations or [1] * spatial
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    whole = bounded(
        (n - 1) * s + r for n, s, r in zip(x.shape[2:], strides, reach, strict=True)
    )
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    y = function(x, weight, None, strides, 0, 0, groups, dilations)
    first = [0] * spatial
    sizes = whole
    pad_type = pad_type.lower()
    if pad_type == "custom":
        first = pad[::2]
        last = pad[1::2]
        sizes = [w - a - b for w, a, b in zip(whole, first, last, strict=True)]
    elif pad_type == "same":
        sizes = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        first = [max(w - n, 0) // 2 for w, n in zip(whole, sizes, strict=True)]
    elif pad_type != "valid":
        raise ValueError(f"pad_type {pad_type!r}")
    if output_shape:
        sizes = output_shape[2:]
    pairs = [(-f, f + n - w) for f, n, w in zip(first, sizes, whole, strict=True)]
    return _biased(padded(y, pairs), bias)
