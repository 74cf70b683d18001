"""Robust figures of samples: a summary of one or more runs, and a comparison of two.

Medians and median absolute deviations throughout, since timings have long tails.
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
"""What makes two samples repetitions of one measurement, within a run."""

MIN_ROUNDS = 3
_DRIFT_P, _DRIFT_SIZE, _OUTLIER, _FALSE_ALARMS = 0.05, 0.05, 1.5, 0.01
_DRIFT_BLOCKS = 500  # medians of as many parts of a long run: Theil and Sen compare all pairs
_INCIDENTAL_CONFIG = ("cell", "measured", "before", "flags", "load_average", "gates", "energy")
_INCIDENTAL_FIGURES = ("swap_bytes", "swap_bytes_before", "footprint_bytes", "ane_joules")
_INCIDENTAL_FIGURES += ("ane_active_ms",)
_INCIDENTAL = {"run_id", "time", "round", *_INCIDENTAL_FIGURES} | {
    f"config.{name}" for name in _INCIDENTAL_CONFIG
}
_FIGURES = ["median", "p90", "mad", "n", "drift", "drifting", "unstable"]
_RATIO = ["n_a", "n_b", "median_a", "median_b", "ratio", "low", "high", "note"]
_SAME = ["setting", "commit", "versions", "platform", "machine", "os_build", "power_source"]
_SAME += ["low_power", "rosetta"]


def summary(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per run and measurement of a ``samples`` frame, warm-ups left out.

    Adds to ``run_id`` and the columns of `MEASUREMENT`: ``median``, ``p90`` (what nine of ten
    samples do not exceed) and ``mad`` in the measurement's unit, ``n``; ``drift``, the change from
    the first to the last sample as a fraction of the median (Theil–Sen slope); ``drifting``, true
    when that exceeds 5% and Kendall's tau is significant at 5% (five samples at least);
    ``unstable``, true when the largest value is more than 1.5 times the mean, pyperf's rule.
    """
    groups = _timed(samples, "run_id", *MEASUREMENT).agg(list).reset_index()
    figures = [_describe(np.array(values)) for values in groups.pop("value")]
    return groups.join(pd.DataFrame(figures, columns=_FIGURES))


def flags(samples: pd.DataFrame) -> list[str]:
    """In words, what makes a run's own samples doubtful: whole calls and rates that drift, or have
    far outliers."""
    rows = summary(samples[samples["phase"].isin(["call", "tokens_per_s"])].assign(run_id="this"))
    drifts = [
        f"{row.phase} drifts by {row.drift:+.0%}" for row in rows.itertuples() if row.drifting
    ]
    return drifts + [f"{row.phase} is unstable" for row in rows.itertuples() if row.unstable]


def _timed(samples: pd.DataFrame, *keys: str):
    """Measured values in the order they were taken, without warm-ups, grouped by some columns."""
    measured = samples[~samples["warmup"].fillna(False)].dropna(subset="value")
    return measured.sort_values(["repetition", "order"]).groupby(list(keys), dropna=False)["value"]


def _describe(values: np.ndarray) -> tuple:
    """`_FIGURES` of the samples of one measurement."""
    from scipy import stats  # half a second to import, which every command would wait

    blocks = np.array_split(values, min(len(values), _DRIFT_BLOCKS))
    course = np.array([np.median(block) for block in blocks])
    median, order, drift, drifting = np.median(values), np.arange(len(course)), 0.0, False
    if median and np.ptp(course):
        drift = stats.theilslopes(course, order).slope * order[-1] / median
        significant = stats.kendalltau(order, course).pvalue < _DRIFT_P
        drifting = bool(abs(drift) > _DRIFT_SIZE and significant)
    unstable = bool(values.max() > _OUTLIER * values.mean())
    p90, mad = np.quantile(values, 0.9), stats.median_abs_deviation(values)
    return median, p90, mad, len(values), drift, drifting, unstable


@dataclass(frozen=True)
class Comparison:
    """Two settings side by side, each with every run that repeats it.

    `settings`: ``setting, a, b``, only those that differ. `measures`: the columns of `MEASUREMENT`
    with ``n_a, n_b`` runs, the medians over them ``median_a, median_b``, ``ratio`` (b over a), its
    interval ``low, high``, and ``note`` where there is no interval. `indistinguishable`: how many
    measurements were left out because their interval holds 1.
    """

    settings: pd.DataFrame
    measures: pd.DataFrame
    indistinguishable: int


def compare(run_a: str, run_b: str, root: Root = None) -> Comparison:
    """Compares what two logged runs stand for: each run with all that repeat its setting on the
    same machine and code.

    A run is one process, and processes differ by more than calls within one do, so runs are the
    evidence: one value each, its median over repetitions. The note is "not enough runs" with fewer
    than three rounds in which both were measured, and where one was measured after the other, since
    a machine that warms up meanwhile would look like a difference.

    Times of two machines are not compared: such measures have both medians, no ratio and the note
    "two machines".

    The interval is Student's for the difference of mean logarithms, at a confidence that makes one
    false alarm in a hundred comparisons, however many measurements a comparison holds (Bonferroni).
    Raises InputError when the log lacks one of the runs.
    """
    runs = with_machines(load("runs", root)).drop(columns="software")
    first, second = (_row(run_id, runs) for run_id in (run_a, run_b))
    a, b = (_repeats(row, runs)["run_id"].tolist() for row in (first, second))
    if set(a) & set(b):  # two runs of one setting: each stands for itself
        a, b = [run_a], [run_b]
    sides = _settings(first), _settings(second)
    pairs = [(name, *(side.get(name) for side in sides)) for name in sides[0] | sides[1]]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    settings = pd.DataFrame(differing, columns=["setting", "a", "b"], dtype=object)
    samples = [load("samples", root, {"run_id": run_ids}) for run_ids in (a, b)]
    measures = _ratios(*samples, rounds(a, b))
    if first["machine"] != second["machine"]:
        measures[["ratio", "low", "high"]] = np.nan
        measures["note"] = "two machines"
    same = (measures["low"] <= 1) & (measures["high"] >= 1)
    return Comparison(settings, measures[~same].reset_index(drop=True), int(same.sum()))


def rounds(a: list[str], b: list[str]) -> int:
    """How many interleaved repetitions two sets of runs hold: how often, in time, both had been run
    equally often."""
    order = sorted([(run, 1) for run in a] + [(run, -1) for run in b])  # run ids sort by time
    return int((np.cumsum([side for _, side in order]) == 0).sum())


def _row(run_id: str, runs: pd.DataFrame) -> pd.Series:
    rows = runs[runs["run_id"] == run_id]
    if rows.empty:
        raise InputError("run", run_id, "a run in the log", "list them with `workbench log`")
    return rows.iloc[0]


def _repeats(row: pd.Series, runs: pd.DataFrame) -> pd.DataFrame:
    """The run and the good ones that repeat it: same setting, machine and code. A run without a
    setting repeats nothing."""
    itself = runs["run_id"] == row["run_id"]
    if pd.isna(row["setting"]):
        return runs[itself]
    alike = runs[(runs["status"] == "ok") | itself]
    for name in _SAME:
        alike = alike[alike[name].isna() if pd.isna(row[name]) else alike[name] == row[name]]
    return alike


def _settings(run: pd.Series) -> dict:
    """What a run row says, without what identifies it; JSON columns opened to ``config.depth`` and
    the like."""
    row = run.dropna().to_dict()
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
    return pairs.join(pd.DataFrame(ratios, columns=_RATIO))


def _by_run(samples: pd.DataFrame) -> pd.DataFrame:
    """One value per run: the median over its repetitions of their medians, since calls of one
    sequence are no evidence."""
    each = _timed(samples, *MEASUREMENT, "run_id", "repetition").median()
    values = each.groupby([*MEASUREMENT, "run_id"], dropna=False).median()
    return values.groupby(MEASUREMENT, dropna=False).agg(list).reset_index()


def _ratio(a: np.ndarray, b: np.ndarray, interleaved: int, confidence: float) -> tuple:
    """`_RATIO` of one measurement."""
    medians = [np.median(values) if len(values) else np.nan for values in (a, b)]
    ratio, low, high, note = np.nan, np.nan, np.nan, None
    if not (len(a) and len(b)):
        note = "on one side only"
    elif min(a.min(), b.min()) <= 0:
        note = "not positive"
    else:
        ratio = medians[1] / medians[0]
        if min(interleaved, len(a), len(b)) < MIN_ROUNDS:
            note = "not enough runs"
        elif not (np.ptp(a) or np.ptp(b)):  # such as counts: no spread, nothing to infer
            low = high = ratio
        else:
            from scipy import stats

            interval = stats.ttest_ind(np.log(b), np.log(a)).confidence_interval(confidence)
            low, high = map(float, np.exp(interval))
    return len(a), len(b), *medians, ratio, low, high, note
