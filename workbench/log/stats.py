"""Samples in, robust figures out: a summary of one or more runs, and an honest comparison of two.

Medians and median absolute deviations throughout, since timings have long tails. Nothing here decides what is good; it
says what differs, by how much, and whether the samples can tell.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from workbench.errors import InputError
from workbench.log.store import load
from workbench.log.tables import JSON_COLUMNS

MEASURE = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""What makes two samples repetitions of one measurement, within a run."""

MIN_REPETITIONS = 3
_DRIFT_P, _DRIFT_SIZE, _OUTLIER = 0.05, 0.05, 1.5
_IDENTITY = ["run_id", "time"]


def summary(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per run and measurement of a ``samples`` frame, warm-ups left out.

    Adds to ``run_id`` and the columns of `MEASURE`: ``median`` and ``mad`` in the measurement's unit, ``n``; ``drift``,
    the change from the first to the last sample as a fraction of the median (Theil–Sen slope); ``drifting``, true
    when that exceeds 5% and Kendall's tau is significant at 5% (five samples at least); ``unstable``, true when the
    largest value is more than 1.5 times the mean, pyperf's rule.
    """
    keys = ["run_id", *MEASURE]
    groups = _timed(samples).groupby(keys, dropna=False)["value"].agg(list).reset_index()
    figures = [_describe(np.array(values)) for values in groups.pop("value")]
    return groups.join(pd.DataFrame(figures, columns=list(_describe(np.ones(1)))))


def _timed(samples: pd.DataFrame) -> pd.DataFrame:
    """Measured values in the order they were taken, without warm-ups."""
    return samples[~samples["warmup"].fillna(False)].dropna(subset="value").sort_values(["repetition", "order"])


def _describe(values: np.ndarray) -> dict:
    median = np.median(values)
    order = np.arange(len(values))
    drift, drifting = 0.0, False
    if median and np.ptp(values):
        drift = stats.theilslopes(values, order).slope * order[-1] / median
        drifting = bool(abs(drift) > _DRIFT_SIZE and stats.kendalltau(order, values).pvalue < _DRIFT_P)
    return {
        "median": median,
        "mad": stats.median_abs_deviation(values),
        "n": len(values),
        "drift": drift,
        "drifting": drifting,
        "unstable": bool(values.max() > _OUTLIER * values.mean()),
    }


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    `settings`: ``setting, a, b``, only those that differ. `measures`: the columns of `MEASURE` with ``n_a, n_b``
    repetitions, the medians over them ``median_a, median_b``, ``ratio`` (b over a), its 95% bootstrap interval ``low,
    high``, and ``note`` where there is no interval. `hidden`: how many measurements were left out because their
    interval holds 1.
    """

    settings: pd.DataFrame
    measures: pd.DataFrame
    hidden: int


def compare(run_a: str, run_b: str, root: Path | str | None = None) -> Comparison:
    """Compare two logged runs. Raises InputError when the log lacks one of them."""
    runs = [_settings(run_id, root) for run_id in (run_a, run_b)]
    names = [name for name in dict.fromkeys([*runs[0], *runs[1]]) if runs[0].get(name) != runs[1].get(name)]
    differing = [(name, *(run.get(name) for run in runs)) for name in names]
    settings = pd.DataFrame(differing, columns=["setting", "a", "b"], dtype=object)
    measures = _ratios(load("samples", root, {"run_id": run_a}), load("samples", root, {"run_id": run_b}))
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    return Comparison(settings, measures[~same].reset_index(drop=True), int(same.sum()))


def _settings(run_id: str, root: Path | str | None) -> dict:
    """What a run row says, without what identifies it; JSON columns opened to ``config.depth`` and the like."""
    found = load("runs", root, {"run_id": run_id})
    if found.empty:
        raise InputError("run", run_id, "a run in the log", "list them with `workbench log`")
    row = found.drop(columns=_IDENTITY).iloc[0].dropna().to_dict()
    for name in sorted(JSON_COLUMNS & row.keys()):
        row |= {f"{name}.{key}": value for key, value in json.loads(row.pop(name)).items()}
    return row


def _ratios(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Every measurement that either run has, with the ratio of medians where both have it."""
    pairs = pd.merge(_repetitions(a), _repetitions(b), on=MEASURE, how="outer", suffixes=("_a", "_b"))
    values = zip(pairs.pop("value_a"), pairs.pop("value_b"))
    ratios = [_ratio(*(np.array(v if isinstance(v, list) else []) for v in pair)) for pair in values]
    return pairs.join(pd.DataFrame(ratios, columns=list(_ratio(np.ones(1), np.ones(1)))))


def _repetitions(samples: pd.DataFrame) -> pd.DataFrame:
    """One value per repetition, its median: calls of one sequence are no independent evidence."""
    values = _timed(samples).groupby([*MEASURE, "repetition"], dropna=False)["value"].median()
    return values.groupby(MEASURE, dropna=False).agg(list).reset_index()


def _ratio(a: np.ndarray, b: np.ndarray) -> dict:
    row = {"n_a": len(a), "n_b": len(b), "median_a": np.nan, "median_b": np.nan, "ratio": np.nan}
    row |= {"low": np.nan, "high": np.nan, "note": None}
    row |= {f"median_{name}": np.median(values) for name, values in (("a", a), ("b", b)) if len(values)}
    if not (len(a) and len(b)):
        return row | {"note": "in one run only"}
    if min(a.min(), b.min()) <= 0:
        return row | {"note": "not positive"}
    row["ratio"] = row["median_b"] / row["median_a"]
    if min(len(a), len(b)) < MIN_REPETITIONS:
        return row | {"note": "not enough runs"}
    interval = stats.bootstrap(
        (b, a),
        lambda b, a, axis: np.median(b, axis) / np.median(a, axis),
        paired=False,
        n_resamples=2000,
        method="percentile",  # BCa is undefined where medians of resamples tie, as they do here
        rng=np.random.default_rng(0),
    ).confidence_interval
    return row | {"low": interval.low, "high": interval.high}
