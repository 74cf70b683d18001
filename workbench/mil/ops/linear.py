"""Matrix products and convolutions, each with its `narrow` twin (fp16 partial sums after every 32 products)."""

import torch
import torch.nn.functional as F

from . import rule


def _round16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def narrow_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N], the running sum rounded to fp16 after every 32 of the K products."""
    total = None
    for left, right in zip(a.split(32, dim=-1), b.split(32, dim=-2), strict=True):
        partial = left @ right
        total = _round16(partial if total is None else total + partial)
    return total


def _matmul(product):
    def matmul(x, y, *, transpose_x=False, transpose_y=False):
        # MIL transposes the last two axes; a rank-1 operand has nothing to transpose
        x = x.transpose(-1, -2) if transpose_x and x.dim() > 1 else x
        y = y.transpose(-1, -2) if transpose_y and y.dim() > 1 else y
        return product(x, y)

    return matmul


def _linear(product):
    def linear(x, weight, bias=None):
        y = product(x, weight.transpose(-1, -2))
        return y if bias is None else y + bias

    return linear


rule("matmul", narrow=_matmul(narrow_matmul))(_matmul(torch.matmul))
rule("linear", narrow=_linear(narrow_matmul))(_linear(torch.matmul))


def _padding(x, weight, strides, dilations, pad_type, pad):
    """[begin, end] per spatial axis for MIL's pad_type: valid, same (extra at the end), same_lower, custom."""
    spatial = x.dim() - 2
    if pad_type == "custom":
        return [(pad[2 * i], pad[2 * i + 1]) for i in range(spatial)]
    if pad_type == "valid":
        return [(0, 0)] * spatial
    pairs = []
    for i in range(spatial):
        size, stride = x.shape[2 + i], strides[i]
        reach = (weight.shape[2 + i] - 1) * dilations[i] + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        small = total // 2
        pairs.append((total - small, small) if pad_type == "same_lower" else (small, total - small))
    return pairs


def _im2col_product(x, weight, bias, strides, dilations, groups):
    """Convolution as grouped narrow products over unfolded columns; x already padded, [N, C, *spatial]."""
    spatial = x.dim() - 2
    columns = x
    for i in range(spatial):  # unfold each axis, picking dilated taps
        reach = (weight.shape[2 + i] - 1) * dilations[i] + 1
        columns = columns.unfold(2 + i, reach, strides[i])[..., :: dilations[i]]
    out_spatial = columns.shape[2 : 2 + spatial]
    n, c = x.shape[:2]
    columns = columns.flatten(2 + spatial).reshape(n, groups, c // groups, out_spatial.numel(), -1)
    columns = columns.permute(0, 1, 2, 4, 3).reshape(n, groups, -1, out_spatial.numel())
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    y = narrow_matmul(kernels, columns).reshape(n, weight.shape[0], *out_spatial)
    return y if bias is None else y + bias.reshape(1, -1, *[1] * spatial)


def _conv(narrow: bool):
    def conv(x, weight, bias=None, *, strides=None, pad_type="valid", pad=None, dilations=None, groups=1):
        spatial = x.dim() - 2
        strides, dilations = strides or [1] * spatial, dilations or [1] * spatial
        pairs = _padding(x, weight, strides, dilations, pad_type, pad)
        if not narrow and groups == 1 and weight[0, 0].numel() == 1 and max(strides) == 1 and not any(map(any, pairs)):
            y = torch.matmul(weight.flatten(1), x.flatten(2))  # a 1×1 convolution is a matrix product
            y = y if bias is None else y + bias[:, None]
            return y.reshape(x.shape[0], weight.shape[0], *x.shape[2:])
        if any(map(any, pairs)):
            x = F.pad(x, [edge for pair in reversed(pairs) for edge in pair])
        if narrow:
            return _im2col_product(x, weight, bias, strides, dilations, groups)
        function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        return function(x, weight, bias, strides, 0, dilations, groups)

    return conv


rule("conv", narrow=_conv(narrow=True))(_conv(narrow=False))
