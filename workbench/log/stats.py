"""Two logged runs side by side: their settings, and the ratios of what they measured.

Medians are used, since timings have long tails."""

import numpy as np
import pandas as pd

from workbench.errors import InputError
from workbench.log.places import Root
from workbench.log.schema import SETTINGS
from workbench.log.store import load, plain

MEASUREMENT = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""Columns that are equal for repetitions of one measurement within a run."""

MIN_ROUNDS = 3
_FALSE_ALARMS = 0.01
_AROUND = ["commit", "versions", "platform", "power_source", "low_power"]
_SAME = ["setting", "machine", "software", *_AROUND]
_RATIO = ["n_a", "n_b", "median_a", "median_b", "ratio", "low", "high", "note"]


def compare(
    run_a: str, run_b: str, root: Root = None
) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Two logged runs, a and b, each with all that repeat its setting on the same
    machine and code.

    Returns:
        The columns of ``runs`` that differ: ``setting, a, b``. A row per measurement
        (see `MEASUREMENT`) whose difference is not chance: ``n_a, n_b`` runs, the
        medians over them ``median_a, median_b``, ``ratio`` (b over a), its interval
        ``low, high``, and ``note`` where there is no interval. The number of
        measurements left out because their interval contains 1.

    Each run, which is one process, counts as one value, its median over repetitions,
    since processes differ by more than the calls within one. The note is "not enough
    runs" with fewer than three interleaved rounds: if one side were measured after the
    other, the warming up of the machine would appear as a difference. Times of two
    machines have both medians, no ratio and the note "two machines".

    The interval is Student's for the difference of mean logarithms. Its confidence,
    corrected after Bonferroni for the number of measurements, allows one false alarm in
    a hundred comparisons.

    Raises:
        InputError: the log lacks one of the runs.
    """
    runs = load("runs", root)
    first, second = (find(run, runs) for run in (run_a, run_b))
    a, b = (_repeats(row, runs) for row in (first, second))
    if set(a) & set(b):  # runs of one setting are compared without their repetitions
        a, b = [first["run_id"]], [second["run_id"]]
    sides = [_by_run(load("samples", root, {"run_id": ids})) for ids in (a, b)]
    measures = sides[0].merge(sides[1], "outer", MEASUREMENT, suffixes=("_a", "_b"))
    values = [measures.pop(name) for name in ("value_a", "value_b")]
    compared = sum(side.notna() for side in values).eq(2).sum()
    confidence = 1 - _FALSE_ALARMS / max(compared, 1)
    note = None
    if len({first["machine"], second["machine"]}) > 1:
        note = "two machines"
    elif _rounds(a, b) < MIN_ROUNDS:
        note = "not enough runs"
    ratios = [_ratio(*pair, note, confidence) for pair in zip(*values)]
    measures = measures.join(pd.DataFrame(ratios, columns=_RATIO))
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    both = plain(pd.DataFrame({"a": first, "b": second})).loc[[*SETTINGS, *_AROUND]]
    settings = both[both["a"].ne(both["b"]) & both.notna().any(axis=1)]
    settings = settings.rename_axis("setting").reset_index()
    return settings, measures[~same].reset_index(drop=True), int(same.sum())


def find(run: str, runs: pd.DataFrame) -> pd.Series:
    """The only row of `runs` whose id is `run` or ends in it.

    Raises:
        InputError: there is none, or several.
    """
    rows = runs[runs["run_id"].str.endswith(run)] if run else runs[:0]
    if len(rows) != 1:
        actual, step = f"{len(rows)} with this end", "list them with `workbench log`"
        raise InputError(f"run {run}", actual, "a run in the log", step)
    return rows.iloc[0]


def _rounds(a: list[str], b: list[str]) -> int:
    """The number of interleaved rounds of two sets of runs: how often, in the order of
    time, both had been run equally often."""
    order = sorted([*a, *b])  # run ids sort by time
    sides = np.where(np.isin(order, a), 1, -1)
    return (np.cumsum(sides) == 0).sum()


def _repeats(row: pd.Series, runs: pd.DataFrame) -> list[str]:
    """The run and those with status ok of the same setting, machine and code; a run
    without a setting alone."""
    own = runs["run_id"] == row["run_id"]
    if pd.notna(row["setting"]):
        group = runs.groupby(_SAME, dropna=False).ngroup()
        own |= (group == group[row.name]) & (runs["status"] == "ok")
    return runs.loc[own, "run_id"].tolist()


def _by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """A list of values for each measurement, one per run: the median over its
    repetitions of their medians without warm-ups, since calls of one sequence are not
    independent."""
    timed = samples[~samples["warmup"].fillna(False)].dropna(subset="value")
    keys = [*MEASUREMENT, "run_id"]
    each = timed.groupby([*keys, "repetition"], dropna=False)["value"].median()
    values = each.groupby(keys, dropna=False).median()
    return values.groupby(MEASUREMENT, dropna=False).agg(list).reset_index()


def _ratio(a, b, note: str | None, confidence: float) -> dict:
    """`_RATIO` of one measurement from a list of values of each side (null: none)."""
    a, b = (pd.Series(v if isinstance(v, list) else [], dtype=float) for v in (a, b))
    row = {"n_a": len(a), "n_b": len(b), "note": note}
    row |= {"median_a": a.median(), "median_b": b.median()}
    if note == "two machines":
        return row
    if a.empty or b.empty:
        return row | {"note": "on one side only"}
    row["ratio"] = b.median() / a.median()
    if note or min(len(a), len(b)) < MIN_ROUNDS:
        return row | {"note": "not enough runs"}
    from scipy import stats

    test = stats.ttest_ind(np.log(b), np.log(a))
    row["low"], row["high"] = np.exp(test.confidence_interval(confidence))
    return row
