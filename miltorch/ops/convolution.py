"""Convolutions: x [N, C, *spatial], weight [C_out, C/groups, *kernel] (transposed: [C,
C_out/groups, *kernel])."""

import torch
import torch.nn.functional as F

from miltorch.ops.linear import narrow_matmul, panel_product
from miltorch.ops.registry import bounded, operation, padded


def padding(
    sizes, kernel, strides, dilations, pad_type: str, pad
) -> list[tuple[int, int]]:
    """(before, after) per spatial axis for MIL's pad_type: valid, same (extra at the
    end), same_lower, custom."""
    if pad_type == "custom":
        return list(zip(pad[::2], pad[1::2], strict=True))
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    pairs = []
    for size, taps, stride, dilation in zip(
        sizes, kernel, strides, dilations, strict=True
    ):
        reach = (taps - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        before = total // 2
        if pad_type == "same_lower":
            before = total - before
        pairs.append((before, total - before))
    return pairs


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [N, C, *spatial] and the bias [C], if there is one."""
    if bias is None:
        return y
    return y + bias.reshape(-1, *[1] * (y.dim() - 2))


def _im2col_product(x, weight, bias, strides, dilations, groups):
    """Convolution as grouped narrow products over unfolded columns; x already padded,
    [N, C, *spatial]."""
    spatial = x.dim() - 2
    columns = x
    for i in range(spatial):  # unfold each axis, picking dilated taps
        reach = (weight.shape[2 + i] - 1) * dilations[i] + 1
        columns = columns.unfold(2 + i, reach, strides[i])[..., :: dilations[i]]
    out_spatial = columns.shape[2 : 2 + spatial]
    n, c = x.shape[:2]
    columns = columns.flatten(2 + spatial).reshape(
        n, groups, c // groups, out_spatial.numel(), -1
    )
    columns = columns.permute(0, 1, 2, 4, 3).reshape(n, groups, -1, out_spatial.numel())
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    y = narrow_matmul(kernels, columns).reshape(n, weight.shape[0], *out_spatial)
    return _biased(y, bias)


def _conv(narrow: bool):
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
        strides = strides or [1] * spatial
        dilations = dilations or [1] * spatial
        pairs = padding(
            x.shape[2:], weight.shape[2:], strides, dilations, pad_type, pad
        )
        if (
            groups == 1
            and weight.shape[2:].numel() == 1
            and max(strides) == 1
            and not any(map(any, pairs))
        ):
            # a 1×1 convolution is a matrix product: a row per position
            rows, matrix = x.flatten(2).transpose(1, 2), weight.flatten(1)
            if narrow:
                y = narrow_matmul(rows.contiguous(), matrix.float().T)
            else:
                y = panel_product(rows.flatten(0, 1), matrix)
                y = y.reshape(*rows.shape[:2], len(weight))
            if bias is not None:
                y = y + bias
            return y.mT.reshape(len(x), len(weight), *x.shape[2:])
        weight = weight.float()
        if any(map(any, pairs)):
            x = padded(x, pairs)
        if narrow:
            return _im2col_product(x, weight, bias, strides, dilations, groups)
        function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        return function(x, weight, bias, strides, 0, dilations, groups)

    return conv


operation(_conv(narrow=False), narrow=_conv(narrow=True))


@operation
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
    first, sizes = [0] * spatial, whole
    if pad_type == "custom":
        first = pad[::2]
        last = pad[1::2]
        sizes = [w - a - b for w, a, b in zip(whole, first, last, strict=True)]
    elif pad_type == "same":
        sizes = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        first = [(w - n) // 2 for w, n in zip(whole, sizes, strict=True)]
    if output_shape:
        sizes = output_shape[2:]
    pairs = [(-f, f + n - w) for f, n, w in zip(first, sizes, whole, strict=True)]
    return _biased(padded(y, pairs), bias)
