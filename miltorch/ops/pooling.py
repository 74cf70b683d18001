"""Pooling over the spatial axes of x [N, C, *spatial].

Every function without an underscore is a rule, see `registry`.
"""

import math

import torch
import torch.nn.functional as F

from miltorch.ops.registry import padded, padding

_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_MAXIMUM = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


def _pairs(x, kernel_sizes, strides, pad_type, pad, ceil_mode):
    """(before, after) per axis with which whole windows cover exactly what MIL's pool
    visits. With ceil_mode the last window may reach beyond the declared padding, or be left
    out."""
    pairs = padding(
        x.shape[2:], kernel_sizes, strides, [1] * len(kernel_sizes), pad_type, pad
    )
    if not ceil_mode:
        return pairs
    grown = []
    for size, taps, stride, (before, after) in zip(
        x.shape[2:], kernel_sizes, strides, pairs, strict=True
    ):
        windows = -(-(size + before + after - taps) // stride) + 1
        # a window that starts in the padding behind is left out
        if (windows - 1) * stride >= size + before:
            windows -= 1
        grown.append((before, (windows - 1) * stride + taps - size - before))
    return grown


def _mean(x, kernel_sizes, strides, pairs):
    return _AVERAGE[x.dim() - 3](padded(x, pairs), kernel_sizes, strides)


def max_pool(
    x, *, kernel_sizes, strides=None, pad_type="valid", pad=None, ceil_mode=False
):
    strides = strides or [1] * len(kernel_sizes)
    pairs = _pairs(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    return _MAXIMUM[x.dim() - 3](
        padded(x, pairs, value=-torch.inf), kernel_sizes, strides
    )


def avg_pool(
    x,
    *,
    kernel_sizes,
    strides=None,
    pad_type="valid",
    pad=None,
    ceil_mode=False,
    exclude_padding_from_average=False,
):
    """The mean of each window over the elements that count: those of x and, unless
    `exclude_padding_from_average`, the declared padding. What ceil_mode adds never counts."""
    strides = strides or [1] * len(kernel_sizes)
    pairs = _pairs(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    # 1 at every element that counts; `uncounted` is the padding around them
    counted, uncounted = torch.ones(1, 1, *x.shape[2:]), pairs
    if not exclude_padding_from_average:
        declared = _pairs(x, kernel_sizes, strides, pad_type, pad, ceil_mode=False)
        counted = padded(counted, declared, value=1.0)
        # ceil_mode changes the padding behind x alone
        uncounted = [
            (0, after - declared_after)
            for (_, after), (_, declared_after) in zip(pairs, declared, strict=True)
        ]
    counted_share = _mean(counted, kernel_sizes, strides, uncounted)
    # both means divide by the size of the window; the padding of x is zeros
    return _mean(x, kernel_sizes, strides, pairs) / counted_share


def l2_pool(
    x, *, kernel_sizes, strides=None, pad_type="valid", pad=None, ceil_mode=False
):
    strides = strides or [1] * len(kernel_sizes)
    pairs = _pairs(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    means = _mean(x.square(), kernel_sizes, strides, pairs)
    return (means * math.prod(kernel_sizes)).sqrt()
