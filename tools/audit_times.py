"""Checks the times that the Answer of a report lists: medians over processes, and ratios of
settings.

`audit.py` calls `check_listed_times` for the reports that have figures of times. Such a figure
has a row for each process; the processes with the same values on all axes are one setting. An
Answer lists a setting by its value on an axis, or by its name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
import pandas as pd
from finding import Finding
from scipy.stats import sem, t

# "128: 250 (248 to 252)": the value of an axis; the median over its processes, and the least and
# the most of several, which may print equal; a single process is named, and reports of before have
# the number of several
LISTED = re.compile(
    r"([\w.]+): ([\d.e+]+) \((?:([\d.e+]+)(?: to ([\d.e+]+))?(?:, (\d+) processes)?|1 process)\)"
)
# "compress fp16, layers_per_shard 4 (29.0 tok/s)": a setting beside the fastest one, and its
# median; reports of before have only what tells it from the fastest one: "compress fp16 (29.0)"
SPEED = re.compile(
    r"(?:against |(?<=\)), |(?<=\)); |: |closest is )"
    r"(?P<options>[\w./-]+ [\w./-]+(?:(?:, | and )[\w./-]+ [\w./-]+)*) "
    r"\((?P<median>[\d.]+)(?: tok/s)?[,)]"
)
# a line of an Answer, with the name of the fastest setting and its median
FASTEST = re.compile(
    r"^(?P<name>.+?) (?:has the highest median (?:of [^(]+ )?\(|is the fastest(?: of [^:]+)?: )"
    r"(?P<median>[\d.]+) tok/s",
    re.MULTILINE,
)
# "1024 has fewer than 128, 0.8 times (0.79 to 0.81, paired over 3 rounds)": the second value of
# an axis, the direction, the first value, the ratio of second to first, and the rounds
RATIO = re.compile(
    r"(?P<second>[\w.]+) has (?P<direction>more|fewer) than (?P<first>[\w.]+), "
    r"(?P<ratio>[\d.e+-]+) times "
    r"\([\d.e+-]+(?: to [\d.e+-]+)?, paired over (?P<rounds>\d+) rounds\)"
)
# "all 3 rounds agree, but the 95% interval of the ratio, 0.82 to 1.05, includes 1": both ends
INTERVAL = re.compile(
    r"the 95% interval of the ratio, (?P<low>[\d.e+-]+) to (?P<high>[\d.e+-]+), includes 1"
)
# "0.948 times (95% interval 0.828 to 1.085) at 128": the ms of calls that read all rows of the
# cache over those of calls that read the rows that hold a token, and the value of max_seq_len
RATIO_OF_PATHS = re.compile(
    r"(?P<ratio>[\d.e+-]+) times"
    r"(?: \(95% interval (?P<low>[\d.e+-]+)(?: to (?P<high>[\d.e+-]+))?\))? at (?P<length>\d+)"
)
CONFIDENCE = 0.95  # of the intervals in an Answer
MIN_ROUNDS = 3  # with which an Answer may state a ratio


@dataclass(frozen=True)
class ListedSetting:
    """A setting as an Answer lists it, with the digits that are printed: the median over its
    processes, and the least and the most of several.

    Args:
        key: the value of an axis that stands for the setting.
    """

    key: str
    median: str
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
        findings += check_fastest(place, text, named_processes)
    if "median" in text and not LISTED.search(text):
        findings.append(
            Finding(place, "times", "no listed setting", "a median over processes")
        )
    findings += check_medians(place, text, figures)
    findings += check_ratios(place, text, figures)
    if "paths" in figures:
        findings += check_paths(place, text, figures["paths"])
    return findings + check_intervals(place, text, figures, named_processes)


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
    counts: set[int] = set()  # of processes
    for data in figures.values():
        for setting in group_by_setting(data):
            possible |= possible_listings(setting)
            counts.add(len(setting.measured))
    findings = []
    for key, median, least, most, count in LISTED.findall(text):
        # least and most are "" where a single process has no range
        listed = ListedSetting(key, median, least, most)
        possible_of_key = {setting for setting in possible if setting.key == key}
        is_possible = listed in possible_of_key and int(count or 0) in {0, *counts}
        # a key that no figure has belongs to another sentence
        if possible_of_key and not is_possible:
            published = f"{median} of {count}" if count else median
            medians = "; ".join(sorted({setting.median for setting in possible_of_key}))
            findings.append(Finding(place, f"median at {key}", published, medians))
    return findings


def printed_forms(value: float) -> list[str]:
    """A value with three digits, or with all digits before the point, and with the four of
    reports of before."""
    digits = f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
    return [digits, f"{value:.4g}"]


def possible_listings(setting: Setting) -> set[ListedSetting]:
    """The ways in which an Answer may list a setting: by the value of any axis."""
    values = setting.measured
    numbers = (values.median(), values.min(), values.max())
    listings = set()
    for median, least, most in zip(*map(printed_forms, numbers)):
        ends = ("", "") if len(values) == 1 else (least, "" if least == most else most)
        listings |= {ListedSetting(str(key), median, *ends) for key in setting.values}
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


def check_paths(place: str, text: str, calls: pd.DataFrame) -> list[Finding]:
    """Checks the ratio of both ways to read the cache at each max_seq_len, with the fewest
    tokens in a call.

    Args:
        calls: the figure `paths`.
    """
    fewest = calls[calls["T"] == calls["T"].min()].sort_values("run_id")
    findings = []
    for match in RATIO_OF_PATHS.finditer(text):
        rows = fewest[fewest["max_seq_len"] == int(match["length"])]
        # in the order of their names, those that read all rows come first
        parts = [part["value"] for _, part in rows.groupby("rows")]
        if len(parts) != 2:
            needed = "two ways to read the cache"
            findings.append(Finding(place, "paths", match[0], needed))
            continue
        every, used = parts
        low, high = interval_of_ratio(used, every, digits=4)
        computed = f"{np.exp(mean_log_ratio(used, every)):.3g}", low, high
        low = match["low"] or ""
        printed = match["ratio"], low, match["high"] or low
        if printed != computed:
            right = " ".join(computed)
            findings.append(Finding(place, "paths", " ".join(printed), right))
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


def check_intervals(
    place: str,
    text: str,
    figures: dict[str, pd.DataFrame],
    named_processes: pd.DataFrame | None,
) -> list[Finding]:
    """Checks the intervals with which an Answer leaves an order undecided: each is that of two
    settings, and has 1 inside."""
    groups = [
        [setting.measured for setting in group_by_setting(data)]
        for data in figures.values()
    ]
    if named_processes is not None:
        rows_by_name = undisturbed_processes(named_processes.sort_values("run_id"))
        groups.append([rows["value"] for _, rows in rows_by_name])
    possible = {
        interval_of_ratio(first, second)
        for settings in groups
        for first, second in permutations(settings, 2)
    }
    findings = []
    for low, high in INTERVAL.findall(text):
        if (low, high) not in possible or not float(low) <= 1 <= float(high):
            published = f"{low} to {high}"
            needed = "the interval of two settings, with 1 inside"
            findings.append(Finding(place, "interval of a ratio", published, needed))
    return findings


def interval_of_ratio(
    first: pd.Series, second: pd.Series, digits: int = 3
) -> tuple[str, str]:
    """Both ends, as they are printed, of Student's interval of `mean_log_ratio`; empty
    where one pair has none."""
    count = min(len(first), len(second))
    if count < 2:
        return "", ""
    logs = np.log(second.to_numpy()[:count] / first.to_numpy()[:count])
    ends = t.interval(CONFIDENCE, count - 1, logs.mean(), sem(logs))
    low, high = (f"{end:.{digits}g}" for end in np.exp(ends))
    return low, high


def undisturbed_processes(
    named_processes: pd.DataFrame,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name of each setting and the rows of its processes that nothing disturbed."""
    undisturbed = named_processes[named_processes["disturbed"].isna()]
    yield from undisturbed.groupby("name")


def check_fastest(
    place: str, text: str, named_processes: pd.DataFrame
) -> list[Finding]:
    """Checks the medians of the fastest setting, which a line names, and of those
    that are named beside it."""
    fastest = FASTEST.search(text)
    if not fastest:
        return []
    medians = {
        frozenset(name.split(", ")): rows["value"].median()
        for name, rows in undisturbed_processes(named_processes)
    }
    # the name lacks the parts that all settings share
    shared = frozenset.intersection(*medians)
    first = frozenset(fastest["name"].split(", ")) | shared
    printed = [(first, fastest["name"], fastest["median"])]
    for match in SPEED.finditer(text, fastest.end()):
        parts = re.split(", | and ", match["options"])
        options = {part.rpartition(" ")[0] for part in parts}
        kept = {part for part in first if part.rpartition(" ")[0] not in options}
        setting = frozenset(kept | set(parts))
        printed.append((setting, match["options"], match["median"]))
    findings = []
    for setting, name, median in printed:
        needed = (
            printed_forms(medians[setting]) if setting in medians else ["no setting"]
        )
        if median not in needed:
            findings.append(Finding(place, f"median of {name}", median, needed[0]))
    return findings


def pattern_of_named_setting(name: str) -> str:
    """The pattern of "NAME: median (least to most, N processes)" in reports of before, with a
    group for each number."""
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
