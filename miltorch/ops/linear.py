"""Matrix products and attention, each with its `narrow` twin (partial sums rounded to
fp16 after every TERMS products)."""

import math

import torch
import torch.nn.functional as F

from miltorch.ops.registry import operation

TERMS = 32
# weights that are dense at a time: 2 MiB of float32 stay in a core's cache
PANEL = 1 << 19


def round16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def narrow_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N], the running sum rounded to fp16 after every TERMS
    of the K products."""
    # few columns: a product with few rows is several times as fast
    if a.dim() > 1 and b.shape[-1] < a.shape[-2]:
        return narrow_matmul(b.mT.contiguous(), a.mT).mT
    parts = zip(a.split(TERMS, dim=-1), b.split(TERMS, dim=-2), strict=True)
    left, right = next(parts)
    total = round16(left @ right)
    for left, right in parts:
        total = round16(total + left @ right)
    return total


def panel_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, K] float32 by weight [R, K] → float32 [N, R]; an fp16 weight becomes
    float32 some rows at a time."""
    rows = -(-PANEL // weight.shape[1])
    x = x.contiguous()
    if weight.dtype == torch.float32:
        return wide_linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), rows):
        panel = slice(first, first + rows)
        out[:, panel] = wide_linear(x, weight[panel].float())
    return out


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 x [N, K] by weight [R, K], by oneDNN where torch has it: on processors
    that are not Intel's it is several times as fast as MKL, which
    `torch.nn.functional.linear` calls."""
    if torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def _alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one dtype: iOS 17 lets integers meet floats."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _matmul(product):
    def matmul(x, y, *, transpose_x=False, transpose_y=False):
        # MIL transposes the last two axes; a rank-1 operand has nothing to transpose
        if transpose_x and x.dim() > 1:
            x = x.mT
        if transpose_y and y.dim() > 1:
            y = y.mT
        return product(*_alike(x, y))

    return matmul


def _linear(product):
    def linear(x, weight, bias=None):
        y = product(*_alike(x, weight.mT))
        if bias is not None:
            y = y + bias
        return y

    return linear


def _attention(product):
    def scaled_dot_product_attention(query, key, value, attn_mask=None):
        scores = product(query, key.mT) / math.sqrt(query.shape[-1])
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return product(torch.softmax(scores, -1), value)

    return scaled_dot_product_attention


for _rule in (_matmul, _linear, _attention):
    operation(_rule(torch.matmul), narrow=_rule(narrow_matmul))


def _narrow_einsum(values, *, equation):
    """As `einsum`, summed over the last label that both operands share and the result
    lacks, TERMS at a time."""
    left, right, result = equation.replace(" ", "").replace("->", ",").split(",")
    summed = [label for label in left if label in right and label not in result]
    if not summed:
        return torch.einsum(equation, *values)
    parts = [
        v.split(TERMS, labels.index(summed[-1]))
        for v, labels in zip(values, (left, right), strict=True)
    ]
    total = torch.zeros(())
    for part in zip(*parts, strict=True):
        total = round16(total + torch.einsum(equation, *part))
    return total


def einsum(values, *, equation):
    return torch.einsum(equation, *values)


operation(einsum, narrow=_narrow_einsum)
