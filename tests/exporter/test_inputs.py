"""Sums of x xᵀ and the statistics of inputs, for every width and number of inputs."""

import pytest
import torch

from workbench.exporter.compress import INVERTED_AT_ONCE, InputStatistics
from workbench.exporter.inputs import COLUMNS_PER_PRODUCT, INPUTS_PER_PRODUCT, InputSum


@pytest.mark.parametrize("count", [1, INPUTS_PER_PRODUCT, INPUTS_PER_PRODUCT + 1])
@pytest.mark.parametrize(
    "width", [1, COLUMNS_PER_PRODUCT, COLUMNS_PER_PRODUCT + 1, 2 * COLUMNS_PER_PRODUCT]
)
def test_a_sum_has_the_products_of_all_pairs_of_inputs(width, count):
    """In two steps, as of two calls of a layer."""
    x = torch.randn(2, count, width, generator=torch.Generator().manual_seed(width))
    total = InputSum.of(x[0])
    total.add(x[1:])
    exact = x.double().reshape(-1, width)
    assert torch.allclose(total.total, exact.T @ exact, rtol=1e-5, atol=1e-3)
    assert torch.equal(total.total, total.total.T)
    assert torch.allclose(torch.cat(total.squares).double(), exact.square().sum(1))
    assert total.count == 2 * count


@pytest.mark.parametrize(
    "width", [1, 2, INVERTED_AT_ONCE, INVERTED_AT_ONCE + 1, 3 * INVERTED_AT_ONCE - 1]
)
def test_the_factor_is_that_of_the_inverse(width):
    """Upper triangular, with a positive diagonal: no other factor of the inverse is so."""
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(width))
    statistics = InputStatistics.of((x.T @ x).double() / len(x), 0.1)
    factor, order = statistics.factor.double(), statistics.order
    hessian = statistics.hessian.double()[order][:, order]
    identity = torch.eye(width, dtype=torch.float64)
    assert torch.allclose(factor.T @ factor @ hessian, identity, atol=1e-4)
    assert torch.equal(factor, factor.triu()) and bool((factor.diagonal() > 0).all())
