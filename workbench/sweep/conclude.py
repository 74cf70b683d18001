"""Sentences about measured times: every setting with its processes, and an order only
where interleaved rounds decide it.

In: a table with one row per process (see `results.processes`): run_id, value, disturbed
(a reason, or null), and the columns that tell settings apart. Out: text. The argument
`command` is what measures further rounds."""

from collections.abc import Hashable, Iterable
from itertools import pairwise

import pandas as pd

from workbench import log
from workbench.log.times import MIN_ROUNDS, Difference

Series = dict[Hashable, pd.DataFrame]
"""The processes of each setting."""
NOT_SET = "not set"
"""How a null is called, as in the figures."""


def describe_axis(processes: pd.DataFrame, axis: str, unit: str, command: str) -> str:
    """How a time depends on an axis: the median over processes at each of its values,
    and the differences of neighbouring values and of the last from the first."""
    settings = _by(processes, axis)
    keys = list(settings)
    pairs = list(pairwise(keys))
    if len(keys) > 2:
        pairs.append((keys[0], keys[-1]))
    listed = ", ".join(f"{key}: {_figures(settings[key])}" for key in keys)
    words = [f"{axis} {listed} {unit}."]
    if not pairs:
        return f"{words[0]} One value of {axis} was measured."
    decided, undecided = [], []
    for first, second in pairs:
        pair = {f"{axis} {key}": settings[key] for key in (first, second)}
        reasons = _objections(pair)
        found = log.difference(*map(_values, pair.values()))
        if not reasons and found.is_decided:
            more = "more" if found.ratio > 1 else "fewer"
            decided.append(f"{second} has {more} than {first}, {_times(found)}")
        else:
            undecided.append((f"{second} against {first}", reasons or [_why(found)]))
    if decided:
        words.append(f"{'; '.join(decided)}.")
    return " ".join([*words, *_say_undecided(undecided, command)])


def describe_fastest(processes: pd.DataFrame, command: str) -> str:
    """Which setting (column `name`) has the most tokens per second, by how much it is
    ahead of each other one, and which ones are not told apart from it."""
    settings = _by(processes, "name")
    medians = {name: _values(rows).median() for name, rows in settings.items()}
    order = sorted(settings, key=medians.get, reverse=True)
    listed = "; ".join(f"{name}: {_figures(settings[name])} tok/s" for name in order)
    if len(order) < 2:
        return f"{listed}. There is no other one."
    first, *others = order
    slower, undecided = [], []
    for name in others:
        reasons = _objections({key: settings[key] for key in (first, name)})
        found = log.difference(_values(settings[first]), _values(settings[name]))
        if not reasons and found.is_decided and found.ratio < 1:
            slower.append((name, found))
        else:
            undecided.append((name, reasons or [_why(found)]))
    words = [f"{listed}."]
    if not undecided:
        nearest, found = max(slower, key=lambda item: item[1].ratio)
        words.append(
            f"The fastest is {first}: the others have fewer in all {found.rounds} "
            f"rounds, {nearest} the least so, {_times(found)}."
        )
        return " ".join(words)
    if slower:
        names = "; ".join(name for name, _ in slower)
        words.append(f"Slower than {first} in every round: {names}.")
    title = f"{first} against "
    rest = [(f"{title if not i else ''}{n}", r) for i, (n, r) in enumerate(undecided)]
    return " ".join([*words, *_say_undecided(rest, command)])


def describe_choice(
    processes: pd.DataFrame, option: str, others: Iterable[str], command: str
) -> str:
    """Whether one value of an option is faster than another: the settings that differ
    in nothing else are compared in pairs, and the decided ones are counted."""
    others = list(others)
    column = processes[option].astype(object)
    values = list(dict.fromkeys(column.where(column.notna(), NOT_SET)))
    words = []
    for first, second in pairwise(values):
        counts, reasons = {"more": 0, "fewer": 0, "open": 0}, []
        for _, rows in processes.groupby(others, dropna=False, sort=False):
            settings = _by(rows, option)
            if not {first, second} <= settings.keys():
                continue
            pair = {key: settings[key] for key in (first, second)}
            found = log.difference(*map(_values, pair.values()))
            objections = _objections(pair) or (
                [] if found.is_decided else [_why(found)]
            )
            side = "more" if found.ratio > 1 else "fewer"
            counts["open" if objections else side] += 1
            reasons += objections
        pairs = sum(counts.values())
        if not pairs:
            continue
        words.append(
            f"{option} {second} has more tokens per second than {first} in "
            f"{counts['more']} of {pairs} pairs of settings that differ in nothing else, "
            f"fewer in {counts['fewer']}, and {counts['open']} are not decided"
            + (
                f" ({'; '.join(dict.fromkeys(reasons))}; decide with: {command})."
                if reasons
                else "."
            )
        )
    return " ".join(words)


def _by(processes: pd.DataFrame, column: str) -> Series:
    """The processes of each value of a column; a null is a value, `NOT_SET`."""
    groups = processes.groupby(column, dropna=False)
    return {NOT_SET if pd.isna(key) else key: rows for key, rows in groups}


def _values(rows: pd.DataFrame) -> pd.Series:
    return rows.set_index("run_id")["value"]


def _figures(rows: pd.DataFrame) -> str:
    """The median over processes, the least, the most and their number."""
    (found,) = log.summarize(rows.assign(all=0), "all").itertuples()
    if found.n == 1:
        return f"{found.median:.4g} (1 process)"
    return f"{found.median:.4g} ({found.least:.4g} to {found.most:.4g}, {found.n} processes)"


def _times(found: Difference) -> str:
    return (
        f"{found.ratio:.3g} times ({found.low:.3g} to {found.high:.3g}, paired over "
        f"{found.rounds} rounds)"
    )


def _objections(settings: Series) -> list[str]:
    """Why nothing is concluded from settings, whatever their values say."""
    reasons = []
    for key, rows in settings.items():
        if rows["disturbed"].notna().all():
            words = rows["disturbed"].iloc[0]
            reasons.append(f"every process of {key} was disturbed: {words}")
        elif log.are_apart(rows["value"]):
            ratio = rows["value"].max() / rows["value"].min()
            reasons.append(f"the processes of {key} lie {ratio:.2f} times apart")
    return reasons


def _why(found: Difference) -> str:
    """Why a difference is not decided."""
    if found.rounds < MIN_ROUNDS:
        measured = f"{found.rounds} interleaved round{'s' if found.rounds != 1 else ''}"
        return f"{measured} of {MIN_ROUNDS} that an order needs"
    return f"{found.rounds} rounds do not agree"


def _say_undecided(pairs: list[tuple[str, list[str]]], command: str) -> list[str]:
    """The comparisons that are not decided, those with equal reasons together, and the
    command that decides them on an idle machine."""
    by_reason: dict[str, list[str]] = {}
    for name, reasons in pairs:
        by_reason.setdefault(" and ".join(reasons), []).append(name)
    words = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    if not words:
        return []
    return [
        f"Not decided: {'; '.join(words)}. On an idle machine decide with: {command}"
    ]
