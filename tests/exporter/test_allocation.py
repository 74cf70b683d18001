"""The choice of a format for every matrix: the frontier has the least loss at each price, and
the search finds the cheapest choice that stays within the limit."""

import itertools
import random
from dataclasses import replace

import pytest

from workbench.bundle.presets import find_preset
from workbench.errors import InputError
from workbench.exporter.allocation import (
    MEASUREMENTS,
    Choice,
    Cost,
    Limit,
    Quality,
    find_cheapest,
    frontier,
    hull,
    matrix_bytes,
    next_choice,
    rescale,
    uniform_choice,
)

FORMATS = ("lut4-g8", "lut6-g16", "int8-channel", "fp16")


def random_costs(seed: int, tensors: int = 4, formats=FORMATS) -> list[Cost]:
    """The costs of matrices of random sizes in each format. A format loses about a tenth of what the
    one before it loses, by a factor that differs from matrix to matrix."""
    draw = random.Random(seed)
    costs = []
    for i in range(tensors):
        rows, inputs = draw.choice([64, 128]), draw.choice([32, 96])
        sensitivity = draw.uniform(0.1, 10)
        for rank, name in enumerate(formats):
            preset = find_preset(name)
            size = matrix_bytes(rows, inputs, preset)
            loss = sensitivity * draw.uniform(0.5, 1.5) / 10**rank
            count = rows * inputs
            costs.append(Cost(f"t{i}", name, name, count, size, (float(size),), loss))
    return costs


def all_choices(costs):
    """(price, loss) of every combination of formats."""
    groups = {}
    for cost in costs:
        groups.setdefault(cost.tensor, []).append(cost)
    for combination in itertools.product(*groups.values()):
        sums = [sum(prices) for prices in zip(*(c.prices for c in combination))]
        yield max(sums), sum(c.loss for c in combination)


@pytest.mark.parametrize("seed", range(8))
def test_no_combination_has_less_loss_for_the_price_of_a_choice(seed):
    costs = random_costs(seed)
    every = list(all_choices(costs))
    for choice in frontier(costs):
        best = min(loss for price, loss in every if price <= choice.price)
        assert choice.predicted_kl == pytest.approx(best)


def with_two_prices(costs: list[Cost], unpacking: float) -> list[Cost]:
    """The same costs, with bytes and with a time of unpacking for tables."""
    return [
        replace(
            cost,
            prices=(
                float(cost.bytes),
                unpacking * cost.weights * find_preset(cost.candidate).is_table,
            ),
        )
        for cost in costs
    ]


@pytest.mark.parametrize("unpacking", [0.3, 0.7, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_larger_of_two_prices_is_nearly_minimized(seed, unpacking):
    """Nested choices for single means of the prices can be far off: at 1.2 all tables
    are slower than int8."""
    costs = with_two_prices(random_costs(seed, tensors=5), unpacking)
    every = list(all_choices(costs))
    choices = frontier(costs)
    assert choices[0].price <= 1.1 * min(price for price, _ in every)
    for before, after in itertools.pairwise(choices):
        assert after.price > before.price
        assert after.predicted_kl < before.predicted_kl
    for choice in choices:
        better = [price for price, loss in every if loss <= choice.predicted_kl]
        assert choice.price <= 1.2 * min(better)


@pytest.mark.parametrize("seed", range(4))
def test_each_choice_raises_one_matrix(seed):
    choices = frontier(random_costs(seed, tensors=9))
    assert choices[0].price == min(choice.price for choice in choices)
    for before, after in itertools.pairwise(choices):
        changed = [t for t in before.formats if before.formats[t] != after.formats[t]]
        assert len(changed) == 1
        assert after.price > before.price
        assert after.predicted_kl < before.predicted_kl


def test_a_format_that_costs_more_and_loses_more_is_never_chosen():
    costs = random_costs(0, tensors=1, formats=FORMATS[:3])
    bad = replace(costs[1], loss=2 * costs[0].loss)
    assert bad not in hull([costs[0], bad, costs[2]], lambda cost: cost.bytes)


def test_losses_of_a_format_add_up_to_what_was_measured():
    costs = rescale(random_costs(3), {"lut4-g8": 0.5, "int8-channel": 0.01})
    assert uniform_choice(costs, "lut4-g8").predicted_kl == pytest.approx(0.5)
    assert uniform_choice(costs, "int8-channel").predicted_kl == pytest.approx(0.01)
    unmeasured = uniform_choice(random_costs(3), "lut6-g16").predicted_kl
    assert uniform_choice(costs, "lut6-g16").predicted_kl == pytest.approx(unmeasured)


@pytest.mark.parametrize(
    "name, bits",
    [
        ("fp16", 16),
        ("int8-channel", 8 + 16 / 576),
        ("lut6-g16", 6 + 64 * 16 / (16 * 576)),
        ("lut4-g8", 4 + 16 * 16 / (8 * 576)),
        ("int4-block32", 4.5),
    ],
)
def test_bytes_of_a_matrix(name, bits):
    size = matrix_bytes(1536, 576, find_preset(name))
    assert 8 * size == pytest.approx(bits * 1536 * 576)


def make_measurement(factor):
    """A stand-in for a measurement: `measure` finds `factor(choice)` times the KL that is predicted
    for a choice. Returns `measure`, and the list to which it appends every choice."""
    measured = []

    def measure(choice: Choice) -> Choice:
        measured.append(choice)
        kl = factor(choice) * choice.predicted_kl
        return replace(choice, quality=Quality(kl, 10 * kl, 1 + kl, 1 - kl))

    return measure, measured


@pytest.mark.parametrize("factor", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_search_finds_the_cheapest_choice_within_the_limit(factor, share):
    choices = frontier(random_costs(1, tensors=40))
    kl = 1.001 * factor * choices[int(share * len(choices))].predicted_kl
    measure, measured = make_measurement(lambda choice: factor)
    result = find_cheapest(choices, Limit(kl=kl), measure)
    within = [c for c in choices if factor * c.predicted_kl <= kl]
    assert result.chosen.quality.kl <= kl
    assert result.chosen.price <= 1.02 * within[0].price
    assert len(result.measured) == len(measured) <= MEASUREMENTS


def test_the_search_keeps_the_limit_where_predictions_are_wrong_by_bits():
    choices = frontier(random_costs(2, tensors=40))
    measure, _ = make_measurement(lambda choice: 12 / choice.bits)
    kl = choices[len(choices) // 2].predicted_kl
    result = find_cheapest(choices, Limit(kl=kl), measure)
    chosen, measured = result.chosen, result.measured
    within = [choice for choice in measured if choice.quality.kl <= kl]
    assert chosen == min(within, key=lambda choice: choice.price)


def test_the_search_goes_on_where_a_measured_kl_is_zero():
    """Replaced matrices that change no logit: every choice keeps any limit."""
    choices = frontier(random_costs(1, tensors=40))
    measure, _ = make_measurement(lambda choice: 0.0)
    kl = choices[len(choices) // 2].predicted_kl
    result = find_cheapest(choices, Limit(kl=kl), measure)
    chosen, measured = result.chosen, result.measured
    assert chosen.quality.kl == 0
    assert chosen == min(measured, key=lambda choice: choice.price)


def test_a_limit_of_bytes_takes_the_best_choice_that_fits():
    choices = frontier(random_costs(5, tensors=20))
    size = choices[7].bytes
    measure, measured = make_measurement(lambda choice: 1.0)
    result = find_cheapest(choices, Limit(bytes=size), measure)
    assert result.chosen.formats == choices[7].formats
    assert measured == [choices[7]]


@pytest.mark.parametrize("limit", [Limit(bytes=10), Limit(kl=1e-12)])
def test_a_limit_that_no_choice_keeps_is_refused(limit):
    measure, _ = make_measurement(lambda choice: 1.0)
    with pytest.raises(InputError, match="at least"):
        find_cheapest(frontier(random_costs(6)), limit, measure)


@pytest.mark.parametrize(
    "fields",
    [{}, {"kl": 0.1, "bytes": 5}, {"kl": 0.0}, {"kl": float("nan")}, {"bytes": 0}],
)
def test_a_limit_is_one_positive_number(fields):
    with pytest.raises(InputError):
        Limit(**fields)


def test_the_next_choice_is_expected_within_the_limit():
    choices = frontier(random_costs(7, tensors=20))
    chosen = choices[4]
    kl = 1.2 * chosen.predicted_kl  # 20% above the prediction
    following = next_choice(choices, chosen, kl, limit=chosen.predicted_kl)
    index = choices.index(following)
    assert index > 4
    assert 1.2 * following.predicted_kl <= chosen.predicted_kl
    assert 1.2 * choices[index - 1].predicted_kl > chosen.predicted_kl
    assert next_choice(choices, choices[-1], kl, limit=1e-9) is None
