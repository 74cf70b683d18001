"""Two logged runs beside each other: the settings that differ, and the ratios of their
measurements.

A run is compared together with the runs that repeat its setting. `times` gives one value
for each of these; the interval of a ratio is computed here from the values of both
sides."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind

from workbench.errors import InputError
from workbench.log.places import Root
from workbench.log.schema import SETTINGS
from workbench.log.store import load, plain
from workbench.log.times import MIN_ROUNDS, by_process, count_rounds

SHOWN_IDS = 4
"""The number of ids that an error names where several runs fit."""
MEASUREMENT = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""Columns that are equal for repetitions of one measurement within a run."""

_FALSE_ALARMS = 0.01
"""The share of comparisons of equal runs that may report a difference."""
# columns that may differ between two runs of a setting
_CIRCUMSTANCES = ["commit", "versions", "platform", "power_source", "low_power"]
_REPEAT_COLUMNS = ["setting", "machine", "software", *_CIRCUMSTANCES]
_RESULTS = ["n_a", "n_b", "median_a", "median_b", "ratio", "low", "high", "note"]


class RunComparison(NamedTuple):
    """The differences of two logged runs, a and b."""

    settings: pd.DataFrame
    """The columns of ``runs`` that differ: ``setting, a, b``."""
    measures: pd.DataFrame
    """A row per measurement (see `MEASUREMENT`) whose difference is not chance: the
    numbers of runs ``n_a, n_b`` (null: none), the medians over them ``median_a,
    median_b``, ``ratio`` (b over a), its interval ``low, high``, and ``note``, the reason
    where there is no interval."""
    alike: int
    """The number of measurements left out because their interval contains 1."""


def compare(run_a: str, run_b: str, root: Root = None) -> RunComparison:
    """Compares two logged runs, a and b, each together with the runs that repeat its
    setting on the same machine and code.

    Each run, which is one process, counts as one value (see `times.by_process`), since
    processes differ by more than the calls within one. With fewer than three
    interleaved rounds the note is "not enough runs": if one side were measured after
    the other, a machine that warms up would appear as a difference. Times of two
    machines have both medians, no ratio and the note "two machines".

    The interval is Student's for the difference of mean logarithms. Bonferroni's
    correction for the number of measurements allows one false alarm in a hundred
    comparisons.

    Raises:
        InputError: the log lacks one of the runs.
    """
    runs = load("runs", root)
    a, b = find_run(run_a, runs), find_run(run_b, runs)
    ids_a, ids_b = _find_repeats(a, runs), _find_repeats(b, runs)
    if set(ids_a) & set(ids_b):  # of one setting: compared without their repetitions
        ids_a, ids_b = [a["run_id"]], [b["run_id"]]
    measures = _join_sides(ids_a, ids_b, root)
    if pd.Series([a["machine"], b["machine"]]).nunique(dropna=False) > 1:
        measures["note"], measures["ratio"] = "two machines", None
    else:
        measures["note"] = _notes(measures, count_rounds(ids_a, ids_b))
        measures["ratio"] = measures["median_b"] / measures["median_a"]
    intervals = _intervals(measures[measures["note"].isna()])
    measures = measures.join(intervals)[[*MEASUREMENT, *_RESULTS]]
    is_alike = measures["low"].le(1) & measures["high"].ge(1)
    return RunComparison(
        settings=_differing_settings(a, b),
        measures=measures[~is_alike].reset_index(drop=True),
        alike=int(is_alike.sum()),
    )


def _join_sides(ids_a: list[str], ids_b: list[str], root: Root) -> pd.DataFrame:
    """A row per measurement of either side, with the columns `values`, `n` and `median`
    of each (see `_values_by_run`), whose names end in ``_a`` and ``_b``."""
    a = _values_by_run(load("samples", root, {"run_id": ids_a}))
    b = _values_by_run(load("samples", root, {"run_id": ids_b}))
    return a.merge(b, "outer", MEASUREMENT, suffixes=("_a", "_b"))


def _differing_settings(a: pd.Series, b: pd.Series) -> pd.DataFrame:
    """The settings and circumstances in which two rows of `runs` differ: setting, a, b."""
    sides = plain(pd.DataFrame({"a": a, "b": b}).loc[[*SETTINGS, *_CIRCUMSTANCES]])
    differs = sides["a"].ne(sides["b"]) & sides.notna().any(axis=1)
    return sides[differs].rename_axis("setting").reset_index()


def _notes(measures: pd.DataFrame, rounds: int) -> pd.Series:
    """The reason why a measurement has no interval; None for one that has.

    Args:
        rounds: the interleaved rounds of both sides.
    """
    counts = measures[["n_a", "n_b"]]  # null: not measured on this side
    enough = counts.ge(MIN_ROUNDS).all(axis=1) & (rounds >= MIN_ROUNDS)
    notes = pd.Series(np.where(enough, None, "not enough runs"), counts.index, object)
    notes[counts.isna().any(axis=1)] = "on one side only"
    return notes


def _intervals(compared: pd.DataFrame) -> pd.DataFrame:
    """The interval `low`, `high` of the ratio of each measurement, b over a."""
    # Bonferroni's correction: the chance that any interval is wrong is `_FALSE_ALARMS`
    confidence = 1 - _FALSE_ALARMS / max(len(compared), 1)
    bounds = []
    for values_b, values_a in zip(compared["values_b"], compared["values_a"]):
        test = ttest_ind(np.log(values_b), np.log(values_a))
        bounds.append(test.confidence_interval(confidence))
    return np.exp(pd.DataFrame(bounds, compared.index, ["low", "high"], dtype=float))


def find_run(run: str, runs: pd.DataFrame) -> pd.Series:
    """The one row of `runs` whose id is `run` or ends in it.

    Raises:
        InputError: there is none, or several.
    """
    rows = runs[runs["run_id"].str.endswith(run)] if run else runs[:0]
    if len(rows) != 1:
        actual = f"no id in the log that ends in {run!r}"
        step = "read the ids that `workbench log` prints"
        if len(rows):
            newest = rows["run_id"].str.split("-").str[-1].iloc[: -SHOWN_IDS - 1 : -1]
            others = ", …" if len(rows) > SHOWN_IDS else ""
            actual = f"{len(rows)} runs whose ids end in {run!r}: {', '.join(newest)}{others}"
            step = "give more of its id, or read the ids that `workbench log` prints"
        raise InputError(f"run {run}", actual, "the id of one run in the log", step)
    return rows.iloc[0]


def _find_repeats(row: pd.Series, runs: pd.DataFrame) -> list[str]:
    """The ids of the run and of those with status ok of the same setting, machine and
    code; the run alone where it has no setting."""
    is_run = runs["run_id"] == row["run_id"]
    if pd.isna(row["setting"]):
        return runs.loc[is_run, "run_id"].tolist()
    # a number for each combination of these columns, nulls among them
    group = runs.groupby(_REPEAT_COLUMNS, dropna=False).ngroup()
    group_of_run = group[is_run].iloc[0]
    is_repeat = (group == group_of_run) & (runs["status"] == "ok")
    return runs.loc[is_run | is_repeat, "run_id"].tolist()


def _values_by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """`values` of each measurement, one per run (see `times.by_process`), their number
    `n` and their `median`."""
    keys = [name for name in MEASUREMENT if name != "phase"]
    groups = by_process(samples, keys).groupby(MEASUREMENT, dropna=False)["value"]
    return groups.agg(values=list, n="size", median="median").reset_index()
