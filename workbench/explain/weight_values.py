"""Figures by which the stored values of a tensor are compared with the checkpoint's."""

import math

import torch

# Largest distance that an explanation leaves, in parts of the distance from the tensor's
# own values: unrelated values are √2 of their size away, and those of 4 bits 0.1 to 0.2.
EXPLAINED = 0.3
CORRELATED = 0.95  # least cosine of values that are a multiple of others
SIGNIFICANT = 10.0  # standard deviations of a factor that is not 1
ROUNDING = 2.0**-10  # relative, of values rounded to fp16


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of its last axis, [rows, columns]; a vector is one row."""
    return values.reshape(-1, values.shape[-1] if values.ndim else 1)


def measure_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The root of the sum of squared differences."""
    return float((first - second).norm())


def compute_cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """The cosine of the angle between two tensors; 0 where one of them is zero."""
    product = first.norm() * second.norm()
    return float((first * second).sum() / product) if product else 0.0


def compute_factor(actual: torch.Tensor, values: torch.Tensor) -> float:
    """The factor of `values` that is nearest to `actual`."""
    square = float(values.square().sum())
    return float((actual * values).sum()) / square if square else 1.0


def is_factor_significant(actual: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the factor differs from 1 by more than the rounding of a preset."""
    factor = compute_factor(actual, values)
    noise = measure_distance(actual, factor * values) / max(float(values.norm()), 1e-9)
    # entries of a table are means of what they stand for, which shortens a vector
    shrinkage = 2 * noise**2
    spread = SIGNIFICANT * noise / math.sqrt(values.numel())
    return abs(factor - 1) > max(shrinkage, spread, ROUNDING)


def describe_factor(factor: float) -> str:
    """The clause of a tensor that is a multiple of its own values."""
    return f"is scaled by {factor:.4g}"
