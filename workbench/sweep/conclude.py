"""Sentences about measured times: every setting with its processes, and an order only
where interleaved rounds decide it.

Input is a table with one row per process (see `results.processes`): run_id, value,
disturbed (a reason, or null), and the columns that tell settings apart. Output is text.
The argument `command` is the command that measures further rounds."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pandas as pd

from workbench import log
from workbench.log.times import MIN_ROUNDS, RatioEstimate

ProcessesBySetting = dict[Hashable, pd.DataFrame]
"""The processes of each setting."""
NOT_SET = "not set"
"""Stands for a null, as in the figures."""


@dataclass(frozen=True)
class Comparison:
    """Two settings, compared."""

    estimate: RatioEstimate
    """The ratio of the second setting to the first."""
    objections: list[str]
    """Reasons why nothing is concluded from it."""

    @property
    def is_decided(self) -> bool:
        return not self.objections


@dataclass(frozen=True)
class Undecided:
    """Two settings that are not told apart."""

    pair: str
    """Both, in words."""
    objections: list[str]


@dataclass
class Ranking:
    """Settings in the order of their medians, and the first compared with each other."""

    medians: dict[Hashable, float]
    """Tokens per second of each setting, the most first."""
    slower: dict[Hashable, RatioEstimate] = field(default_factory=dict)
    """Settings that are slower than the first in every round, with their ratio to it."""
    undecided: dict[Hashable, list[str]] = field(default_factory=dict)
    """The other settings, with the reasons why nothing is concluded from them."""

    @property
    def first(self) -> Hashable:
        """The setting with the highest median."""
        return next(iter(self.medians))


def describe_axis(processes: pd.DataFrame, axis: str, unit: str, command: str) -> str:
    """Sentences on the dependence of a measured value, such as ms or tokens per second, on
    an axis: the median over processes at each of its values, and the differences of
    neighbouring values and of the last from the first."""
    settings = _group_processes(processes, axis)
    keys = list(settings)
    pairs = list(pairwise(keys))
    # neighbours may be too close to tell apart where the ends are not
    if len(keys) > 2:
        pairs.append((keys[0], keys[-1]))
    medians = ", ".join(f"{key}: {_describe_median(settings[key])}" for key in keys)
    sentences = [f"{axis} {medians} {unit}."]
    if not pairs:
        return f"{sentences[0]} One value of {axis} was measured."
    decided: list[str] = []
    undecided: list[Undecided] = []
    for first, second in pairs:
        comparison = _compare(
            {f"{axis} {first}": settings[first], f"{axis} {second}": settings[second]}
        )
        if comparison.is_decided:
            estimate = comparison.estimate
            more = "more" if estimate.ratio > 1 else "fewer"
            decided.append(
                f"{second} has {more} than {first}, {_describe_ratio(estimate)}"
            )
        else:
            pair = f"{second} against {first}"
            undecided.append(Undecided(pair, comparison.objections))
    if decided:
        sentences.append(f"{'; '.join(decided)}.")
    return " ".join([*sentences, *_describe_undecided(undecided, command)])


def describe_most(processes: pd.DataFrame) -> str:
    """A sentence that names the setting (column `name`) with the most tokens per second,
    and says so where its order against another is not decided."""
    ranking = _rank(_group_processes(processes, "name"))
    speed = f"{ranking.medians[ranking.first]:.4g}"
    if not ranking.undecided:
        return f"{ranking.first} has the most tokens per second: {speed}."
    (nearest, objections), *others = ranking.undecided.items()
    more = f". Nor is that against {len(others)} more" if others else ""
    return (
        f"{ranking.first} has the highest median of tokens per second, {speed}; its order "
        f"against {nearest} ({ranking.medians[nearest]:.4g}) is not decided: "
        f"{' and '.join(objections)}{more}."
    )


def describe_fastest(processes: pd.DataFrame, command: str) -> str:
    """Sentences that name the setting (column `name`) with the most tokens per second, how
    far ahead it is, and the settings that are not told apart from it."""
    settings = _group_processes(processes, "name")
    ranking = _rank(settings)
    first, slower = ranking.first, ranking.slower
    speeds = "; ".join(
        f"{name}: {_describe_median(settings[name])} tok/s" for name in ranking.medians
    )
    if len(settings) < 2:
        return f"{speeds}. No other setting was measured."
    # the fastest setting is named once
    undecided = [
        Undecided(name if place else f"{first} against {name}", objections)
        for place, (name, objections) in enumerate(ranking.undecided.items())
    ]
    sentences = [f"{speeds}."]
    if not undecided:
        nearest = max(slower, key=lambda name: slower[name].ratio)
        sentences.append(
            f"The fastest is {first}, in every round. The closest is {nearest}, with "
            f"{_describe_ratio(slower[nearest])} its speed."
        )
        return " ".join(sentences)
    if slower:
        sentences.append(f"Slower than {first} in every round: {'; '.join(slower)}.")
    return " ".join([*sentences, *_describe_undecided(undecided, command)])


def describe_choice(
    processes: pd.DataFrame, option: str, others: Iterable[str], command: str
) -> str:
    """Sentences on whether one value of an option is faster than another. Settings that
    differ in nothing else are compared in pairs, and the decided pairs are counted.

    Args:
        others: the columns in which the settings of a pair are equal.
    """
    others = list(others)
    column = processes[option].astype(object)
    values = list(dict.fromkeys(column.where(column.notna(), NOT_SET)))
    groups = [
        _group_processes(rows, option)
        for _, rows in processes.groupby(others, dropna=False, sort=False)
    ]
    sentences = []
    for first, second in pairwise(values):
        comparisons = [
            _compare({first: settings[first], second: settings[second]})
            for settings in groups
            if {first, second} <= settings.keys()
        ]
        if comparisons:
            counts = _count_pairs(comparisons, command)
            sentences.append(
                f"{option} {second} has more tokens per second than {first} in {counts}."
            )
    return " ".join(sentences)


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
            objections = comparison.objections or [_why_undecided(estimate)]
            ranking.undecided[name] = objections
    return ranking


def _count_pairs(comparisons: list[Comparison], command: str) -> str:
    """The rest of a sentence that counts the pairs in which the second setting is faster,
    slower, or neither."""
    decided = [comparison for comparison in comparisons if comparison.is_decided]
    more = sum(comparison.estimate.ratio > 1 for comparison in decided)
    text = (
        f"{more} of {len(comparisons)} pairs of settings that differ in nothing else, "
        f"fewer in {len(decided) - more}, and {len(comparisons) - len(decided)} are not "
        "decided"
    )
    reasons = dict.fromkeys(
        reason for comparison in comparisons for reason in comparison.objections
    )
    if reasons:
        text += f" ({'; '.join(reasons)}; decide with: {command})"
    return text


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
    """The median over processes, the least, the most and their number."""
    values = rows["value"].dropna()
    if len(values) == 1:
        return f"{values.median():.4g} (1 process)"
    extent = f"{values.min():.4g} to {values.max():.4g}"
    return f"{values.median():.4g} ({extent}, {len(values)} processes)"


def _describe_ratio(estimate: RatioEstimate) -> str:
    return (
        f"{estimate.ratio:.3g} times ({estimate.low:.3g} to {estimate.high:.3g}, paired over "
        f"{estimate.rounds} rounds)"
    )


def _objections(settings: ProcessesBySetting) -> list[str]:
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
    return reasons


def _why_undecided(estimate: RatioEstimate) -> str:
    """The reason why a difference is not decided."""
    if estimate.rounds < MIN_ROUNDS:
        plural = "" if estimate.rounds == 1 else "s"
        measured = f"{estimate.rounds} interleaved round{plural}"
        return f"{measured} of {MIN_ROUNDS} that an order needs"
    return f"{estimate.rounds} rounds do not agree"


def _describe_undecided(undecided: list[Undecided], command: str) -> list[str]:
    """A sentence on comparisons that are not decided, grouped by their reasons, with the
    command that decides them on an idle machine; none without any."""
    if not undecided:
        return []
    by_reason: dict[str, list[str]] = {}
    for comparison in undecided:
        reason = " and ".join(comparison.objections)
        by_reason.setdefault(reason, []).append(comparison.pair)
    groups = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return [
        f"Not decided: {'; '.join(groups)}. On an idle machine decide with: {command}"
    ]
