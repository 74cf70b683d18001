"""Matrix products and attention.

Every function without an underscore is a rule, see `registry`.
"""

import math

import torch

from miltorch.ops.sums import product, summed


def _alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one dtype: iOS 17 lets integers meet floats."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def matmul(x, y, *, transpose_x=False, transpose_y=False):
    # MIL transposes the last two axes; a rank-1 operand has nothing to transpose
    if transpose_x and x.dim() > 1:
        x = x.mT
    if transpose_y and y.dim() > 1:
        y = y.mT
    return product(*_alike(x, y))


def linear(x, weight, bias=None):
    y = product(*_alike(x, weight.mT))
    return y if bias is None else y + bias


def scaled_dot_product_attention(query, key, value, attn_mask=None):
    scores = product(query, key.mT) / math.sqrt(query.shape[-1])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return product(torch.softmax(scores, -1), value)


def einsum(values, *, equation):
    """In precision `narrow` the sum over one label is rounded on the way: over the last
    label that both operands have and the result lacks."""

    def term(*parts):
        return torch.einsum(equation, *parts)

    *labels, result = equation.replace(" ", "").replace("->", ",").split(",")
    shared = [label for label in labels[0] if label in labels[-1]]
    inner = [label for label in shared if label not in result]
    if not inner:
        return term(*values)
    axes = [operand.index(inner[-1]) for operand in labels]
    return summed(term, *zip(values, axes, strict=True))
