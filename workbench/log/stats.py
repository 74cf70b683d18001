"""Robust figures of samples: a summary of one or more runs, and a comparison of two.

Medians and median absolute deviations throughout, since timings have long tails.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.errors import InputError
from workbench.log.machine import with_machines
from workbench.log.schema import JSON_COLUMNS, SCHEMAS
from workbench.log.store import load

MEASUREMENT = ["phase", "shard", "depth", "n_prompt", "n_gen", "T", "unit"]
"""What makes two samples repetitions of one measurement, within a run."""

MIN_ROUNDS = 3
_DRIFT_P, _DRIFT_SIZE, _OUTLIER, _FALSE_ALARMS = 0.05, 0.05, 1.5, 0.01
_IDENTITY = ["run_id", "time"]
_INCIDENTAL = {
    "round",
    "config.cell",
    "config.measured",
    "config.before",
    "config.flags",
    "config.load_average",
    "config.gates",
}
_SAME = ["setting", "commit", "versions", "platform", "machine", "os_build", "power_source"]


def summary(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per run and measurement of a ``samples`` frame, warm-ups left out.

    Adds to ``run_id`` and the columns of `MEASUREMENT`: ``median`` and ``mad`` in the measurement's unit, ``n``; ``drift``,
    the change from the first to the last sample as a fraction of the median (Theil–Sen slope); ``drifting``, true
    when that exceeds 5% and Kendall's tau is significant at 5% (five samples at least); ``unstable``, true when the
    largest value is more than 1.5 times the mean, pyperf's rule.
    """
    keys = ["run_id", *MEASUREMENT]
    groups = _timed(samples).groupby(keys, dropna=False)["value"].agg(list).reset_index()
    figures = [_describe(np.array(values)) for values in groups.pop("value")]
    return groups.join(pd.DataFrame(figures, columns=list(_describe(np.ones(1)))))


def flags(samples: pd.DataFrame) -> list[str]:
    """In words, what makes a run's own samples doubtful: whole calls and rates that drift, or have far outliers."""
    rows = summary(samples[samples["phase"].isin(["call", "tokens_per_s"])].assign(run_id="this"))
    drifts = [
        f"{row.phase} drifts by {row.drift:+.0%}" for row in rows.itertuples() if row.drifting
    ]
    return drifts + [f"{row.phase} is unstable" for row in rows.itertuples() if row.unstable]


def _timed(samples: pd.DataFrame) -> pd.DataFrame:
    """Measured values in the order they were taken, without warm-ups."""
    return (
        samples[~samples["warmup"].fillna(False)]
        .dropna(subset="value")
        .sort_values(["repetition", "order"])
    )


def _describe(values: np.ndarray) -> dict:
    from scipy import stats  # half a second to import, which every command would wait

    median = np.median(values)
    order = np.arange(len(values))
    drift, drifting = 0.0, False
    if median and np.ptp(values):
        drift = stats.theilslopes(values, order).slope * order[-1] / median
        drifting = bool(
            abs(drift) > _DRIFT_SIZE and stats.kendalltau(order, values).pvalue < _DRIFT_P
        )
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
    """Two settings side by side, each with every run that repeats it.

    `settings`: ``setting, a, b``, only those that differ. `measures`: the columns of `MEASUREMENT` with ``n_a, n_b`` runs, the
    medians over them ``median_a, median_b``, ``ratio`` (b over a), its interval ``low, high``, and ``note`` where there
    is no interval. `indistinguishable`: how many measurements were left out because their interval holds 1.
    """

    settings: pd.DataFrame
    measures: pd.DataFrame
    indistinguishable: int


def compare(run_a: str, run_b: str, root: Path | str | None = None) -> Comparison:
    """Compares what two logged runs stand for: each run with all that repeat its setting on the same machine and code.

    A run is one process, and processes differ by more than calls within one do, so runs are the evidence: one value
    each, its median over repetitions. The note is "not enough runs" with fewer than three rounds in which both were measured,
    and where one was measured after the other, since a machine that warms up meanwhile would look like a difference.

    Times of two machines are not compared: such measures have both medians, no ratio and the note "two machines".

    The interval is Student's for the difference of mean logarithms, at a confidence that makes one false alarm in a
    hundred comparisons, however many measurements a comparison holds (Bonferroni). Raises InputError when the log lacks
    one of the runs.
    """
    runs = with_machines(load("runs", root)).drop(columns="software")
    a, b = (_repeats(run_id, runs) for run_id in (run_a, run_b))
    if set(a["run_id"]) & set(b["run_id"]):  # two runs of one setting: each stands for itself
        a, b = (runs[runs["run_id"] == run_id] for run_id in (run_a, run_b))
    first, second = (_settings(runs[runs["run_id"] == run_id].iloc[0]) for run_id in (run_a, run_b))
    pairs = [(name, first.get(name), second.get(name)) for name in first | second]
    settings = pd.DataFrame(
        [p for p in pairs if p[1] != p[2]], columns=["setting", "a", "b"], dtype=object
    )
    samples = [load("samples", root, {"run_id": group["run_id"].tolist()}) for group in (a, b)]
    measures = _ratios(*samples, rounds(a["run_id"].tolist(), b["run_id"].tolist()))
    if a["machine"].iloc[0] != b["machine"].iloc[0]:
        measures[["ratio", "low", "high"]] = np.nan
        measures["note"] = "two machines"
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    return Comparison(settings, measures[~same].reset_index(drop=True), int(same.sum()))


def rounds(a: list[str], b: list[str]) -> int:
    """How many interleaved repetitions two sets of runs hold: how often, in time, both had been run equally often."""
    order = sorted(
        [(run_id, 1) for run_id in a] + [(run_id, -1) for run_id in b]
    )  # run ids sort by time
    return int((np.cumsum([side for _, side in order]) == 0).sum())


def _repeats(run_id: str, runs: pd.DataFrame) -> pd.DataFrame:
    """The run and the good ones that repeat it: same setting, machine and code. A run without a setting repeats nothing."""
    row = runs[runs["run_id"] == run_id]
    if row.empty:
        raise InputError("run", run_id, "a run in the log", "list them with `workbench log`")
    if row["setting"].isna().all():
        return row
    alike = runs[(runs["status"] == "ok") | (runs["run_id"] == run_id)]
    for name in _SAME:
        value = row[name].iloc[0]
        alike = alike[alike[name].isna() if pd.isna(value) else alike[name] == value]
    return alike


def _settings(run: pd.Series) -> dict:
    """What a run row says, without what identifies it; JSON columns opened to ``config.depth`` and the like."""
    row = run.drop(_IDENTITY).dropna().to_dict()
    for name in sorted(JSON_COLUMNS & row.keys()):
        row |= {f"{name}.{key}": value for key, value in json.loads(row.pop(name)).items()}
    for name in ("config.export", "config.run"):  # most of it has columns of its own
        items = (row.pop(name, None) or {}).items()
        row |= {f"{name}.{key}": value for key, value in items if key not in SCHEMAS["runs"].names}
    return {name: value for name, value in row.items() if name not in _INCIDENTAL}


def _ratios(a: pd.DataFrame, b: pd.DataFrame, interleaved: int) -> pd.DataFrame:
    """Every measurement that either side has, with the ratio of medians where both have it."""
    pairs = pd.merge(_by_run(a), _by_run(b), on=MEASUREMENT, how="outer", suffixes=("_a", "_b"))
    sides = zip(pairs.pop("value_a"), pairs.pop("value_b"))
    values = [[np.array(v if isinstance(v, list) else []) for v in pair] for pair in sides]
    confidence = 1 - _FALSE_ALARMS / max(sum(len(x) > 0 < len(y) for x, y in values), 1)
    ratios = [_ratio(*pair, interleaved, confidence) for pair in values]
    return pairs.join(pd.DataFrame(ratios, columns=list(_ratio(np.ones(1), np.ones(1), 0, 0.9))))


def _by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """One value per run: the median over its repetitions of their medians, since calls of one sequence are no evidence."""
    each = (
        _timed(samples)
        .groupby([*MEASUREMENT, "run_id", "repetition"], dropna=False)["value"]
        .median()
    )
    values = each.groupby([*MEASUREMENT, "run_id"], dropna=False).median()
    return values.groupby(MEASUREMENT, dropna=False).agg(list).reset_index()


def _ratio(a: np.ndarray, b: np.ndarray, interleaved: int, confidence: float) -> dict:
    median_a, median_b = (np.median(values) if len(values) else np.nan for values in (a, b))
    row = {
        "n_a": len(a),
        "n_b": len(b),
        "median_a": median_a,
        "median_b": median_b,
        "ratio": np.nan,
        "low": np.nan,
        "high": np.nan,
        "note": None,
    }
    if not (len(a) and len(b)):
        return row | {"note": "on one side only"}
    if min(a.min(), b.min()) <= 0:
        return row | {"note": "not positive"}
    row["ratio"] = ratio = median_b / median_a
    if min(interleaved, len(a), len(b)) < MIN_ROUNDS:
        return row | {"note": "not enough runs"}
    if not (np.ptp(a) or np.ptp(b)):  # such as counts: no spread, nothing to infer
        return row | {"low": ratio, "high": ratio}
    from scipy import stats

    interval = stats.ttest_ind(np.log(b), np.log(a)).confidence_interval(confidence)
    return row | {"low": float(np.exp(interval.low)), "high": float(np.exp(interval.high))}
