"""Sentences about measured times: every setting with its processes, and an order only
where interleaved rounds decide it.

Input is a table with one row per process (see `results.processes`): run_id, value,
disturbed (a reason, or null), and the columns that tell settings apart. Output is text on
what is decided, and the orders that are not: `describe_undecided` lists those of all
statements of an answer, and `describe_next_step` names the command that measures further
rounds."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pandas as pd

from workbench import log
from workbench.log.times import (
    CONFIDENCE,
    FAR_APART,
    MIN_CHANGE,
    MIN_ROUNDS,
    RatioEstimate,
)

ProcessesBySetting = dict[Hashable, pd.DataFrame]
"""The processes of each setting."""
NOT_SET = "not set"
"""Stands for a null, as in the figures."""
MAX_NAMED_PAIRS = 3
"""Pairs of values without a decided order that a list names; it counts more of them."""


@dataclass(frozen=True)
class Objection:
    """A reason why nothing is concluded from two settings."""

    reason: str
    """In words that all pairs with this cause share."""
    detailed: str = ""
    """The reason with the numbers of the pair; default: `reason`."""

    def describe(self, *, detailed: bool) -> str:
        return (detailed and self.detailed) or self.reason


@dataclass(frozen=True)
class Comparison:
    """Two settings, compared."""

    estimate: RatioEstimate
    """The ratio of the second setting to the first."""
    objections: list[Objection]
    """Reasons why nothing is concluded from it."""

    @property
    def is_decided(self) -> bool:
        return not self.objections

    def count_slower(self) -> str:
        """In how many rounds the second setting is slower, of tokens per second, where
        the rounds are enough for an order and do not agree; empty elsewhere."""
        estimate = self.estimate
        if estimate.rounds < MIN_ROUNDS or estimate.has_one_direction:
            return ""
        return f"slower in {estimate.pairs_below} of {estimate.pairs} rounds"


@dataclass(frozen=True)
class OpenOrders:
    """Orders of one kind that are not decided."""

    words: str
    """Which they are, such as "11 of 12 orders by max_seq_len"."""
    objections: tuple[tuple[Objection, ...], ...]
    """The reasons of each order."""


@dataclass(frozen=True)
class Statement:
    """Sentences on what was measured and decided, and the orders that are not decided."""

    text: str
    undecided: tuple[OpenOrders, ...] = ()

    @property
    def is_decided(self) -> bool:
        return not self.undecided


@dataclass
class Ranking:
    """Settings in the order of their medians, and the first compared with each other."""

    medians: dict[Hashable, float]
    """Tokens per second of each setting, the most first."""
    slower: dict[Hashable, RatioEstimate] = field(default_factory=dict)
    """Settings that are slower than the first in every round, with their ratio to it."""
    undecided: dict[Hashable, Comparison] = field(default_factory=dict)
    """The other settings, each compared with the first, with the reasons why nothing is
    concluded from it."""

    @property
    def first(self) -> Hashable:
        """The setting with the highest median."""
        return next(iter(self.medians))

    def shorten(self, name: Hashable) -> str:
        """The parts of a setting's name that not all settings have."""
        shared = set.intersection(*(set(other.split(", ")) for other in self.medians))
        parts = [part for part in name.split(", ") if part not in shared]
        return ", ".join(parts) or name

    def speed(self, name: Hashable) -> str:
        """The median of a setting with its unit."""
        return f"{format_value(self.medians[name])} tok/s"

    def describe(self, name: Hashable) -> str:
        """A setting and its median."""
        return f"{self.shorten(name)} ({self.speed(name)})"

    def describe_undecided(self, name: Hashable) -> str:
        """A setting without a decided order, its median, and in how many rounds it is
        slower than the first where these do not agree."""
        values = [self.speed(name), self.undecided[name].count_slower()]
        return f"{self.shorten(name)} ({', '.join(filter(None, values))})"


def describe_axis(measures: Mapping[str, pd.DataFrame], axis: str) -> Statement:
    """A line for each measure on its dependence on an axis. A line has the median over
    processes at each value of the axis, and the decided differences of neighbouring values
    and of the last from the first.

    Args:
        measures: what was measured, with its unit → the processes.
    """
    lines: list[str] = []
    undecided: list[tuple[str, list[Objection]]] = []
    count = 0
    for measure, processes in measures.items():
        settings = _group_processes(processes, axis)
        comparisons = _compare_values(settings, axis)
        count += len(comparisons)
        lines.append(_describe_measure(measure, settings, axis, comparisons))
        where = f" in {measure}" if len(measures) > 1 else ""
        undecided += [
            (f"{second} against {first}{where}", comparison.objections)
            for (first, second), comparison in comparisons.items()
            if not comparison.is_decided
        ]
    if not undecided:
        return Statement("\n".join(lines))
    pairs, objections = zip(*undecided)
    words = f"{axis} {', '.join(pairs)}"
    if len(pairs) > MAX_NAMED_PAIRS:
        of_all = "all" if len(pairs) == count else f"{len(pairs)} of"
        words = f"{of_all} {count} orders by {axis}"
    return Statement("\n".join(lines), (_open_orders(words, objections),))


def describe_most(processes: pd.DataFrame) -> str:
    """A sentence that names the setting (column `name`) with the most tokens per second,
    and says so where its order against others is not decided."""
    ranking = _rank(_group_processes(processes, "name"))
    name, speed = ranking.shorten(ranking.first), ranking.speed(ranking.first)
    if not ranking.undecided:
        return f"{name} is the fastest: {speed}."
    nearest, *others = ranking.undecided
    against = ranking.describe(nearest)
    if others:
        against += f" and {len(others)} other{'s' * (len(others) > 1)}"
    return f"{name} has the highest median ({speed}), undecided against {against}."


def describe_fastest(processes: pd.DataFrame, costs: pd.DataFrame) -> Statement:
    """Sentences on how far ahead the setting (column `name`) with the most tokens per
    second is, and on the settings that are not told apart from it.

    Args:
        costs: name, bundle_bytes and kl_mean (nats) of each setting, which tell two
            settings apart that their times do not.
    """
    ranking = _rank(_group_processes(processes, "name"))
    slower = ranking.slower
    if len(ranking.medians) < 2:
        return Statement("There is no other setting to compare.")
    if not ranking.undecided:
        nearest = max(slower, key=lambda name: slower[name].ratio)
        return Statement(
            f"It is the fastest in every round. The closest is {ranking.describe(nearest)}, "
            f"with {_describe_ratio(slower[nearest])} its speed."
        )
    nearest, *others = ranking.undecided
    comparison = ranking.undecided[nearest]
    reason = _join_objections(comparison.objections, detailed=True)
    if counted := comparison.count_slower():
        reason = f"the second is {counted}, and an order needs all"
    sentences = [
        f"Nothing is concluded on which of these two is faster: {reason}.",
        _describe_costs(costs, ranking.first, nearest),
    ]
    if others:
        named = "; ".join(map(ranking.describe_undecided, others))
        sentences.append(f"Also not told apart from the first: {named}.")
    if slower:
        rest = "other is" if len(slower) == 1 else f"other {len(slower)} are"
        sentences.append(f"The {rest} slower in every round.")
    words = f"the fastest against {', '.join(map(ranking.shorten, ranking.undecided))}"
    objections = [pair.objections for pair in ranking.undecided.values()]
    open_orders = _open_orders(words, objections)
    return Statement(" ".join(filter(None, sentences)), (open_orders,))


def describe_options(processes: pd.DataFrame, options: Iterable[str]) -> Statement:
    """A sentence on whether one value of an option is faster than another, for each option
    with several values. Settings that differ in nothing else are compared in pairs, and
    the decided pairs are counted.

    Args:
        options: the columns that tell settings apart.
    """
    options = list(options)
    decided: list[str] = []
    undecided: list[OpenOrders] = []
    for option in options:
        others = [name for name in options if name != option]
        for (first, second), pairs in _pair_settings(processes, option, others).items():
            for word, count in _count_decided(pairs).items():
                if count:
                    decided.append(
                        f"{option} {second} is {word} than {first} in {count} of {len(pairs)}"
                    )
            objections = [pair.objections for pair in pairs if not pair.is_decided]
            if objections:
                which = f"in {len(objections)} of {len(pairs)} pairs"
                words = f"{option} {second} against {first} {which}"
                undecided.append(_open_orders(words, objections))
    text = ""
    if decided:
        text = f"Of pairs of settings that differ in one option alone: {'; '.join(decided)}."
    return Statement(text, tuple(undecided))


def describe_paths(processes: pd.DataFrame, path: str, axis: str) -> Statement:
    """Sentences on which of two ways to run the same calls takes longer at each value of
    an axis, and on the ratio of their times.

    Args:
        processes: their value is a time.
        path: a column with two values, the ways in words.
        axis: a column, at each value of which both ways were measured.
    """
    (first, of_first), (second, of_second) = _group_processes(processes, path).items()
    firsts, seconds = (_group_processes(rows, axis) for rows in (of_first, of_second))
    slower: dict[bool, list[str]] = {True: [], False: []}  # is it the first → values
    ratios: list[str] = []
    undecided: list[tuple[str, list[Objection]]] = []
    for value, rows in firsts.items():
        comparison = _compare({second: seconds[value], first: rows})
        estimate = comparison.estimate
        interval = ""
        if estimate.low <= estimate.high:  # nan: of a single pair
            ends = describe_range(estimate.low, estimate.high, ".4g")
            interval = f" ({CONFIDENCE:.0%} interval {ends})"
        ratios.append(f"{estimate.ratio:.3g} times{interval} at {value}")
        if comparison.is_decided:
            slower[estimate.ratio > 1].append(str(value))
        else:
            undecided.append((str(value), comparison.objections))
    sentences = [
        f"{first} takes {'longer' if is_first else 'less time'} than {second} at {axis} "
        f"{', '.join(values)}."
        for is_first, values in slower.items()
        if values
    ]
    if not sentences:
        sentences = [
            f"Whether {first} or {second} takes longer is decided at no {axis}."
        ]
    sentences.append(f"The first takes, over the second, {', '.join(ratios)}.")
    text = " ".join(sentences)
    text = text[0].upper() + text[1:]
    if not undecided:
        return Statement(text)
    values, objections = zip(*undecided)
    words = f"{first} against {second} at {axis} {', '.join(values)}"
    return Statement(text, (_open_orders(words, objections),))


def describe_undecided(statements: Iterable[Statement]) -> str:
    """One list of the orders that are not decided, with the reasons; empty where every
    order is decided. A single order has the numbers of its reason."""
    kinds = [kind for statement in statements for kind in statement.undecided]
    if not kinds:
        return ""
    orders = [objections for kind in kinds for objections in kind.objections]
    listed = "; ".join(kind.words for kind in kinds)
    detailed = len(orders) == 1
    counts = Counter(_join_objections(order, detailed=detailed) for order in orders)
    if len(counts) == 1:
        return f"Not told apart ({next(iter(counts))}): {listed}."
    reasons = "; ".join(
        f"{reason} ({count} order{'s' * (count > 1)})"
        for reason, count in counts.most_common()
    )
    return f"Not told apart: {listed}. The reasons: {reasons}."


def describe_next_step(statements: Iterable[Statement], command: str) -> str:
    """A sentence with the command that measures further rounds; empty where every order is
    decided."""
    if all(statement.is_decided for statement in statements):
        return ""
    return f"On an idle machine decide the orders left open with: {command}."


def describe_range(low: float, high: float, form: str) -> str:
    """Both ends in words, or one number where they print equal.

    Args:
        form: of a number, as in a format string: `.1%`.
    """
    return join_ends(format(low, form), format(high, form))


def join_ends(low: str, high: str) -> str:
    """The printed ends of a range in words, or one of them where they are equal."""
    return low if low == high else f"{low} to {high}"


def format_value(value: float) -> str:
    """A measured value with three digits, or with all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def round_columns(table: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """A table whose columns with these names have three significant digits: those of a
    prediction with a wide interval say nothing beyond."""

    def round_value(value: float) -> float:
        return float(f"{value:.3g}")

    return table.assign(**{name: table[name].map(round_value) for name in columns})


def _compare_values(
    settings: ProcessesBySetting, axis: str
) -> dict[tuple[Hashable, Hashable], Comparison]:
    """Two values of an axis → their comparison, for neighbours and for the last with the
    first, because neighbours may be too close to tell apart where the ends are not."""
    keys = list(settings)
    pairs = list(pairwise(keys))
    if len(keys) > 2:
        pairs.append((keys[0], keys[-1]))
    return {
        pair: _compare({f"{axis} {key}": settings[key] for key in pair})
        for pair in pairs
    }


def _describe_measure(
    measure: str,
    settings: ProcessesBySetting,
    axis: str,
    comparisons: Mapping[tuple[Hashable, Hashable], Comparison],
) -> str:
    """The medians of a measure at each value of an axis, and the decided differences."""
    medians = ", ".join(
        f"{key}: {_describe_median(rows)}" for key, rows in settings.items()
    )
    sentences = [f"{axis} {medians} {measure}."]
    if not comparisons:
        sentences.append(f"One value of {axis} was measured.")
    decided = []
    for (first, second), comparison in comparisons.items():
        if comparison.is_decided:
            estimate = comparison.estimate
            more = "more" if estimate.ratio > 1 else "fewer"
            decided.append(
                f"{second} has {more} than {first}, {_describe_ratio(estimate)}"
            )
    if decided:
        sentences.append(f"{'; '.join(decided)}.")
    return " ".join(sentences)


def _pair_settings(
    processes: pd.DataFrame, option: str, others: list[str]
) -> dict[tuple[Hashable, Hashable], list[Comparison]]:
    """Two values of an option → the comparisons of the settings with these values that are
    equal in the columns `others`."""
    column = processes[option].astype(object)
    values = list(dict.fromkeys(column.where(column.notna(), NOT_SET)))
    groups = [
        _group_processes(rows, option)
        for _, rows in processes.groupby(others, dropna=False, sort=False)
    ]
    comparisons = {}
    for first, second in pairwise(values):
        compared = [
            _compare({first: settings[first], second: settings[second]})
            for settings in groups
            if {first, second} <= settings.keys()
        ]
        if compared:
            comparisons[first, second] = compared
    return comparisons


def _rank(settings: ProcessesBySetting) -> Ranking:
    """The settings in the order of their medians, and what is decided of the first."""
    medians = {name: _values(rows).median() for name, rows in settings.items()}
    order = sorted(settings, key=medians.get, reverse=True)
    first, *others = order
    ranking = Ranking({name: medians[name] for name in order})
    for name in others:
        comparison = _compare({first: settings[first], name: settings[name]})
        estimate = comparison.estimate
        if comparison.is_decided and estimate.ratio < 1:
            ranking.slower[name] = estimate
        else:
            # a decided ratio above 1 contradicts the medians: nothing is concluded
            contradiction = "the rounds contradict the order of the medians"
            objections = comparison.objections or [Objection(contradiction)]
            ranking.undecided[name] = Comparison(estimate, objections)
    return ranking


def _count_decided(comparisons: list[Comparison]) -> dict[str, int]:
    """The numbers of pairs in which the second setting is faster and slower."""
    ratios = [pair.estimate.ratio for pair in comparisons if pair.is_decided]
    faster = sum(ratio > 1 for ratio in ratios)
    return {"faster": faster, "slower": len(ratios) - faster}


def _describe_costs(costs: pd.DataFrame, first: Hashable, second: Hashable) -> str:
    """Which of two settings has the smaller bundle, and which the lower mean KL; empty
    where both are equal in both.

    Args:
        costs: see `describe_fastest`.
    """
    by_name = costs.drop_duplicates("name").set_index("name")
    reasons: dict[str, list[str]] = {"the first": [], "the second": []}
    for column, noun, form in (
        ("bundle_bytes", "smaller bundle", lambda size: f"{size / 2**20:.1f} MiB"),
        ("kl_mean", "lower mean KL", lambda kl: f"{kl:.2g} nats"),
    ):
        values = by_name.loc[[first, second], column]
        if values.notna().all() and values.nunique() > 1:
            least = "the first" if values.idxmin() == first else "the second"
            sizes = f"{form(values.min())} beside {form(values.max())}"
            reasons[least].append(f"its {noun} ({sizes})")
    choices = [
        f"{setting} for {' and '.join(words)}"
        for setting, words in reasons.items()
        if words
    ]
    if not choices:
        return ""
    return f"Since tok/s do not decide, take {', or '.join(choices)}."


def _group_processes(processes: pd.DataFrame, column: str) -> ProcessesBySetting:
    """The processes of each value of a column. A null is a value, `NOT_SET`."""
    groups = processes.groupby(column, dropna=False)
    return {NOT_SET if pd.isna(key) else key: rows for key, rows in groups}


def _compare(settings: ProcessesBySetting) -> Comparison:
    """The comparison of two settings, the second with the first."""
    first, second = map(_values, settings.values())
    estimate = log.compare_settings(first, second)
    objections = _objections(settings)
    if not objections and not estimate.is_decided:
        objections = [_why_undecided(estimate)]
    return Comparison(estimate, objections)


def _values(rows: pd.DataFrame) -> pd.Series:
    return rows.set_index("run_id")["value"]


def _describe_median(rows: pd.DataFrame) -> str:
    """The median over processes, the least and the most of several."""
    values = rows["value"].dropna()
    median = format_value(values.median())
    if len(values) == 1:
        return f"{median} (1 process)"
    ends = join_ends(format_value(values.min()), format_value(values.max()))
    return f"{median} ({ends})"


def _describe_ratio(estimate: RatioEstimate) -> str:
    interval = describe_range(estimate.low, estimate.high, ".4g")
    return (
        f"{estimate.ratio:.3g} times ({interval}, paired over {estimate.rounds} rounds)"
    )


def _objections(settings: ProcessesBySetting) -> list[Objection]:
    """The reasons why nothing is concluded from settings, whatever their values are."""
    objections = []
    for key, rows in settings.items():
        # `processes` leaves out disturbed ones where a setting has others
        if rows["disturbed"].notna().all():
            cause = rows["disturbed"].iloc[0]
            detailed = f"every process of {key} was disturbed: {cause}"
            reason = "every process of one of the two was disturbed"
            objections.append(Objection(reason, detailed))
        elif log.vary_too_much(rows["value"]):
            ratio = rows["value"].max() / rows["value"].min()
            detailed = f"the processes of {key} lie {ratio:.2f} times apart"
            reason = f"processes of one of the two lie over {FAR_APART:g} times apart"
            objections.append(Objection(reason, detailed))
    return objections


def _why_undecided(estimate: RatioEstimate) -> Objection:
    """The reason why a difference is not decided."""
    if estimate.rounds < MIN_ROUNDS:
        plural = "" if estimate.rounds == 1 else "s"
        measured = f"{estimate.rounds} interleaved round{plural}"
        return Objection(f"{measured} of {MIN_ROUNDS} that an order needs")
    if not estimate.has_one_direction:
        return Objection(f"{estimate.rounds} rounds do not agree")
    beginning = f"all {estimate.rounds} rounds agree, but the"
    if estimate.low <= 1 <= estimate.high:
        interval = describe_range(estimate.low, estimate.high, ".3g")
        words = f"{beginning} {CONFIDENCE:.0%} interval of the ratio"
        return Objection(f"{words} includes 1", f"{words}, {interval}, includes 1")
    limit = f"differs from 1 by at most {MIN_CHANGE - 1:.0%}"
    words = f"{beginning} ratio"
    return Objection(f"{words} {limit}", f"{words}, {estimate.ratio:.3g}, {limit}")


def _join_objections(objections: Iterable[Objection], *, detailed: bool) -> str:
    """The reasons why one order is not decided.

    Args:
        detailed: with the numbers of the two settings.
    """
    words = (objection.describe(detailed=detailed) for objection in objections)
    return " and ".join(dict.fromkeys(words))  # both settings may have one reason


def _open_orders(words: str, orders: Iterable[Iterable[Objection]]) -> OpenOrders:
    return OpenOrders(words, tuple(tuple(objections) for objections in orders))
