"""Sums of products: in float32, or rounded to fp16 on the way (precision `narrow`)."""

from collections.abc import Callable
from contextvars import ContextVar

import torch
import torch.nn.functional as F

TERMS = 32
# elements of a weight that are float32 at a time: 2 MiB stay in a core's cache
PANEL = 1 << 19
# a product of fewer multiplications ends before a second thread has begun
ONE_THREAD_PRODUCTS = 1 << 20
NARROW = ContextVar("narrow", default=False)


def narrowed(rule: Callable) -> Callable:
    """A rule whose sums are rounded to fp16 after every TERMS terms."""

    def narrow(**operands):
        before = NARROW.set(True)
        try:
            return rule(**operands)
        finally:
            NARROW.reset(before)

    return narrow


def summed(term: Callable, *operands, terms: int = TERMS) -> torch.Tensor:
    """A sum of products, `term(*tensors)`. In precision `narrow` it is computed in parts:
    the axis that `term` sums over is split into pieces of `terms` elements, and the total
    so far is rounded to fp16 after each piece.

    Args:
        term: contracts its tensors over one axis, as `torch.matmul` does.
        operands: each tensor with the axis of it that `term` sums over.
    """
    if not NARROW.get():
        return term(*(x for x, _ in operands))
    total = torch.zeros(())
    for parts in zip(*(x.split(terms, axis) for x, axis in operands), strict=True):
        total = (total + term(*parts)).half().float()
    return total


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [..., M, K] @ y [..., K, N]."""
    threads = torch.get_num_threads()
    if x.numel() * y.shape[-1] < ONE_THREAD_PRODUCTS:
        torch.set_num_threads(1)
    try:
        return summed(torch.matmul, (x, -1), (y, max(-2, -y.dim())))
    finally:
        torch.set_num_threads(threads)


def panel_product(x: torch.Tensor, weight) -> torch.Tensor:
    """x [N, K] float32 by weight [R, K] → float32 [N, R]; rows of the weight, a tensor or
    `stored.StoredWeight`, become float32 a panel at a time."""
    x = x.contiguous()
    rows = -(-PANEL // x.shape[1])
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), rows):
        panel = slice(first, first + rows)
        out[:, panel] = summed(_linear, (x, 1), (weight[panel].float(), 1))
    return out


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 x [N, K] by weight [R, K], by oneDNN where torch has it: on processors
    that are not Intel's it is several times as fast as MKL, which
    `torch.nn.functional.linear` calls."""
    x = x.contiguous()
    weight = weight.contiguous()
    if torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)
