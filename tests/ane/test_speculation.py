"""Speculative decoding: the gain, where it is 1, and exports without a figure."""

import pytest

from workbench.ane import speculation
from workbench.ane.work import ShardWork, Work

LAYER = ShardWork("layers", {"int8": 50_000_000}, 8_000_000, 8_000_000, 0, 2048)


def test_the_gain_is_that_of_a_simulated_round():
    """Three drafts at an acceptance of 0.7: 1, 2, 3 or 4 tokens a round, by their chances."""
    a, cost, draft = 0.7, 1.2, 0.1
    chances = [1 - a, a * (1 - a), a**2 * (1 - a), a**3]
    tokens = sum(n * p for n, p in enumerate(chances, 1))
    expected = tokens / (cost + 3 * draft)
    assert speculation.gain(a, 3, cost, draft) == pytest.approx(expected)
    closed = (1 - a**4) / ((1 - a) * (cost + 3 * draft))
    assert expected == pytest.approx(closed)


def test_at_full_acceptance_every_draft_counts():
    assert speculation.gain(1.0, 3, 1.2, 0.1) == pytest.approx(4 / 1.5)
    assert speculation.gain(0.0, 3, 1.0) == 1


@pytest.mark.parametrize(
    ("verify_cost", "draft_cost"), [(1.0, 0.0), (1.5, 0.1), (3.65, 0.0), (2.0, 0.9)]
)
def test_it_pays_from_where_the_gain_is_one(verify_cost, draft_cost):
    least = speculation.pays_from(3, verify_cost, draft_cost)
    if least is None:
        assert speculation.gain(1.0, 3, verify_cost, draft_cost) < 1
    elif least == 0:
        assert speculation.gain(0.0, 3, verify_cost, draft_cost) >= 1
    else:
        assert speculation.gain(least, 3, verify_cost, draft_cost) == pytest.approx(1)


def test_a_dense_program_verifies_a_few_tokens_at_the_price_of_one():
    plain, four, many = (Work(tuple([LAYER] * 20), T) for T in (1, 4, 512))
    result = speculation.speculate(plain, four, "M4 Max", 0.7)
    assert result.verify_cost == pytest.approx(1)
    assert result.gain == pytest.approx((1 - 0.7**4) / 0.3)
    assert result.pays_from == 0 and result.tokens == 4
    assert speculation.speculate(plain, many, "M4 Max", 0.7).verify_cost > 2
    assert "2.53 times plain decoding" in result.sentence()


def test_experts_of_a_range_have_no_figure_but_the_rule():
    plain, four = (Work((LAYER,), T, ranged_experts=True) for T in (1, 4))
    result = speculation.speculate(plain, four, "M4 Max", 0.7)
    assert result.gain is None and "D3" in result.reason
    assert "no figure" in result.sentence()
