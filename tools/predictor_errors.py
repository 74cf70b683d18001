"""How wrong the predicted times are: the tables that `predictor.py errors` prints.

In this order: predictors that are fitted without some rows, their errors on these rows,
the constants of the formula, rows of routes other than Core ML, whether predictions
have the order of measured times, and whether a planted fault is found."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pandas as pd
from predictor_earlier import earlier_roofline
from predictor_scores import route_constants, route_rows

from workbench.ane import features, formula, roofline
from workbench.ane.formula import CONSTANT_NAMES, Constants

GROUPS = ("source", "author", "chip")
"""Columns whose values are left out of a fit, one at a time."""
LEAST_DIFFERENCE = 1.05  # ratio of measured times below which they have no order
SAME_ORDER = 1.01  # the same of predicted times
RESAMPLINGS = 100  # fits from which the interval of a constant comes
MIN_TERM_SHARE = 0.1  # of a row's predicted time: then the row depends on the constant

# --- predictors


def as_stored(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose attention would read K and V as they are stored."""
    return rows.assign(read_cache_mb=rows["cache_mb"])


Predictor = Callable[[pd.DataFrame, str], pd.Series]
"""(rows, column) → the cross-validated ms of every row, each by a fit without the rows that
share its value of the column."""


def without_constant(name: str) -> Predictor:
    """The formula without the term of a constant."""
    names = tuple(other for other in CONSTANT_NAMES if other != name)

    def predict(rows: pd.DataFrame, by: str) -> pd.Series:
        return formula.cross_validated_ms(rows, by, names)

    return predict


def with_stored_cache(rows: pd.DataFrame, by: str) -> pd.Series:
    """The formula for attention that reads K and V as they are stored."""
    return formula.cross_validated_ms(as_stored(rows), by)


PREDICTORS: dict[str, Predictor] = {
    "earlier roofline": earlier_roofline,
    "formula": formula.cross_validated_ms,
    **{f"without {name}": without_constant(name) for name in CONSTANT_NAMES},
    "cache as stored": with_stored_cache,
}


# --- tables


def left_out_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """The cross-validated error of every predictor, by what is left out."""
    lines = []
    for name, predictor in PREDICTORS.items():
        for by in GROUPS:
            ms = predictor(rows, by)
            summary = {"predictor": name, "left_out": by}
            lines.append(summary | error_summary(ms, rows["ms"]))
    return pd.DataFrame(lines)


def error_summary(ms: pd.Series, published_ms: pd.Series) -> dict:
    """Figures of predictions: their number, the number of rows without one, the median error, the
    factor that 90% of them are within, and the shares within factors of 1.5 and 1.6."""
    logs = np.log(ms / published_ms)
    answers = logs.dropna()
    summary = {"rows": len(answers), "no_answer": int(logs.isna().sum())}
    if answers.empty:
        return summary
    return summary | {
        "median_error": float((np.exp(answers) - 1).abs().median()),
        "factor_90": float(np.exp(answers.abs().quantile(0.9))),
        "within_1.5": float((answers.abs() <= np.log(1.5)).mean()),
        "within_1.6": float((answers.abs() <= np.log(1.6)).mean()),
    }


def measure_coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """For each kind of group that is left out, the factor of the 90% interval, and the
    share of rows inside the interval that the errors of the other groups give."""
    lines = []
    for by in GROUPS:
        logs = np.log(formula.cross_validated_ms(rows, by) / rows["ms"])
        inside = pd.Series(False, rows.index)
        for _, group in rows.groupby(by):
            factor = roofline.conformal_factor(logs.drop(group.index))
            inside[group.index] = logs[group.index].abs() <= np.log(factor)
        lines.append(
            {
                "left_out": by,
                "factor": roofline.conformal_factor(logs),
                "covered": float(inside.mean()),
            }
        )
    return pd.DataFrame(lines)


def constants_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every constant with its interval, from fits to resampled sources, and the rows that
    depend on it: those in which its term is at least `MIN_TERM_SHARE` of the time."""
    generator = np.random.default_rng(0)
    sources = rows["source"].unique()
    fits = []
    for _ in range(RESAMPLINGS):
        sampled_sources = generator.choice(sources, len(sources))
        sample = pd.concat([rows[rows["source"] == name] for name in sampled_sources])
        fits.append(formula.fit(sample.reset_index(drop=True)))
    best = formula.fit(rows)
    terms = formula.terms(rows, best)
    least_ms = MIN_TERM_SHARE * terms.total
    depends_on = {
        "call": terms.call >= least_ms,
        "unpack": (terms.unpack >= terms.stream) & (terms.unpack > 0),
        "attend": terms.cache >= least_ms,
        "recur": terms.state >= least_ms,
    }
    units = {"call": "ms", "unpack": "10⁹ weights/s", "attend": "GB/s", "recur": "GB/s"}
    lines = []
    for name in CONSTANT_NAMES:
        values = [getattr(fit, name) for fit in fits]
        low, high = np.quantile(values, [0.05, 0.95])
        lines.append(
            {
                "constant": name,
                "value": getattr(best, name),
                "unit": units[name],
                "low": float(low),
                "high": float(high),
                "rows": int(depends_on[name].sum()),
                "ids": " ".join(rows["id"][depends_on[name]]),
            }
        )
    return pd.DataFrame(lines)


def rows_beyond_interval(calibration: roofline.Calibration) -> pd.DataFrame:
    """The rows that a fit without their author misses by more than the interval, and
    the reason if it is known."""
    rows = calibration.rows
    ratio = rows["author_ms"] / rows["ms"]
    outside = np.log(ratio).abs() > np.log(calibration.factor)
    columns = ["id", "model", "chip", "format", "ms"]
    table = rows.loc[outside, columns].assign(predicted_over_published=ratio[outside])
    reasons = rows.loc[outside, "outlier"].fillna("unknown")
    return table.assign(reason=reasons)


def predict_check_rows() -> pd.DataFrame:
    """Rows that are never fitted, with their predictions."""
    rows = features.points()
    rows = rows[rows["use"] == "check"]
    table = rows[["id", "model", "chip", "format", "T", "ms"]]
    predicted = roofline.predict_with_intervals(rows, roofline.calibration())
    table = table.assign(predicted_ms=predicted["ms"])
    table["ratio"] = table["predicted_ms"] / table["ms"]
    table["inside"] = table["ms"].between(predicted["low_ms"], predicted["high_ms"])
    return table.assign(why=rows["why"])


def predict_other_routes() -> pd.DataFrame:
    """Rows of other routes, predicted in three ways: by the constants of Core ML, by the
    route's own constants, and by these as if the route unpacked weights to fp16."""
    tables = []
    for route in ("Core AI", "private"):
        rows = route_rows(route)
        # two bytes a weight, and no lookup tables
        rows_in_fp16 = rows.assign(streamed_gb=2 * rows["weights_g"], table_share=0.0)
        own_constants = route_constants(route)
        table = rows[["id", "route", "model", "format", "cache_rows", "ms"]]
        table = table.rename(columns={"cache_rows": "rows"}).assign(
            by_core_ml=formula.predict_ms(rows, roofline.calibration().constants),
            by_own=formula.predict_ms(rows, own_constants),
            as_fp16=formula.predict_ms(rows_in_fp16, own_constants),
        )
        tables.append(table)
    return pd.concat(tables)


# --- orders


def count_pairs_in_order(
    ms: pd.Series, predicted_ms: pd.Series, names: pd.Series
) -> dict:
    """The number of pairs of rows whose measured times differ by more than 5% (`pairs`), the
    number of those that the prediction puts into the same order (`right`), and the names of
    the others (`wrong`)."""
    right, wrong = 0, []
    for a, b in combinations(ms.index, 2):
        measured = np.log(ms[a] / ms[b])
        if abs(measured) <= np.log(LEAST_DIFFERENCE):
            continue
        predicted = np.log(predicted_ms[a] / predicted_ms[b])
        has_same_sign = measured * predicted > 0
        if has_same_sign and abs(predicted) > np.log(SAME_ORDER):
            right += 1
        else:
            wrong.append(f"{names[a]} and {names[b]}")
    return {"right": right, "pairs": right + len(wrong), "wrong": "; ".join(wrong)}


def compare_orders() -> pd.DataFrame:
    """The orders of formats, chips and lengths of the cache, and the gains of lut4 over
    lut6.

    In each of these sets of rows one thing varies."""
    points = features.points()
    core_ml = roofline.calibration().constants
    core_ai = route_constants("Core AI")
    is_qwen_vl = points["model"].str.startswith("Qwen3-VL-2B")
    formats = points[is_qwen_vl & (points["chip"] == "M4 Max")]
    # "version 1" of a model: the one package that was timed on five chips
    package = points[points["model"].str.contains("version 1")]
    lengths = points[(points["model"] == "Qwen3-4B") & (points["route"] == "Core AI")]
    # with the shortest cache, where weights decide
    small = points[points["model"].eq("MiniCPM5-2B") & points["cache_rows"].eq(256)]
    return pd.DataFrame(
        [
            line_of_orders("five formats of Qwen3-VL-2B", formats, core_ml, "format"),
            line_of_orders("one package on five chips", package, core_ml, "chip"),
            line_of_orders("Qwen3-4B by cache", lengths, core_ai, "context"),
            line_of_lut4_gain("lut6 ÷ lut4, Qwen3-VL-2B, M4 Max", formats, core_ml),
            line_of_lut4_gain("lut6 ÷ lut4, MiniCPM5-2B, A19 Pro", small, core_ai),
        ]
    )


def line_of_orders(
    title: str, rows: pd.DataFrame, constants: Constants, by: str
) -> dict:
    """A line of `compare_orders` for rows that differ in the column `by`."""
    ms = formula.predict_ms(rows, constants)
    return {"orders": title} | count_pairs_in_order(rows["ms"], ms, rows[by])


def line_of_lut4_gain(title: str, rows: pd.DataFrame, constants: Constants) -> dict:
    """A line of `compare_orders` with the time in lut6 over that in lut4: the published and the
    predicted one."""
    by_format = rows["format"]
    ms = rows["ms"].groupby(by_format).first()
    predicted_ms = formula.predict_ms(rows, constants).groupby(by_format).first()
    return {
        "orders": title,
        "published": ms["lut6"] / ms["lut4"],
        "predicted": predicted_ms["lut6"] / predicted_ms["lut4"],
    }


# --- planted faults


def double_each_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Doubles the times of each source in turn. A line says which source the fit then
    misses most, in the median of its rows (`worst`), whether that is the doubled source
    (`named`), and whether the doubled source lies beyond the interval (`beyond`)."""
    log_errors = np.log(formula.cross_validated_ms(rows, "source") / rows["ms"])
    interval = np.log(roofline.conformal_factor(log_errors))
    lines = []
    for source in rows["source"].unique():
        doubled = rows.copy()
        is_doubled = doubled["source"] == source
        doubled.loc[is_doubled, "ms"] *= 2
        predicted_ms = formula.cross_validated_ms(doubled, "source")
        log_errors = np.log(predicted_ms / doubled["ms"])
        medians = log_errors.groupby(doubled["source"]).median().abs()
        worst = medians.idxmax()
        lines.append(
            {
                "source": source,
                "rows": int(is_doubled.sum()),
                "worst": worst,
                "factor": float(np.exp(medians[source])),
                "named": worst == source,
                "beyond": bool(medians[source] > interval),
            }
        )
    return pd.DataFrame(lines)
