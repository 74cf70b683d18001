"""The one statistic of times, and the rules for conclusions from it.

A process gives one value (`by_process`): its tokens over the time of its timed calls, or
the median of its timed calls. Calls of one process resemble each other more than those
of two, so that they are no independent values. A setting is the median over its
processes, beside the least and the most of them (`summarize`). Two settings differ only
where at least `MIN_ROUNDS` interleaved rounds agree (`compare_settings`). Processes that
other work disturbed (`disturbance_reasons`) are left out where a setting has others
(`select_undisturbed`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

RATE = "tokens_per_s"
"""The phase whose samples are rates; all others are milliseconds."""
MIN_ROUNDS = 3
CONFIDENCE = 0.95
MIN_CHANGE = 1.02
"""A smaller ratio may come from the order within a round alone, on a machine that slows
down meanwhile."""
FAR_APART = 1.25
"""No conclusion is drawn from a setting whose processes differ by this ratio."""
TRIMMED_FROM = 5
"""From this many processes on, the smallest and the largest are ignored."""
LOAD_MARGIN = 0.5
"""Load above the number of cores that the measurement itself may cause."""
MAX_STEAL = 0.02
"""The share of processor time that other machines may take."""


@dataclass(frozen=True)
class RatioEstimate:
    """The values of a second setting, times or rates, over those of a first one."""

    ratio: float
    """The geometric mean over pairs of processes."""
    low: float
    high: float
    """Student's interval of that mean (nan: fewer than two pairs)."""
    rounds: int
    """See `count_rounds`."""
    pairs: int
    """Pairs of processes, one of each setting."""
    pairs_below: int
    """Pairs in which the value of the second setting is the smaller one."""
    has_one_direction: bool
    """Whether every pair lies on the same side of 1."""
    is_decided: bool
    """Whether the settings differ: at least `MIN_ROUNDS` rounds, every pair and the
    interval on one side of 1, and a mean that differs from 1 by more than
    `MIN_CHANGE`."""


def by_process(samples: pd.DataFrame, keys: Sequence[str] = ()) -> pd.DataFrame:
    """One value for each process (`run_id`), phase and combination of `keys`.

    Args:
        samples: rows of the log's table `samples`; warm-ups are left out.

    Returns:
        keys, run_id, phase, value. Of `RATE` it is the tokens over the time of all
        timed calls: repetitions time equally many tokens, so that this is the harmonic
        mean of their rates. Of every other phase it is the median of the calls.
    """
    is_warmup = samples["warmup"].astype("boolean").fillna(False)
    timed = samples[~is_warmup].dropna(subset="value")
    is_rate = timed["phase"] == RATE
    columns = [*keys, "run_id", "phase"]
    inverse = timed[is_rate].assign(value=1 / timed.loc[is_rate, "value"])
    rates = 1 / inverse.groupby(columns, dropna=False)["value"].mean()
    medians = timed[~is_rate].groupby(columns, dropna=False)["value"].median()
    parts = [part for part in (rates, medians) if len(part)]
    if not parts:
        return pd.DataFrame(columns=[*columns, "value"])
    return pd.concat(parts).rename("value").reset_index()


def speeds(samples: pd.DataFrame) -> pd.DataFrame:
    """The columns of `runs` that sum up the times of each process, indexed by run_id:
    tokens_per_s, call_ms, and call_p90_ms, the 90th percentile of its calls."""
    values = by_process(samples).pivot(index="run_id", columns="phase", values="value")
    is_warmup = samples["warmup"].astype("boolean").fillna(False)
    calls = samples[(samples["phase"] == "call") & ~is_warmup]
    tails = calls.groupby("run_id")["value"].quantile(0.9)
    columns = {"tokens_per_s": values.get(RATE), "call_ms": values.get("call")}
    return pd.DataFrame(columns | {"call_p90_ms": tails}, values.index, dtype=float)


def summarize(
    processes: pd.DataFrame, by: str | list[str], value: str = "value"
) -> pd.DataFrame:
    """The median over processes of each group, the least and the most of them, and
    their number: columns median, least, most, n."""
    groups = processes.groupby(by, dropna=False)[value]
    return groups.agg(median="median", least="min", most="max", n="count")


def count_rounds(first: Sequence[str], second: Sequence[str]) -> int:
    """The number of interleaved rounds of two sets of run ids. In the order of time, a
    round ends whenever both sets have the same number of runs.

    Example: the runs a b b a a, where a is of the first set, are 2 rounds: a b, and b a.
    The runs a a b b are 1 round."""
    order = sorted([*first, *second])  # run ids sort by time
    of_first = set(first)
    lead = rounds = 0  # lead: how many more runs of the first than of the second so far
    for run_id in order:
        lead += 1 if run_id in of_first else -1
        rounds += lead == 0
    return rounds


def compare_settings(first: pd.Series, second: pd.Series) -> RatioEstimate:
    """The ratio of two settings, the second over the first, each with one value for each
    process (index: run ids).

    The k-th process of one is paired with the k-th of the other, so that a machine that
    slows down meanwhile does not appear as a difference.
    """
    first, second = first.sort_index(), second.sort_index()
    rounds = count_rounds(first.index, second.index)
    pairs = min(len(first), len(second))
    logs = np.log(second.to_numpy(float)[:pairs] / first.to_numpy(float)[:pairs])
    mean, half_width = float(logs.mean()), np.nan
    if pairs > 1:
        # as scipy.stats.t.ppf, whose import takes half a second
        quantile = stdtrit(pairs - 1, (1 + CONFIDENCE) / 2)
        half_width = float(quantile * logs.std(ddof=1) / pairs**0.5)
    has_one_direction = bool((logs > 0).all() or (logs < 0).all())
    is_large = abs(mean) > max(half_width, np.log(MIN_CHANGE))
    is_decided = bool(rounds >= MIN_ROUNDS and has_one_direction and is_large)
    ratio, low, high = np.exp([mean, mean - half_width, mean + half_width]).tolist()
    below = int((logs < 0).sum())
    return RatioEstimate(
        ratio, low, high, rounds, pairs, below, has_one_direction, is_decided
    )


def vary_too_much(values: Sequence[float]) -> bool:
    """Whether processes of one setting differ by more than `FAR_APART`. Of
    `TRIMMED_FROM` or more, the least and the most are left out."""
    ordered = sorted(values)
    if len(ordered) >= TRIMMED_FROM:
        ordered = ordered[1:-1]
    return len(ordered) > 1 and ordered[-1] > FAR_APART * ordered[0]


def select_undisturbed(runs: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Whether each row counts: those that nothing disturbed do, and all of a group (the
    columns `by`) in which every one was disturbed. Booleans with the index of
    `runs`."""
    was_disturbed = runs["disturbed"].notna()
    keys = [runs[name] for name in by]
    return ~was_disturbed | was_disturbed.groupby(keys, dropna=False).transform("all")


def disturbance_reasons(runs: pd.DataFrame) -> pd.Series:
    """The reason, in words, why the times of each run say little: other work disturbed
    it. None where nothing shows it.

    Args:
        runs: rows of the log's table `runs`. Older rows lack load and steal, and are
            never called disturbed.
    """
    reasons = []
    for run in runs.to_dict("records"):
        cores = re.search(r"\b(\d+) cores", str(run.get("machine")))
        causes = []
        for name, when in (("load_start", "before"), ("load_end", "after")):
            load = run.get(name)
            if cores and pd.notna(load) and load > int(cores[1]) + LOAD_MARGIN:
                causes.append(f"load {load:.1f} on {cores[1]} cores {when} it")
        steal = run.get("steal")
        if pd.notna(steal) and steal > MAX_STEAL:
            causes.append(f"{steal:.0%} of processor time went to other machines")
        reasons.append(", ".join(causes) or None)
    return pd.Series(reasons, runs.index, object)
