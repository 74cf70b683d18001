"""Sentences about measured times: every setting with its processes, and an order only
where interleaved rounds decide it.

Input is a table with one row per process (see `results.processes`): run_id, value,
disturbed (a reason, or null), and the columns that tell settings apart. Output is text.
The argument `command` is the command that measures further rounds."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from workbench import log
from workbench.log.times import MIN_ROUNDS, Difference

ProcessesBySetting = dict[Hashable, pd.DataFrame]
"""The processes of each setting."""
NOT_SET = "not set"
"""Stands for a null, as in the figures."""


@dataclass(frozen=True)
class Comparison:
    """Two settings: the difference of the second from the first, and the reasons why
    nothing is concluded from it."""

    difference: Difference
    objections: list[str]

    @property
    def is_decided(self) -> bool:
        return not self.objections


def describe_axis(processes: pd.DataFrame, axis: str, unit: str, command: str) -> str:
    """How a time depends on an axis: the median over processes at each of its values,
    and the differences of neighbouring values and of the last from the first."""
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
    decided, undecided = [], []
    for first, second in pairs:
        comparison = _compare(
            {f"{axis} {first}": settings[first], f"{axis} {second}": settings[second]}
        )
        if comparison.is_decided:
            change = comparison.difference
            more = "more" if change.ratio > 1 else "fewer"
            decided.append(
                f"{second} has {more} than {first}, {_describe_ratio(change)}"
            )
        else:
            undecided.append((f"{second} against {first}", comparison.objections))
    if decided:
        sentences.append(f"{'; '.join(decided)}.")
    return " ".join([*sentences, *_say_undecided(undecided, command)])


def describe_fastest(processes: pd.DataFrame, command: str) -> str:
    """Which setting (column `name`) has the most tokens per second, by how much it is
    ahead of each other setting, and which settings are not told apart from it."""
    settings = _group_processes(processes, "name")
    medians = {name: _values(rows).median() for name, rows in settings.items()}
    order = sorted(settings, key=medians.get, reverse=True)
    speeds = "; ".join(
        f"{name}: {_describe_median(settings[name])} tok/s" for name in order
    )
    if len(order) < 2:
        return f"{speeds}. No other setting was measured."
    first, *others = order
    slower, undecided = [], []
    for name in others:
        comparison = _compare({first: settings[first], name: settings[name]})
        change = comparison.difference
        if comparison.is_decided and change.ratio < 1:
            slower.append((name, change))
        else:
            # a decided ratio above 1 contradicts the medians: nothing is concluded
            undecided.append((name, comparison.objections or [_why_undecided(change)]))
    sentences = [f"{speeds}."]
    if not undecided:
        nearest, change = max(slower, key=lambda item: item[1].ratio)
        sentences.append(
            f"The fastest is {first}, in every round. The closest is {nearest}, with "
            f"{_describe_ratio(change)} its speed."
        )
        return " ".join(sentences)
    if slower:
        names = "; ".join(name for name, _ in slower)
        sentences.append(f"Slower than {first} in every round: {names}.")
    name, objections = undecided[0]
    undecided[0] = f"{first} against {name}", objections
    return " ".join([*sentences, *_say_undecided(undecided, command)])


def describe_choice(
    processes: pd.DataFrame, option: str, others: Iterable[str], command: str
) -> str:
    """Whether one value of an option is faster than another. Settings that differ in
    nothing else are compared in pairs, and the decided pairs are counted.

    Args:
        others: the columns in which the settings of a pair are equal.
    """
    others = list(others)
    column = processes[option].astype(object)
    values = list(dict.fromkeys(column.where(column.notna(), NOT_SET)))
    sentences = []
    for first, second in pairwise(values):
        counts, objections = {"more": 0, "fewer": 0, "open": 0}, []
        for _, rows in processes.groupby(others, dropna=False, sort=False):
            settings = _group_processes(rows, option)
            if not {first, second} <= settings.keys():
                continue
            comparison = _compare({first: settings[first], second: settings[second]})
            objections += comparison.objections
            if not comparison.is_decided:
                counts["open"] += 1
            elif comparison.difference.ratio > 1:
                counts["more"] += 1
            else:
                counts["fewer"] += 1
        pairs = sum(counts.values())
        if not pairs:
            continue
        sentence = (
            f"{option} {second} has more tokens per second than {first} in "
            f"{counts['more']} of {pairs} pairs of settings that differ in nothing else, "
            f"fewer in {counts['fewer']}, and {counts['open']} are not decided"
        )
        if objections:
            reasons = "; ".join(dict.fromkeys(objections))
            sentence += f" ({reasons}; decide with: {command})"
        sentences.append(f"{sentence}.")
    return " ".join(sentences)


def _group_processes(processes: pd.DataFrame, column: str) -> ProcessesBySetting:
    """The processes of each value of a column. A null is a value, `NOT_SET`."""
    groups = processes.groupby(column, dropna=False)
    return {NOT_SET if pd.isna(key) else key: rows for key, rows in groups}


def _compare(settings: ProcessesBySetting) -> Comparison:
    """The comparison of two settings, the second with the first."""
    first, second = map(_values, settings.values())
    difference = log.difference(first, second)
    objections = _objections(settings)
    if not objections and not difference.is_decided:
        objections = [_why_undecided(difference)]
    return Comparison(difference, objections)


def _values(rows: pd.DataFrame) -> pd.Series:
    return rows.set_index("run_id")["value"]


def _describe_median(rows: pd.DataFrame) -> str:
    """The median over processes, the least, the most and their number."""
    (summary,) = log.summarize(rows.assign(all=0), "all").itertuples()
    if summary.n == 1:
        return f"{summary.median:.4g} (1 process)"
    extent = f"{summary.least:.4g} to {summary.most:.4g}"
    return f"{summary.median:.4g} ({extent}, {summary.n} processes)"


def _describe_ratio(change: Difference) -> str:
    return (
        f"{change.ratio:.3g} times ({change.low:.3g} to {change.high:.3g}, paired over "
        f"{change.rounds} rounds)"
    )


def _objections(settings: ProcessesBySetting) -> list[str]:
    """Why nothing is concluded from settings, whatever their values say."""
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


def _why_undecided(change: Difference) -> str:
    """Why a difference is not decided."""
    if change.rounds < MIN_ROUNDS:
        plural = "" if change.rounds == 1 else "s"
        measured = f"{change.rounds} interleaved round{plural}"
        return f"{measured} of {MIN_ROUNDS} that an order needs"
    return f"{change.rounds} rounds do not agree"


def _say_undecided(pairs: list[tuple[str, list[str]]], command: str) -> list[str]:
    """The comparisons that are not decided, grouped by their reasons, and the command
    that decides them on an idle machine."""
    if not pairs:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, reasons in pairs:
        by_reason.setdefault(" and ".join(reasons), []).append(name)
    groups = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return [
        f"Not decided: {'; '.join(groups)}. On an idle machine decide with: {command}"
    ]
