"""Chooses a preset for every matrix of a model: the fewest bytes, or the least predicted
time, at which the mean KL stays within a limit.

Words: a *candidate* is a way of storing that all matrices may have, such as `lut4-g8`. The
*preset* that stores one matrix is the candidate fitted to its rows, such as `lut4-g4` for
a matrix of 20 rows. A `Cost` is one matrix in one candidate; a `Choice` has one cost of
each matrix.

Every matrix has a cost in every candidate: its bytes, its prices and its loss, the
estimated KL in nats per token that storing this matrix alone so causes. Losses add up. For
one price, the choice that minimizes Σ loss + λ · Σ price takes for each matrix the
candidate on the lower convex hull of its costs. Over all λ these choices are nested: they
form a list in which every choice raises one matrix to a costlier candidate, the matrix
whose loss falls most for its price first. Shoham and Gersho (1988) describe the method for
bits of a quantizer.

A chip streams weights and unpacks lookup tables at the same time, so that the milliseconds
of a choice are the larger of two sums. Every mean of both prices gives a list of choices;
`frontier` takes the best ones of several means.

Estimates rank matrices well, but their sizes are wrong by a factor that depends on the
candidate. `rescale` multiplies the losses of a candidate by the measured KL of the model
that is stored in this candidate alone over the sum of its estimates. `find_cheapest`
measures choices of the frontier until it knows the cheapest one within the limit.

Everything here is arithmetic on records; `workbench.exporter.mixed` measures."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.bundle.presets import MIXED, Preset
from workbench.errors import InputError

MEASUREMENTS = 8  # the most choices that a search measures
# The search ends once the cheapest choice that is known to keep the limit costs at most this
# share more than the costliest one that is known to exceed it.
PRICE_TOLERANCE = 0.01
# The expected ratio of a choice's measured KL to its rescaled estimate, until a choice of
# several candidates is measured. Measured ratios replace it, so that it decides only where
# the search begins.
FIRST_KL_RATIO = 1.1
# The search aims at this share of the limit: predictions that are right by a fraction of a
# per cent would often miss the limit itself.
AIM = 0.99
PRICE_MEANS = 9  # means of two prices, from the first price alone to the second alone


@dataclass(frozen=True)
class Cost:
    """What one matrix costs in one candidate.

    Args:
        tensor: name of the checkpoint's tensor.
        candidate: its name, the same for all matrices.
        preset: name of the preset, the candidate with groups that divide the matrix's
            rows.
        weights: number of the matrix's elements.
        bytes: stored bytes, with tables and scales.
        prices: one number for each resource that the matrix uses: its bytes; or its
            milliseconds of streaming, and its milliseconds of unpacking. See
            `Choice.price`.
        loss: estimated KL in nats per token.
    """

    tensor: str
    candidate: str
    preset: str
    weights: int
    bytes: int
    prices: tuple[float, ...]
    loss: float


@dataclass(frozen=True)
class Quality:
    """The measured distance of a model from Hugging Face's.

    Args:
        kl: mean over the tokens, in nats.
        kl_p99: 99% quantile over the tokens, in nats.
        perplexity_ratio: the perplexity over that of Hugging Face's model.
        same_top: the share of tokens whose most probable next token is the same.
    """

    kl: float
    kl_p99: float
    perplexity_ratio: float
    same_top: float


@dataclass(frozen=True)
class Choice:
    """A preset for every matrix.

    Args:
        name: of the candidate where all matrices have the same one, else `mixed`.
        formats: tensor → name of its preset, as in `Manifest.formats`.
        bytes: stored bytes of these matrices.
        bits: stored bits per weight of these matrices.
        price: what a search minimizes. The matrices' prices are added for each resource;
            the price is the largest sum, since resources are used at the same time.
        predicted_kl: the sum of the estimated losses, in nats per token.
        ms, low_ms, high_ms: predicted milliseconds of a call on a chip, and the ends of
            the 90% interval; None: not predicted.
        quality: of Hugging Face's model with the matrices in these presets, each
            compressed for the inputs that it has in the unchanged model; None: not
            measured.
    """

    name: str
    formats: dict[str, str]
    bytes: int
    bits: float
    price: float
    predicted_kl: float
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    quality: Quality | None = None


@dataclass(frozen=True)
class Limit:
    """What a choice must keep: a mean KL in nats, or a number of bytes of matrices. One
    of them is None."""

    kl: float | None = None
    bytes: int | None = None

    def __post_init__(self):
        if (self.kl is None) == (self.bytes is None):
            actual = "both" if self.kl is not None else "neither"
            needed = "one of --max-kl and --bytes"
            step = "give a mean KL such as --max-kl 0.05, or a size such as --bytes 90M"
            raise InputError("--compress mixed", actual, needed, step)
        value = self.kl if self.bytes is None else self.bytes
        if not value > 0:  # also catches NaN
            name = "--max-kl" if self.bytes is None else "--bytes"
            raise InputError(name, f"{value}", "a number above 0", "give a larger one")


def matrix_bytes(rows: int, inputs: int, preset: Preset) -> int:
    """Stored bytes of a matrix [rows, inputs]: elements, scales in fp16, and a table of
    fp16 values for each group of rows."""
    fp16_values = 0  # beside the elements
    if preset.is_table:
        tables = rows // preset.group if preset.group else 1
        fp16_values = tables * 2**preset.bits
    elif preset.granularity == "per_tensor":
        fp16_values = 1
    elif preset.block:
        fp16_values = rows * (inputs // preset.block)
    elif preset.is_integer:
        fp16_values = rows
    return math.ceil(rows * inputs * preset.bits / 8) + 2 * fp16_values


def rescale(costs: Sequence[Cost], measured: dict[str, float]) -> list[Cost]:
    """Costs whose losses add up, candidate by candidate, to the measured KL (nats) of a
    model that is stored in the candidate alone. A candidate without a measurement keeps
    its losses.

    Args:
        measured: candidate → KL.
    """
    sums: dict[str, float] = defaultdict(float)
    for cost in costs:
        sums[cost.candidate] += cost.loss
    factors = {name: kl / sums[name] for name, kl in measured.items() if sums[name] > 0}
    return [
        replace(cost, loss=cost.loss * factors.get(cost.candidate, 1.0))
        for cost in costs
    ]


def frontier(costs: Sequence[Cost]) -> list[Choice]:
    """The choices with the least loss at their price, from the cheapest to the one with
    the least loss.

    Args:
        costs: of every matrix in every candidate, all with one price or all with two.
    """
    if len(costs[0].prices) == 1:
        return nested_choices(costs, (1.0,))
    choices = []
    for share in np.linspace(0, 1, PRICE_MEANS).tolist():
        choices += nested_choices(costs, (share, 1 - share))
    return _undominated(choices)


def nested_choices(costs: Sequence[Cost], shares: tuple[float, ...]) -> list[Choice]:
    """The choices over all λ for the mean of the prices with these shares; each differs
    from the one before in the preset of one matrix."""

    def price(cost: Cost) -> float:
        return sum(s * p for s, p in zip(shares, cost.prices, strict=True))

    costs_of_tensor = defaultdict(list)
    for cost in costs:
        costs_of_tensor[cost.tensor].append(cost)
    hulls = [hull(group, price) for group in costs_of_tensor.values()]
    steps = [
        (_gain(cheaper, better, price), better)
        for group in hulls
        for cheaper, better in zip(group, group[1:])
    ]
    # a stable sort: equal gains keep the order of the model's matrices
    steps.sort(key=lambda step: -step[0])
    current = {group[0].tensor: group[0] for group in hulls}
    choices = [make_choice(current.values())]
    for _, better in steps:
        current[better.tensor] = better
        choices.append(make_choice(current.values()))
    return choices


def hull(costs: Iterable[Cost], price: Callable[[Cost], float]) -> list[Cost]:
    """The costs of one matrix on the lower convex hull of loss over price, the cheapest
    first. A cost with a higher price and no lower loss than another is not on it."""
    corners: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (price(cost), cost.loss)):
        # also skips a cost at the price of the corner before: the order is by loss, too
        if corners and cost.loss >= corners[-1].loss:
            continue
        while len(corners) > 1 and (
            _gain(corners[-1], cost, price) >= _gain(corners[-2], corners[-1], price)
        ):
            corners.pop()
        corners.append(cost)
    return corners


def _gain(cheaper: Cost, better: Cost, price: Callable[[Cost], float]) -> float:
    """The loss avoided for a unit of price, between costs of two prices."""
    return (cheaper.loss - better.loss) / (price(better) - price(cheaper))


def _undominated(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that lose less than all cheaper ones, the cheapest first."""
    result: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.price, c.predicted_kl)):
        if not result or choice.predicted_kl < result[-1].predicted_kl:
            result.append(choice)
    return result


def uniform_choice(costs: Sequence[Cost], candidate: str) -> Choice:
    """The choice of one candidate for all matrices."""
    return make_choice([cost for cost in costs if cost.candidate == candidate])


def make_choice(costs: Iterable[Cost]) -> Choice:
    """The choice that consists of one cost for each matrix."""
    costs = list(costs)
    names = {cost.candidate for cost in costs}
    total = sum(cost.bytes for cost in costs)
    prices_by_resource = zip(*(cost.prices for cost in costs))
    return Choice(
        name=names.pop() if len(names) == 1 else MIXED.name,
        formats={cost.tensor: cost.preset for cost in costs},
        bytes=total,
        bits=8 * total / sum(cost.weights for cost in costs),
        price=max(map(sum, prices_by_resource)),
        predicted_kl=sum(cost.loss for cost in costs),
    )


@dataclass(frozen=True)
class SearchResult:
    """The cheapest choice that keeps a limit, and all choices that were measured, with
    their qualities."""

    chosen: Choice
    measured: list[Choice]


def find_cheapest(
    choices: Sequence[Choice], limit: Limit, measure: Callable[[Choice], Choice]
) -> SearchResult:
    """The cheapest choice of a frontier that keeps a limit.

    A limit of bytes decides without a measurement; the choice is measured once. For a
    limit of KL see `_find_cheapest_within_kl`.

    Args:
        measure: returns a choice with its quality.

    Raises:
        InputError: no choice keeps the limit.
    """
    if limit.kl is not None:
        return _find_cheapest_within_kl(choices, limit.kl, measure)
    fitting = [choice for choice in choices if choice.bytes <= limit.bytes]
    if not fitting:
        least = min(choice.bytes for choice in choices)
        raise InputError(
            "--bytes",
            f"{limit.bytes:,}",
            f"at least {least:,}, the bytes of the matrices in the smallest formats",
            "give a larger number, or export a smaller model",
        )
    # the costliest that fits has the least loss
    chosen = measure(fitting[-1])
    return SearchResult(chosen, [chosen])


def _find_cheapest_within_kl(
    choices: Sequence[Choice], limit: float, measure: Callable[[Choice], Choice]
) -> SearchResult:
    """See `find_cheapest`, for a limit in nats.

    Every measurement corrects the predictions by the ratio of measured to predicted KL,
    and the search goes on between the cheapest choice that stayed within the limit and
    the costliest one that did not."""
    # indices: of the costliest choice that is known to exceed the limit, and of the
    # cheapest one that is known to keep it
    too_lossy, within = -1, len(choices)
    measured, best = [], None
    while within - too_lossy > 1 and len(measured) < MEASUREMENTS:
        aim = AIM * limit / kl_ratio(measured)
        index = _first_within(choices, aim, too_lossy, within)
        if best is None and len(measured) == MEASUREMENTS - 1:
            index = len(choices) - 1  # the last measurement has to find one
        choice = measure(choices[index])
        measured.append(choice)
        if choice.quality.kl <= limit:
            within, best = index, choice
        else:
            too_lossy = index
        if best and too_lossy >= 0:
            difference = best.price - choices[too_lossy].price
            if difference <= PRICE_TOLERANCE * best.price:
                break
    if best is None:
        least = min(choice.quality.kl for choice in measured)
        raise InputError(
            "--max-kl",
            f"{limit:g}",
            f"at least {least:.3g}, the mean KL of the costliest formats",
            "give a larger limit",
        )
    return SearchResult(best, measured)


def kl_ratio(measured: Sequence[Choice]) -> float:
    """The ratio of the measured KL to the predicted one, of the last choice for which both
    are above 0; `FIRST_KL_RATIO` where there is none. A KL of 0, as that of presets which
    are exact or of a difference that rounding hides, says nothing about other choices."""
    for choice in reversed(measured):
        if choice.predicted_kl > 0 and choice.quality.kl > 0:
            return choice.quality.kl / choice.predicted_kl
    return FIRST_KL_RATIO


def _first_within(choices: Sequence[Choice], kl: float, below: int, above: int) -> int:
    """The index of the cheapest choice whose predicted KL is at most `kl` nats, among
    those above `below` and below `above`; the index of the costliest of them where there
    is none."""
    indices = range(below + 1, above)
    within = (i for i in indices if choices[i].predicted_kl <= kl)
    return next(within, indices[-1])


def next_choice(
    choices: Sequence[Choice], chosen: Choice, kl: float, limit: float
) -> Choice | None:
    """The cheapest costlier choice of a frontier that is expected to stay within a limit
    on the mean KL, where the export of `chosen` has a larger one, `kl`. None: `chosen` is
    the costliest."""
    costlier = [choice for choice in choices if choice.price > chosen.price]
    if not costlier:
        return None
    aim = AIM * chosen.predicted_kl * limit / kl
    return next((c for c in costlier if c.predicted_kl <= aim), costlier[-1])
