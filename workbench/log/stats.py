"""Robust statistics of samples: warnings on one run, and a comparison of two.

Medians are used, since timings have long tails."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.log.places import Root
from workbench.log.store import find, load, plain

MEASUREMENT = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""Columns that are equal for repetitions of one measurement within a run."""

MIN_ROUNDS = 3
_DRIFT_P = 0.05
_DRIFT_SIZE = 0.05
_OUTLIER = 1.5
_FALSE_ALARMS = 0.01
# medians of as many parts of a long run: Theil and Sen compare all pairs
_DRIFT_BLOCKS = 500
# columns of a run that are no setting of it
_RESULTS = """run_id time round status reason verdict config swap_bytes placement
ane_ops_share ane_joules tokens_per_s call_ms call_p90_ms cold_s warm_s worst_update
worst_cosine kl_mean""".split()
_SAME = ["setting", "machine", "software", "commit", "versions", "platform"]
_SAME += ["power_source", "low_power"]


def flags(samples: pd.DataFrame) -> list[str]:
    """Warnings on a run's own samples: whole calls and rates that drift (see `drift`),
    or whose largest value exceeds 1.5 times the mean, pyperf's rule."""
    whole = samples[samples["phase"].isin(["call", "tokens_per_s"])]
    drifts, outliers = [], []
    for (phase, *_), own in _timed(whole, *MEASUREMENT):
        values = own.to_numpy(float)
        if change := drift(values):
            drifts.append(f"{phase} drifts by {change:+.0%}")
        if values.max() > _OUTLIER * values.mean():
            outliers.append(f"{phase} is unstable")
    return drifts + outliers


def drift(values: np.ndarray) -> float | None:
    """The change from the first to the last of some values, in order of time, as a
    fraction of their median, by the Theil–Sen slope; None unless it exceeds 5% and
    Kendall's tau is significant at 5%."""
    blocks = np.array_split(values, min(len(values), _DRIFT_BLOCKS))
    course = np.array([np.median(block) for block in blocks])
    i, j = np.triu_indices(len(course), 1)
    median = np.median(values)
    if not (len(i) and median):
        return None
    slope = np.median((course[j] - course[i]) / (j - i))
    change = slope * (len(course) - 1) / median
    if abs(change) <= _DRIFT_SIZE:
        return None
    from scipy import stats  # half a second to import, which every cell would wait

    tau = stats.kendalltau(np.arange(len(course)), course)
    return change if tau.pvalue < _DRIFT_P else None


def _timed(samples: pd.DataFrame, *keys: str):
    """Measured values without warm-ups in order of time, grouped by some columns."""
    measured = samples[~samples["warmup"].fillna(False)].dropna(subset="value")
    measured = measured.sort_values(["repetition", "order"])
    return measured.groupby(list(keys), dropna=False)["value"]


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
    runs = load("runs", root)
    first, second = (find(run, runs) for run in (run_a, run_b))
    a, b = (_repeats(row, runs) for row in (first, second))
    if set(a) & set(b):  # runs of one setting are compared without their repetitions
        a, b = [first["run_id"]], [second["run_id"]]
    sides = [_by_run(load("samples", root, {"run_id": ids})) for ids in (a, b)]
    pairs = sides[0].merge(sides[1], "outer", MEASUREMENT, suffixes=("_a", "_b"))
    values = pairs.pop("value_a"), pairs.pop("value_b")
    compared = pd.concat(values, axis=1).notna().all(axis=1).sum()
    confidence = 1 - _FALSE_ALARMS / max(compared, 1)
    ratios = []
    for side in zip(*values):
        # the null of a side without the measurement becomes an empty array
        x, y = (np.array(own if isinstance(own, list) else []) for own in side)
        ratios.append(_ratio(x, y, rounds(a, b), confidence))
    names = ["n_a", "n_b", "median_a", "median_b", "ratio", "low", "high", "note"]
    measures = pairs.join(pd.DataFrame(ratios, columns=names))
    if runs.loc[[first.name, second.name], "machine"].nunique() > 1:
        measures[["ratio", "low", "high"]] = np.nan
        measures["note"] = "two machines"
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    settings = plain(pd.DataFrame({"a": first, "b": second})).drop(_RESULTS)
    settings = settings[settings["a"].ne(settings["b"]) & settings.notna().any(axis=1)]
    settings = settings.rename_axis("setting").reset_index()
    return Comparison(settings, measures[~same].reset_index(drop=True), int(same.sum()))


def rounds(a: list[str], b: list[str]) -> int:
    """The number of interleaved rounds of two sets of runs: how often, in the order of
    time, both had been run equally often."""
    order = sorted([*a, *b])  # run ids sort by time
    sides = np.where(np.isin(order, a), 1, -1)
    return int((np.cumsum(sides) == 0).sum())


def _repeats(row: pd.Series, runs: pd.DataFrame) -> list[str]:
    """The run and those with status ok of the same setting, machine and code; a run
    without a setting alone."""
    if pd.isna(row["setting"]):
        return [row["run_id"]]
    ours = plain(runs[_SAME]) == plain(row[_SAME].to_frame().T).iloc[0]
    unknown = runs[_SAME].isna() & row[_SAME].isna()
    alike = (ours | unknown).all(axis=1) & (runs["status"] == "ok")
    return runs.loc[alike | (runs["run_id"] == row["run_id"]), "run_id"].tolist()


def _by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """One value per run: the median over its repetitions of their medians, since calls
    of one sequence are not independent."""
    each = _timed(samples, *MEASUREMENT, "run_id", "repetition").median()
    values = each.groupby([*MEASUREMENT, "run_id"], dropna=False).median()
    return values.groupby(MEASUREMENT, dropna=False).agg(list).reset_index()


def _ratio(a: np.ndarray, b: np.ndarray, interleaved: int, confidence: float) -> tuple:
    """Numbers and medians of one measurement's runs, their ratio with its interval, and
    a note."""
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
