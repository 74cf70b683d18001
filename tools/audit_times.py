"""Checks the times that the Answer of a report lists: medians over processes, and ratios of
settings.

`audit.py` calls `check_listed_times` for the reports that have figures of times. Such a figure
has a row for each process; the processes with the same values on all axes are one setting. An
Answer lists a setting by its value on an axis, or by its name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from finding import Finding

# "128: 250.1 (248 to 252, 3 processes)": the value of an axis; the median over its processes,
# the least and the most of several, and their number
LISTED = re.compile(
    r"([\w.]+): ([\d.e+]+) \((?:([\d.e+]+) to ([\d.e+]+), )?(\d+) process(?:es)?\)"
)
# "1024 has fewer than 128, 0.8 times (0.79 to 0.81, paired over 3 rounds)": the second value of
# an axis, the direction, the first value, the ratio of second to first, and the rounds
RATIO = re.compile(
    r"(?P<second>[\w.]+) has (?P<direction>more|fewer) than (?P<first>[\w.]+), "
    r"(?P<ratio>[\d.e+-]+) times "
    r"\([\d.e+-]+ to [\d.e+-]+, paired over (?P<rounds>\d+) rounds\)"
)
MIN_ROUNDS = 3  # with which an Answer may state a ratio


@dataclass(frozen=True)
class ListedSetting:
    """A setting as an Answer lists it, with the digits that are printed: the median over its
    processes, their number, and the least and the most of several.

    Args:
        key: the value of an axis that stands for the setting.
    """

    key: str
    median: str
    count: int
    least: str = ""
    most: str = ""


def check_listed_times(
    place: str,
    text: str,
    figures: dict[str, pd.DataFrame],
    named_processes: pd.DataFrame | None = None,
) -> list[Finding]:
    """Checks every setting that an Answer lists against the median over processes, and every ratio
    and its direction against paired rounds.

    Args:
        figures: name of a figure of times → a row for each process.
        named_processes: a row for each process of a setting that has a name.
    """
    findings = []
    if named_processes is not None:
        for name, rows in undisturbed_processes(named_processes):
            findings += check_named_setting(place, text, name, rows["value"])
            # the patterns of the other checks would match a part of it
            text = re.sub(pattern_of_named_setting(name), "", text)
    if "median" in text and not LISTED.search(text):
        findings.append(
            Finding(place, "times", "no number of processes", "a median over processes")
        )
    findings += check_medians(place, text, figures)
    return findings + check_ratios(place, text, figures)


@dataclass(frozen=True)
class Setting:
    """The processes of one setting in a figure of times.

    Args:
        values: of the figure's axes.
        measured: the processes' values, in the order of time.
    """

    values: tuple
    measured: pd.Series


def group_by_setting(data: pd.DataFrame) -> list[Setting]:
    """The settings of a figure of times."""
    axes = [name for name in ("max_seq_len", "T", "rows") if name in data]
    # ids of runs begin with the time
    groups = data.sort_values("run_id").groupby(axes, dropna=False)
    return [Setting(values, rows["value"]) for values, rows in groups]


def check_medians(
    place: str, text: str, figures: dict[str, pd.DataFrame]
) -> list[Finding]:
    """Checks the settings that an Answer lists by the value of an axis."""
    possible: set[ListedSetting] = set()
    for data in figures.values():
        for setting in group_by_setting(data):
            possible |= possible_listings(setting)
    findings = []
    for key, median, least, most, count in LISTED.findall(text):
        # least and most are "" where a single process has no range
        listed = ListedSetting(key, median, int(count), least, most)
        possible_of_key = {setting for setting in possible if setting.key == key}
        # a key that no figure has belongs to another sentence
        if possible_of_key and listed not in possible_of_key:
            published = f"{median} of {count}"
            medians = "; ".join(sorted({setting.median for setting in possible_of_key}))
            findings.append(Finding(place, f"median at {key}", published, medians))
    return findings


def possible_listings(setting: Setting) -> set[ListedSetting]:
    """The ways in which an Answer may list a setting: by the value of any axis, with or
    without the least and the most."""
    median = f"{setting.measured.median():.4g}"
    least, most = f"{setting.measured.min():.4g}", f"{setting.measured.max():.4g}"
    count = len(setting.measured)
    listings = set()
    for key in map(str, setting.values):
        listings.add(ListedSetting(key, median, count))
        listings.add(ListedSetting(key, median, count, least, most))
    return listings


def check_ratios(
    place: str, text: str, figures: dict[str, pd.DataFrame]
) -> list[Finding]:
    """Checks the ratios of an Answer, and whether it says more or fewer."""
    computed_ratios = paired_ratios(figures)
    findings = []
    for match in RATIO.finditer(text):
        first, second = match["first"], match["second"]
        # several, where several figures have the axis
        possible_ratios = computed_ratios.get((first, second), set())
        is_computed = match["ratio"] in possible_ratios
        direction = "more" if float(match["ratio"]) > 1 else "fewer"
        is_right_direction = match["direction"] == direction
        has_enough_rounds = int(match["rounds"]) >= MIN_ROUNDS
        if not (is_computed and is_right_direction and has_enough_rounds):
            published = "{direction}, {ratio} times, {rounds} rounds"
            published = published.format(**match.groupdict())
            label = f"{second} over {first}"
            computed = "; ".join(sorted(possible_ratios))
            findings.append(Finding(place, label, published, computed))
    return findings


def paired_ratios(figures: dict[str, pd.DataFrame]) -> dict[tuple[str, str], set[str]]:
    """(first, second) value of an axis → the ratios of second to first, as they are printed, of
    settings that differ in this axis alone."""
    ratios: dict[tuple[str, str], set[str]] = {}
    for data in figures.values():
        for first, second in combinations(group_by_setting(data), 2):
            changed = [
                (str(value), str(other))
                for value, other in zip(first.values, second.values)
                if value != other
            ]
            if len(changed) != 1:
                continue
            (pair,) = changed
            log_ratio = mean_log_ratio(first.measured, second.measured)
            ratios.setdefault(pair, set()).add(f"{np.exp(log_ratio):.3g}")
            ratios.setdefault(pair[::-1], set()).add(f"{np.exp(-log_ratio):.3g}")
    return ratios


def mean_log_ratio(first: pd.Series, second: pd.Series) -> float:
    """The mean logarithm of second over first. The k-th process of one is paired with the k-th
    of the other, since both ran in the same round."""
    count = min(len(first), len(second))
    ratios = second.to_numpy()[:count] / first.to_numpy()[:count]
    return float(np.log(ratios).mean())


def undisturbed_processes(
    named_processes: pd.DataFrame,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name of each setting and the rows of its processes that nothing disturbed."""
    undisturbed = named_processes[named_processes["disturbed"].isna()]
    yield from undisturbed.groupby("name")


def pattern_of_named_setting(name: str) -> str:
    """The pattern of "NAME: median (least to most, N processes)" with a group for each
    number."""
    return (
        rf"{re.escape(name)}: ([\d.e+]+) \(([\d.e+]+) to ([\d.e+]+), "
        r"(\d+) process(?:es)?\)"
    )


def check_named_setting(
    place: str, text: str, name: str, values: pd.Series
) -> list[Finding]:
    """Checks the median, the range and the number of processes wherever an Answer lists a
    setting by its name.

    Args:
        values: of the setting's processes.
    """
    numbers = [values.median(), values.min(), values.max()]
    computed = (*(f"{number:.4g}" for number in numbers), str(len(values)))
    findings = []
    for match in re.finditer(pattern_of_named_setting(name), text):
        if match.groups() != computed:
            printed, right = " ".join(match.groups()), " ".join(computed)
            findings.append(Finding(place, f"median of {name}", printed, right))
    return findings
