"""Robust statistics of samples: a summary of runs, and a comparison of two.

Medians and median absolute deviations are used, since timings have long tails.
"""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.errors import InputError
from workbench.log.machine import with_machines
from workbench.log.schema import JSON_COLUMNS, SCHEMAS
from workbench.log.store import Root, load

MEASUREMENT = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""Columns that are equal for repetitions of one measurement within a run."""

MIN_ROUNDS = 3
_DRIFT_P = 0.05
_DRIFT_SIZE = 0.05
_OUTLIER = 1.5
_FALSE_ALARMS = 0.01
# medians of as many parts of a long run: Theil and Sen compare all pairs
_DRIFT_BLOCKS = 500
# columns in which two runs of one setting differ
_INCIDENTAL = set(
    """
    run_id time round swap_bytes swap_bytes_before footprint_bytes ane_joules ane_active_ms
    config.cell config.measured config.before config.flags config.load_average config.gates
    config.energy
    """.split()
)
_FIGURES = ["median", "p90", "mad", "n", "drift", "drifting", "unstable"]
_RATIO = ["n_a", "n_b", "median_a", "median_b", "ratio", "low", "high", "note"]
_SAME = [
    "setting",
    "commit",
    "versions",
    "platform",
    "machine",
    "os_build",
    "power_source",
]
_SAME += ["low_power", "rosetta"]


def summary(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per run and measurement of a ``samples`` frame, warm-ups left out.

    Returns:
        run_id and the columns of `MEASUREMENT`. median, p90 (90th percentile), mad: in
        the measurement's unit; n: number of samples. drift: the change from the first
        to the last sample as a fraction of the median, by the
            Theil–Sen slope; drifting: whether it exceeds 5% and Kendall's tau is
            significant at 5% (needs five samples).
        unstable: whether the largest value exceeds 1.5 times the mean, pyperf's rule.
    """
    groups = _timed(samples, "run_id", *MEASUREMENT).agg(list).reset_index()
    figures = [_describe(np.array(values)) for values in groups.pop("value")]
    return groups.join(pd.DataFrame(figures, columns=_FIGURES))


def flags(samples: pd.DataFrame) -> list[str]:
    """Warnings on a run's own samples: whole calls and rates that drift or have far
    outliers."""
    whole = samples[samples["phase"].isin(["call", "tokens_per_s"])]
    drifts = []
    outliers = []
    for row in summary(whole.assign(run_id="this")).itertuples():
        if row.drifting:
            drifts.append(f"{row.phase} drifts by {row.drift:+.0%}")
        if row.unstable:
            outliers.append(f"{row.phase} is unstable")
    return drifts + outliers


def _timed(samples: pd.DataFrame, *keys: str):
    """Measured values without warm-ups in order of time, grouped by some columns."""
    measured = samples[~samples["warmup"].fillna(False)].dropna(subset="value")
    measured = measured.sort_values(["repetition", "order"])
    return measured.groupby(list(keys), dropna=False)["value"]


def _describe(values: np.ndarray) -> tuple:
    """`_FIGURES` of the samples of one measurement."""
    from scipy import stats  # half a second to import, which every command would wait

    blocks = np.array_split(values, min(len(values), _DRIFT_BLOCKS))
    course = np.array([np.median(block) for block in blocks])
    median = np.median(values)
    order = np.arange(len(course))
    drift = 0.0
    drifting = False
    if median and np.ptp(course):
        drift = stats.theilslopes(course, order).slope * order[-1] / median
        significant = stats.kendalltau(order, course).pvalue < _DRIFT_P
        drifting = bool(abs(drift) > _DRIFT_SIZE and significant)
    unstable = bool(values.max() > _OUTLIER * values.mean())
    p90 = np.quantile(values, 0.9)
    mad = stats.median_abs_deviation(values)
    return median, p90, mad, len(values), drift, drifting, unstable


@dataclass(frozen=True)
class Comparison:
    """Two settings side by side, each with every run that repeats it.

    Attributes:
        settings: columns ``setting, a, b``; only settings that differ.
        measures: the columns of `MEASUREMENT`, ``n_a, n_b`` runs, the medians over them
            ``median_a, median_b``, ``ratio`` (b over a), its interval ``low, high``,
            and ``note`` where there is no interval.
        indistinguishable: number of measurements left out because their interval
            contains 1.
    """

    settings: pd.DataFrame
    measures: pd.DataFrame
    indistinguishable: int


def compare(run_a: str, run_b: str, root: Root = None) -> Comparison:
    """Compares two logged runs, each with all that repeat its setting on the same
    machine and code.

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
    runs = with_machines(load("runs", root)).drop(columns="software")
    first, second = (_row(run_id, runs) for run_id in (run_a, run_b))
    a, b = (_repeats(row, runs)["run_id"].tolist() for row in (first, second))
    if set(a) & set(b):  # runs of one setting are compared without their repetitions
        a = [run_a]
        b = [run_b]
    samples = (load("samples", root, {"run_id": run_ids}) for run_ids in (a, b))
    measures = _ratios(*samples, rounds(a, b))
    if first["machine"] != second["machine"]:
        measures[["ratio", "low", "high"]] = np.nan
        measures["note"] = "two machines"
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    settings = _differing_settings(first, second)
    return Comparison(settings, measures[~same].reset_index(drop=True), int(same.sum()))


def _differing_settings(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """setting, a, b: the settings in which two rows of `runs` differ."""
    a = _settings(first)
    b = _settings(second)
    rows = []
    for name in a | b:
        if a.get(name) != b.get(name):
            rows.append((name, a.get(name), b.get(name)))
    return pd.DataFrame(rows, columns=["setting", "a", "b"], dtype=object)


def rounds(a: list[str], b: list[str]) -> int:
    """The number of interleaved rounds of two sets of runs: how often, in the order of
    time, both had been run equally often."""
    order = sorted([*a, *b])  # run ids sort by time
    sides = np.where(np.isin(order, a), 1, -1)
    return int((np.cumsum(sides) == 0).sum())


def _row(run_id: str, runs: pd.DataFrame) -> pd.Series:
    rows = runs[runs["run_id"] == run_id]
    if rows.empty:
        raise InputError(
            "run", run_id, "a run in the log", "list them with `workbench log`"
        )
    return rows.iloc[0]


def _repeats(row: pd.Series, runs: pd.DataFrame) -> pd.DataFrame:
    """The run and those with status ok of the same setting, machine and code; a run
    without a setting alone."""
    itself = runs["run_id"] == row["run_id"]
    if pd.isna(row["setting"]):
        return runs[itself]
    alike = runs[(runs["status"] == "ok") | itself]
    for name in _SAME:
        same = alike[name] == row[name]
        if pd.isna(row[name]):
            same = alike[name].isna()
        alike = alike[same]
    return alike


def _settings(run: pd.Series) -> dict:
    """The settings in a row of `runs`; keys of JSON columns become names such as
    ``config.depth``."""
    row = run.dropna().to_dict()
    for name in sorted(JSON_COLUMNS & row.keys()):
        for key, value in json.loads(row.pop(name)).items():
            row[f"{name}.{key}"] = value
    for name in ("config.export", "config.run"):  # most keys are columns of `runs`
        for key, value in (row.pop(name, None) or {}).items():
            if key not in SCHEMAS["runs"].names:
                row[f"{name}.{key}"] = value
    return {name: value for name, value in row.items() if name not in _INCIDENTAL}


def _ratios(a: pd.DataFrame, b: pd.DataFrame, interleaved: int) -> pd.DataFrame:
    """Every measurement of either side, with the ratio of medians where both have
    it."""
    pairs = _by_run(a).merge(_by_run(b), "outer", MEASUREMENT, suffixes=("_a", "_b"))
    compared = pairs[["value_a", "value_b"]].notna().all(axis=1).sum()
    confidence = 1 - _FALSE_ALARMS / max(compared, 1)
    ratios = []
    for sides in zip(pairs.pop("value_a"), pairs.pop("value_b")):
        # the null of a side without the measurement becomes an empty array
        x, y = (np.array(side if isinstance(side, list) else []) for side in sides)
        ratios.append(_ratio(x, y, interleaved, confidence))
    return pairs.join(pd.DataFrame(ratios, columns=_RATIO))


def _by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """One value per run: the median over its repetitions of their medians, since calls
    of one sequence are not independent."""
    each = _timed(samples, *MEASUREMENT, "run_id", "repetition").median()
    values = each.groupby([*MEASUREMENT, "run_id"], dropna=False).median()
    return values.groupby(MEASUREMENT, dropna=False).agg(list).reset_index()


def _ratio(a: np.ndarray, b: np.ndarray, interleaved: int, confidence: float) -> tuple:
    """`_RATIO` of one measurement."""
    medians = [pd.Series(values, dtype=float).median() for values in (a, b)]
    ratio = low = high = np.nan
    note = None
    if not (len(a) and len(b)):
        note = "on one side only"
    elif min(a.min(), b.min()) <= 0:
        note = "not positive"
    else:
        ratio = medians[1] / medians[0]
        if min(interleaved, len(a), len(b)) < MIN_ROUNDS:
            note = "not enough runs"
        elif not (np.ptp(a) or np.ptp(b)):  # such as counts: the interval is a point
            low = high = ratio
        else:
            from scipy import stats

            test = stats.ttest_ind(np.log(b), np.log(a))
            interval = test.confidence_interval(confidence)
            low, high = map(float, np.exp(interval))
    return len(a), len(b), *medians, ratio, low, high, note
