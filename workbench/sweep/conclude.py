"""Sentences about measured times: every setting with its processes, and an order only
where interleaved rounds decide it.

Input is a table with one row per process (see `results.processes`): run_id, value,
disturbed (a reason, or null), and the columns that tell settings apart. Output is text,
and whether it leaves an order undecided. `describe_next_step` names the command that
measures further rounds, once for all statements of an answer."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pandas as pd

from workbench import log
from workbench.log.times import CONFIDENCE, MIN_CHANGE, MIN_ROUNDS, RatioEstimate

ProcessesBySetting = dict[Hashable, pd.DataFrame]
"""The processes of each setting."""
NOT_SET = "not set"
"""Stands for a null, as in the figures."""
MAX_NAMED_PAIRS = 3
"""Pairs of values without a decided order that a sentence names; it counts more of them."""


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


@dataclass(frozen=True)
class Statement:
    """Sentences, and whether they leave no order undecided."""

    text: str
    is_decided: bool = True


@dataclass(frozen=True)
class Undecided:
    """Two settings that are not told apart."""

    pair: str
    """Both, in words."""
    objections: list[Objection]

    @property
    def reason(self) -> str:
        return self._join_objections(detailed=False)

    @property
    def detailed(self) -> str:
        """The reason with the numbers of the pair."""
        return self._join_objections(detailed=True)

    def _join_objections(self, *, detailed: bool) -> str:
        words = (objection.describe(detailed=detailed) for objection in self.objections)
        return " and ".join(words)


@dataclass
class Ranking:
    """Settings in the order of their medians, and the first compared with each other."""

    medians: dict[Hashable, float]
    """Tokens per second of each setting, the most first."""
    slower: dict[Hashable, RatioEstimate] = field(default_factory=dict)
    """Settings that are slower than the first in every round, with their ratio to it."""
    undecided: dict[Hashable, list[Objection]] = field(default_factory=dict)
    """The other settings, with the reasons why nothing is concluded from them."""

    @property
    def first(self) -> Hashable:
        """The setting with the highest median."""
        return next(iter(self.medians))


def describe_axis(measures: Mapping[str, pd.DataFrame], axis: str) -> Statement:
    """A line for each measure on its dependence on an axis, and a sentence on the orders
    that are not decided. A line has the median over processes at each value of the axis,
    and the decided differences of neighbouring values and of the last from the first.

    Args:
        measures: what was measured, with its unit → the processes.
    """
    lines: list[str] = []
    undecided: list[Undecided] = []
    count = 0
    for measure, processes in measures.items():
        settings = _group_processes(processes, axis)
        comparisons = _compare_values(settings, axis)
        count += len(comparisons)
        lines.append(_describe_measure(measure, settings, axis, comparisons))
        where = f" in {measure}" if len(measures) > 1 else ""
        undecided += [
            Undecided(f"{second} against {first}{where}", comparison.objections)
            for (first, second), comparison in comparisons.items()
            if not comparison.is_decided
        ]
    if undecided:
        reasons = _describe_reasons(undecided, "order")
        has_one_reason = len({pair.reason for pair in undecided}) == 1
        is_long = len(undecided) > MAX_NAMED_PAIRS
        if count == len(undecided) > 1 and (has_one_reason or is_long):
            words = f"No order by {axis} is decided: {reasons}."
        elif is_long:
            rest = f"The other {len(undecided)} of {count} orders by {axis}"
            words = f"{rest} are not decided: {reasons}."
        else:
            words = _describe_undecided(undecided)
        # of one measure, the sentence stands in its line
        lines = [*lines, words] if len(measures) > 1 else [f"{lines[0]} {words}"]
    return Statement("\n".join(lines), not undecided)


def describe_most(processes: pd.DataFrame, group: str) -> str:
    """A sentence that names the setting (column `name`) with the most tokens per second,
    and says so where its order against others is not decided.

    Args:
        group: the settings in words, such as "8 configurations that pass".
    """
    ranking = _rank(_group_processes(processes, "name"))
    name = _shorten_name(ranking.first, ranking.medians)
    speed = format_value(ranking.medians[ranking.first])
    if not ranking.undecided:
        return f"{name} is the fastest of {group}: {speed} tok/s."
    nearest, *others = ranking.undecided
    against = f"{_name_difference(nearest, ranking.first)} "
    against += f"({format_value(ranking.medians[nearest])})"
    if others:
        against += f" and {len(others)} other{'s' * (len(others) > 1)}"
    return (
        f"{name} has the highest median of {group} ({speed} tok/s), undecided against "
        f"{against}."
    )


def describe_fastest(processes: pd.DataFrame) -> Statement:
    """Sentences on how far ahead the setting (column `name`) with the most tokens per
    second is, and on the settings that are not told apart from it."""
    ranking = _rank(_group_processes(processes, "name"))
    first, slower = ranking.first, ranking.slower
    if len(ranking.medians) < 2:
        return Statement("There is no other setting to compare.")

    def describe(name: str) -> str:
        return f"{_name_difference(name, first)} ({format_value(ranking.medians[name])} tok/s)"

    if not ranking.undecided:
        nearest = max(slower, key=lambda name: slower[name].ratio)
        return Statement(
            f"It is the fastest in every round. The closest is {describe(nearest)}, with "
            f"{_describe_ratio(slower[nearest])} its speed."
        )
    # the fastest setting is named once
    undecided = [
        Undecided(f"its order against {describe(name)}", objections)
        if place == 0
        else Undecided(describe(name), objections)
        for place, (name, objections) in enumerate(ranking.undecided.items())
    ]
    sentences = [_describe_undecided(undecided)]
    if slower:
        others = "other is" if len(slower) == 1 else f"other {len(slower)} are"
        sentences.append(f"The {others} slower in every round.")
    return Statement(" ".join(sentences), is_decided=False)


def describe_options(processes: pd.DataFrame, options: Iterable[str]) -> Statement:
    """Sentences on whether one value of an option is faster than another, for each option
    with several values. Settings that differ in nothing else are compared in pairs, and
    the decided pairs are counted.

    Args:
        options: the columns that tell settings apart.
    """
    options = list(options)
    sentences: list[str] = []
    undecided: list[Undecided] = []
    for option in options:
        others = [name for name in options if name != option]
        for words, comparisons in _pair_settings(processes, option, others).items():
            sentences.append(f"{words} in {_count_pairs(comparisons)}.")
            undecided += [
                Undecided(words, comparison.objections)
                for comparison in comparisons
                if not comparison.is_decided
            ]
    if undecided:
        sentences.append(f"Undecided: {_describe_reasons(undecided, 'pair')}.")
    return Statement(" ".join(sentences), not undecided)


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
) -> dict[str, list[Comparison]]:
    """The beginning of a sentence on two values of an option → the comparisons of the
    settings with these values that are equal in the columns `others`."""
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
            comparisons[f"{option} {second} is faster than {first}"] = compared
    return comparisons


def _shorten_name(name: str, names: Iterable[str]) -> str:
    """The parts of a setting's name that not all settings have."""
    shared = set.intersection(*(set(other.split(", ")) for other in names))
    parts = [part for part in name.split(", ") if part not in shared]
    return ", ".join(parts) or name


def _name_difference(name: str, other: str) -> str:
    """The parts of a setting's name that another setting's name lacks."""
    parts = [part for part in name.split(", ") if part not in other.split(", ")]
    return " and ".join(parts) or name


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
            ranking.undecided[name] = comparison.objections or [
                Objection(contradiction)
            ]
    return ranking


def _count_pairs(comparisons: list[Comparison]) -> str:
    """The rest of a sentence that counts the pairs in which the second setting is faster,
    slower, or neither."""
    decided = [comparison for comparison in comparisons if comparison.is_decided]
    more = sum(comparison.estimate.ratio > 1 for comparison in decided)
    text = (
        f"{more} of {len(comparisons)} pairs that differ in nothing else, slower in "
        f"{len(decided) - more}"
    )
    undecided = len(comparisons) - len(decided)
    return f"{text}, undecided in {undecided}" if undecided else text


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
    reasons = []
    for key, rows in settings.items():
        # `processes` leaves out disturbed ones where a setting has others
        if rows["disturbed"].notna().all():
            cause = rows["disturbed"].iloc[0]
            reasons.append(f"every process of {key} was disturbed: {cause}")
        elif log.vary_too_much(rows["value"]):
            ratio = rows["value"].max() / rows["value"].min()
            reasons.append(f"the processes of {key} lie {ratio:.2f} times apart")
    return [Objection(reason) for reason in reasons]


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


def _describe_reasons(undecided: list[Undecided], thing: str) -> str:
    """The reasons why comparisons are not decided. Several reasons have the numbers of
    their comparisons.

    Args:
        thing: that is not decided, such as "order".
    """
    if len(undecided) == 1:
        return undecided[0].detailed
    counts = Counter(comparison.reason for comparison in undecided)
    if len(counts) == 1:
        return undecided[0].reason
    return "; ".join(
        f"{reason} ({count} {thing}{'s' * (count > 1)})"
        for reason, count in counts.items()
    )


def _describe_undecided(undecided: list[Undecided]) -> str:
    """A sentence for each reason why comparisons are not decided. It has the numbers of a
    comparison that alone has this reason."""
    by_reason: dict[str, list[Undecided]] = {}
    for comparison in undecided:
        by_reason.setdefault(comparison.reason, []).append(comparison)
    sentences = []
    for reason, comparisons in by_reason.items():
        words = comparisons[0].detailed if len(comparisons) == 1 else reason
        pairs = ", ".join(comparison.pair for comparison in comparisons)
        sentences.append(f"Not decided ({words}): {pairs}.")
    return " ".join(sentences)
