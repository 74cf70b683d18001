"""How wrong the predicted times of the Neural Engine are, and predictions for any table.

    python tools/predictor.py errors [--json]
    python tools/predictor.py score POINTS.csv [--json]
    python tools/predictor.py public

`errors` predicts every public measurement (`data/sources/ane_points.csv`) without the
rows of its source, author or chip, by the formula of `workbench/ane/roofline.py`, by
the formula with each term taken away, and by the predictor that it replaced; then come
orders, planted faults and speculation. `score` predicts a table with the same columns,
whose `ms` may be empty. `public` reads the packed logs of Macs in
`experiments/log/public`, writes their runs to `data/sources/public_points.csv`, which
the fit reads, too, and the page with every measurement beside its prediction. The exit
code is 2 for a table or a log that cannot be read."""

import json as json_module
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from cyclopts import App

from workbench import log
from workbench.ane import roofline, speculation
from workbench.ane.chips import FIGURE_SOURCES, chips, generation, published
from workbench.ane.roofline import CONSTANT_NAMES, ROUTE, Constants
from workbench.ane.work import Work, stored_bits
from workbench.errors import InputError

ROUTE_CONSTANTS = {"Core AI": ("call", "attend")}
"""Routes other than Core ML that are fitted separately, and their own constants."""
GROUPS = ("source", "author", "chip")
"""Columns whose values are left out of a fit, one at a time."""
LEAST_DIFFERENCE = 1.05  # ratio of measured times below which they have no order
SAME_ORDER = 1.01  # the same of predicted times
RESAMPLINGS = 100  # fits from which the interval of a constant comes
ATTENTION_SHARDS = 40
"""Layers of ZAYA1-8B, whose attention and whose experts have a shard each (experiment 32 of
ane-book, the row of `speculation.csv` with experts called for each token)."""
MIN_TERM_SHARE = 0.1  # of a row's predicted time: then the row depends on the constant

app = App(help="How wrong the predicted times are, and predictions for any table.")


# --- predictors


def as_stored(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose attention would read K and V as they are stored."""
    return rows.assign(read_mb=rows["cache_mb"])


def earlier_roofline(rows: pd.DataFrame, by: str) -> pd.Series:
    """The cross-validated ms of the predictor of commit 2e6baa47, null where it has no
    answer. It is kept because tests/tools/test_predictor.py shows that the formula is better:

        dispatches · t_dispatch + max(flops / peak, stream) / share
        stream = weights / weight rate + 2 · states / activation rate

    Its two coefficients minimize the squared relative errors of ane-book's rows of parts
    of a model on the M4 Max, without the rows of the same group."""
    everything = roofline.points()
    is_part = everything["id"].str.startswith("d") & (everything["chip"] == "M4 Max")
    calibration = _earlier_terms(everything[is_part])
    calibration[by] = everything[by]
    terms = _earlier_terms(rows)[["calls", "busy"]]
    result = pd.Series(np.nan, rows.index)
    for value, group in rows.groupby(by, sort=False):
        others = calibration[calibration[by] != value]
        if len(others) > 1:
            scaled = others[["calls", "busy"]].div(others["ms"], axis="index")
            coefficients = np.linalg.lstsq(scaled, np.ones(len(others)), rcond=None)[0]
            result[group.index] = terms.loc[group.index] @ coefficients
    return result


BASE_CHIPS = {1: "M1", 2: "M1", 3: "M1", 4: "M4", 5: "M5", 6: "M5"}
"""Generation → the base chip of the latest generation, up to it, whose rate of activations was
published."""


def _earlier_terms(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns calls and busy (ms) of that formula; null where its chip or format was
    not known."""
    rates = _EarlierRates.read()
    busy = [_earlier_busy_ms(row, rates) for row in rows.to_dict("records")]
    return pd.DataFrame({"calls": rows["calls"], "busy": busy, "ms": rows["ms"]})


@dataclass(frozen=True)
class _EarlierRates:
    """The published figures that the earlier predictor read.

    Args:
        from_generation: format → the first generation that streams it as stored.
        weights_gb_s: chip → GB/s of weights, of the chips on which somebody measured it.
        activations_gb_s: chip → GB/s of activations.
        tflops: chip → teraflops of fp16 convolutions.
    """

    from_generation: pd.Series
    weights_gb_s: pd.Series
    activations_gb_s: pd.Series
    tflops: pd.Series

    @classmethod
    def read(cls) -> "_EarlierRates":
        formats = published("weight_streams.csv").set_index("format")["from_generation"]
        published_rates = published("chips.csv")
        is_assumed = published_rates["condition"].str.startswith("assumed")
        low = published_rates[~is_assumed].set_index(["quantity", "chip"])["low"]
        rated = chips().set_index("chip")
        rated = rated[~rated["assumed"].str.contains("weights")]
        peaks = low["fp16 convolution"].to_dict()
        return cls(
            from_generation=formats.drop("lut8"),  # which that predictor did not know
            weights_gb_s=rated["weights_gb_s"],
            activations_gb_s=low["activation stream"],
            tflops=pd.Series(rated["tflops"].to_dict() | peaks),
        )


def _earlier_busy_ms(row: dict, rates: _EarlierRates) -> float:
    """max(flops / peak, stream) in ms, without the share that is fitted; NaN where the row's
    chip or format was not known."""
    chip, format = row["chip"], row["format"]
    if format not in rates.from_generation or chip not in rates.weights_gb_s:
        return np.nan
    states_gb_s = rates.activations_gb_s.get(chip)
    if states_gb_s is None:
        states_gb_s = rates.activations_gb_s[BASE_CHIPS[generation(chip)]]
    gigabytes = row["streamed_gb"]
    if generation(chip) < rates.from_generation[format]:
        gigabytes *= 16 / stored_bits(format)  # the chip streams fp16
    stream_s = gigabytes / rates.weights_gb_s[chip]
    stream_s += 2 * row["cache_mb"] / 1e3 / states_gb_s
    gigaflops = 2 * row["weights_g"] * row["T"]
    products_s = gigaflops / rates.tflops[chip] / 1e3
    return 1e3 * max(stream_s, products_s)


Predictor = Callable[[pd.DataFrame, str], pd.Series]
"""Gives the cross-validated ms of every row, each by a fit without the rows that share its
value of a column."""


def without_constant(name: str) -> Predictor:
    """The formula without the term of a constant."""
    names = tuple(other for other in CONSTANT_NAMES if other != name)

    def predict(rows: pd.DataFrame, by: str) -> pd.Series:
        return roofline.cross_validated_ms(rows, by, names)

    return predict


def with_stored_cache(rows: pd.DataFrame, by: str) -> pd.Series:
    """The formula for attention that reads K and V as they are stored."""
    return roofline.cross_validated_ms(as_stored(rows), by)


PREDICTORS: dict[str, Predictor] = {
    "earlier roofline": earlier_roofline,
    "formula": roofline.cross_validated_ms,
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


def coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """For each kind of group that is left out, the factor of the 90% interval, and the
    share of rows inside the interval that the errors of the other groups give."""
    lines = []
    for by in GROUPS:
        logs = np.log(roofline.cross_validated_ms(rows, by) / rows["ms"])
        inside = pd.Series(False, rows.index)
        for _, group in rows.groupby(by):
            factor = roofline.factor_of(logs.drop(group.index))
            inside[group.index] = logs[group.index].abs() <= np.log(factor)
        lines.append(
            {
                "left_out": by,
                "factor": roofline.factor_of(logs),
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
        fits.append(roofline.fit(sample.reset_index(drop=True)))
    best = roofline.fit(rows)
    parts = roofline.terms(rows, best)
    ms = roofline.predict_ms(rows, best)
    unpacks = (parts["unpack"] >= parts["stream"]) & (parts["unpack"] > 0)
    depends_on = {
        "call": parts["call"] >= MIN_TERM_SHARE * ms,
        "unpack": unpacks,
        "attend": parts["cache"] >= MIN_TERM_SHARE * ms,
        "recur": parts["state"] >= MIN_TERM_SHARE * ms,
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


def beyond_interval(calibration: roofline.Calibration) -> pd.DataFrame:
    """The rows that a fit without their author misses by more than the interval, and
    the reason if it is known."""
    rows = calibration.rows
    ratio = rows["author_ms"] / rows["ms"]
    outside = np.log(ratio).abs() > np.log(calibration.factor)
    columns = ["id", "model", "chip", "format", "ms"]
    table = rows.loc[outside, columns].assign(predicted_over_published=ratio[outside])
    reasons = rows.loc[outside, "outlier"].fillna("unknown")
    return table.assign(reason=reasons)


def checks() -> pd.DataFrame:
    """Rows that are never fitted, with their predictions."""
    rows = roofline.points()
    rows = rows[rows["use"] == "check"]
    table = rows[["id", "model", "chip", "format", "T", "ms"]]
    predicted = roofline.predict_with_intervals(rows)
    table = table.assign(predicted_ms=predicted["ms"])
    table["ratio"] = table["predicted_ms"] / table["ms"]
    table["inside"] = table["ms"].between(predicted["low_ms"], predicted["high_ms"])
    return table.assign(why=rows["why"])


def route_constants(route: str) -> Constants:
    """The constants of a route: those of Core ML, except for the constants that are
    fitted to its own rows."""
    base = roofline.calibration().constants
    rows = route_rows(route)
    if route not in ROUTE_CONSTANTS or rows.empty:
        return base
    return roofline.fit(rows, ROUTE_CONSTANTS[route], base)


def route_rows(route: str) -> pd.DataFrame:
    """The public rows of a route that have features."""
    rows = roofline.points()
    return rows[(rows["route"] == route) & (rows["use"] == "route")]


def routes() -> pd.DataFrame:
    """Rows of other routes, predicted in three ways: by the constants of Core ML, by the
    route's own constants, and by these as if the route unpacked weights to fp16."""
    tables = []
    for route in ("Core AI", "private"):
        rows = route_rows(route)
        # two bytes a weight, and no lookup tables
        rows_in_fp16 = rows.assign(streamed_gb=2 * rows["weights_g"], table=0.0)
        own_constants = route_constants(route)
        table = rows[["id", "route", "model", "format", "rows", "ms"]]
        table = table.assign(
            by_core_ml=roofline.predict_ms(rows, roofline.calibration().constants),
            by_own=roofline.predict_ms(rows, own_constants),
            as_fp16=roofline.predict_ms(rows_in_fp16, own_constants),
        )
        tables.append(table)
    return pd.concat(tables)


# --- orders


def orders(ms: pd.Series, predicted_ms: pd.Series, names: pd.Series) -> dict:
    """The number of pairs whose measured times differ by more than 5% (`pairs`), the number of
    those that the prediction puts into the same order (`right`), and the names of the others
    (`wrong`)."""
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


def all_orders() -> pd.DataFrame:
    """The orders of formats, chips and lengths of the cache, and the gains of lut4 over
    lut6.

    In each of these sets of rows one thing varies."""
    points = roofline.points()
    core_ml = roofline.calibration().constants
    core_ai = route_constants("Core AI")
    is_qwen_vl = points["model"].str.startswith("Qwen3-VL-2B")
    formats = points[is_qwen_vl & (points["chip"] == "M4 Max")]
    # "version 1" of a model: the one package that was timed on five chips
    package = points[points["model"].str.contains("version 1")]
    lengths = points[(points["model"] == "Qwen3-4B") & (points["route"] == "Core AI")]
    # with the shortest cache, where weights decide
    small = points[points["model"].eq("MiniCPM5-2B") & points["rows"].eq(256)]
    return pd.DataFrame(
        [
            orders_of("five formats of Qwen3-VL-2B", formats, core_ml, "format"),
            orders_of("one package on five chips", package, core_ml, "chip"),
            orders_of("Qwen3-4B by cache", lengths, core_ai, "context"),
            gain_of_lut4("lut6 ÷ lut4, Qwen3-VL-2B, M4 Max", formats, core_ml),
            gain_of_lut4("lut6 ÷ lut4, MiniCPM5-2B, A19 Pro", small, core_ai),
        ]
    )


def orders_of(title: str, rows: pd.DataFrame, constants: Constants, by: str) -> dict:
    """A line of `orders` for rows that differ in the column `by`."""
    ms = roofline.predict_ms(rows, constants)
    return {"orders": title} | orders(rows["ms"], ms, rows[by])


def gain_of_lut4(title: str, rows: pd.DataFrame, constants: Constants) -> dict:
    """A line with the time in lut6 over that in lut4: the published and the predicted one."""
    by_format = rows["format"]
    ms = rows["ms"].groupby(by_format).first()
    predicted_ms = roofline.predict_ms(rows, constants).groupby(by_format).first()
    return {
        "orders": title,
        "published": ms["lut6"] / ms["lut4"],
        "predicted": predicted_ms["lut6"] / predicted_ms["lut4"],
    }


# --- planted faults


def planted(rows: pd.DataFrame) -> pd.DataFrame:
    """Doubles the times of each source in turn. A line says which source the fit then
    misses most, in the median of its rows, whether that is the doubled source, and
    whether the doubled source lies beyond the interval."""
    misfits = np.log(roofline.cross_validated_ms(rows, "source") / rows["ms"])
    interval = np.log(roofline.factor_of(misfits))
    lines = []
    for source in rows["source"].unique():
        doubled = rows.copy()
        is_doubled = doubled["source"] == source
        doubled.loc[is_doubled, "ms"] *= 2
        predicted_ms = roofline.cross_validated_ms(doubled, "source")
        misfits = np.log(predicted_ms / doubled["ms"])
        medians = misfits.groupby(doubled["source"]).median().abs()
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


# --- speculation


def verification_cost(row: dict) -> float:
    """The predicted time of the verification in a line of `speculation.csv`, in units of
    the time of one plain token."""
    points = roofline.points().set_index("id", drop=False)
    rows = points.loc[row["points"].split()]
    best = roofline.calibration().constants
    token_ms = roofline.predict_ms(rows, best)
    # a verification computes the head of every token, which `head_g` would count once
    all_tokens = rows.assign(T=row["tokens"], head_g=0.0)
    verification_ms = roofline.predict_ms(all_tokens, best)
    if row["program"] == "dense":
        return float(verification_ms.sum() / token_ms.sum())
    # the shards of attention run for all tokens at once, experts and head for each token
    attention_ms, expert_ms, head_ms = token_ms
    experts_ms = ATTENTION_SHARDS * expert_ms + head_ms
    plain = ATTENTION_SHARDS * attention_ms + experts_ms
    verified = ATTENTION_SHARDS * verification_ms.iloc[0] + row["tokens"] * experts_ms
    return float(verified / plain)


def speculations() -> pd.DataFrame:
    """Published verifications, acceptances and gains beside the formula's. The cost of a
    program that the formula does not describe is the published one."""
    lines = []
    rows = published("speculation.csv").replace("", np.nan)
    numbers = ["verify_cost", "acceptance", "draft_cost", "gain"]
    rows[numbers] = rows[numbers].astype(float)
    for row in rows.to_dict("records"):
        described = row["program"] in ("dense", "experts called for each token")
        cost = verification_cost(row) if described else row["verify_cost"]
        line = {
            "model": row["model"],
            "chip": row["chip"],
            "program": row["program"],
            "tokens": row["tokens"],
            "published_cost": row["verify_cost"],
            "cost": cost,
            "cost_from": "formula" if described else "published",
        }
        # drafts of a round, cost of a verification, cost of a draft
        costs = row["tokens"] - 1, cost, row["draft_cost"]
        if not np.isnan(row["draft_cost"]):
            line |= {"acceptance": row["acceptance"], "published_gain": row["gain"]}
            if not np.isnan(row["acceptance"]):
                line["gain"] = float(speculation.gain(row["acceptance"], *costs))
            else:
                implied = speculation.implied_acceptance(row["gain"], *costs)
                line["implied_acceptance"] = implied
            line["pays_from"] = speculation.pays_from(*costs)
        lines.append(line)
    return pd.DataFrame(lines)


# --- scores


def read_points(path: Path) -> pd.DataFrame:
    """A table with an id, a chip, `ms` and the features of `roofline.FEATURES`.

    Raises:
        InputError: no file, another kind of file, or missing columns.
    """
    needed = "a CSV file with the columns of data/sources/ane_points.csv"
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as problem:
        actual = " ".join(str(problem).split())
        raise InputError(f"points {path}", actual, needed, "check the path") from None
    if missing := {"id", "ms", *roofline.FEATURES} - set(rows.columns):
        actual = f"no column {', '.join(sorted(missing))}"
        raise InputError(f"points {path}", actual, needed, "add these columns")
    numbers = set(roofline.FEATURES) - set(roofline.TEXT_FEATURES) | {"ms"}
    for name in sorted(numbers):
        values = pd.to_numeric(rows[name], errors="coerce")
        wrong = rows.loc[values.isna() & rows[name].notna(), name]
        if len(wrong):
            actual = f"{wrong.iloc[0]!r} in column {name}"
            raise InputError(
                f"points {path}", actual, "a number or nothing", "correct it"
            )
        rows[name] = values
    return rows


def score_points(rows: pd.DataFrame) -> dict:
    """Predictions of a table: rows with their intervals, the median error, the factor
    that 90% of the errors are within, and the share of times inside their interval."""
    if "route" not in rows:
        rows = rows.assign(route=ROUTE)
    rows = rows.assign(route=rows["route"].fillna(ROUTE))
    predicted = predict_by_route(rows)
    lines = pd.DataFrame(
        {
            "id": rows["id"],
            "ms": rows["ms"],
            "predicted_ms": predicted["ms"],
            "low_ms": predicted["low_ms"],
            "high_ms": predicted["high_ms"],
            "extrapolates": predicted["extrapolates"],
        }
    ).to_dict("records")
    ratio = predicted["ms"] / rows["ms"]
    misfits = np.log(ratio).dropna().abs()
    if misfits.empty:
        figures = {"median_error": None, "factor_90": None, "covered": None}
        return {"rows": lines} | figures
    is_inside = rows["ms"].between(predicted["low_ms"], predicted["high_ms"])
    return {
        "rows": lines,
        "median_error": float((ratio - 1).abs().median()),
        "factor_90": float(np.exp(misfits.quantile(0.9))),
        "covered": float(is_inside[misfits.index].mean()),
    }


def predict_by_route(rows: pd.DataFrame) -> pd.DataFrame:
    """`roofline.predict_with_intervals` of rows, each by the calibration of its route."""
    predictions = []
    for route, group in rows.groupby("route", sort=False):
        calibration = roofline.calibration()
        if route in ROUTE_CONSTANTS:
            calibration = route_calibration(route)
            # the calibration is of this route: that it is another one is no extrapolation
            group = group.assign(route=ROUTE)
        predictions.append(roofline.predict_with_intervals(group, calibration))
    return pd.concat(predictions).loc[rows.index]


def route_calibration(route: str) -> roofline.Calibration:
    """The calibration of a route with constants of its own, cross-validated by source."""
    calibration = roofline.calibration()
    rows = route_rows(route).reset_index(drop=True)
    names = ROUTE_CONSTANTS[route]
    rows["source_ms"] = roofline.cross_validated_ms(
        rows, "source", names, calibration.constants
    )
    rows["author_ms"] = rows["source_ms"]
    factor = roofline.factor_of(np.log(rows["source_ms"] / rows["ms"]))
    factor = max(factor, calibration.factor)
    constants = route_constants(route)
    return replace(calibration, constants=constants, rows=rows, factor=factor)


def without_nan(value):
    """A value without NaN, infinities and NumPy's types, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


# --- packed logs of Macs

PUBLIC = Path(__file__).parents[1] / "experiments" / "log" / "public"
POINTS = FIGURE_SOURCES / "public_points.csv"


def public_rows(folder: Path) -> pd.DataFrame:
    """A row for each setting of the runs on a Neural Engine in the packed logs of a
    folder, with the median of the processes' ms of a call; the columns of POINTS.

    Raises:
        InputError: a file that is no packed log.
    """
    columns = pd.read_csv(POINTS, nrows=0).columns
    lines = []
    for path in sorted(folder.glob("*.zip")):
        with tempfile.TemporaryDirectory() as root:
            log.unpack(path, Path(root))
            runs = log.load("runs", Path(root))
        runs = runs[(runs["runtime"] == "coreml") & (runs["status"] == "ok")]
        runs = runs[runs["compute_units"] == "CPU_AND_NE"].dropna(subset=["call_ms"])
        groups = runs.groupby(["machine", "software", "setting"], dropna=False)
        for number, (_, rows) in enumerate(groups, 1):
            lines.append(public_row(f"{path.stem}-{number}", path.stem, rows))
    return pd.DataFrame(lines, columns=columns)


def public_row(id: str, source: str, runs: pd.DataFrame) -> dict:
    """The point of the runs of one setting on one machine."""
    run = runs.iloc[0]
    published_chip = run["machine"].split(",")[0]
    chip = published_chip.removeprefix("Apple ")
    row = {
        "id": id,
        "source": source,
        "author": source,
        "model": run["checkpoint"],
        "precision": run["compress"],
        "chip_as_published": published_chip,
        "chip": chip,
        "route": ROUTE,
        "unit": "ANE, Core ML CPU_AND_NE",
        "context": run["max_seq_len"],
        "T": int(run["T"]),
        "ms": round(float(runs["call_ms"].median()), 4),
        "repeats": False,
        "note": f"{len(runs)} processes; {run['software']}",
    }
    share = run["ane_ops_share"]
    work = json_module.loads(run["config"] or "{}").get("work")
    if pd.isna(share) or share < 0.5:
        return row | {
            "use": "no",
            "why": "most operations are not on the Neural Engine",
        }
    if work is None:
        return row | {"use": "no", "why": "logged by a version that notes no features"}
    if chip not in set(chips()["chip"]):
        return row | {"use": "no", "why": f"no rate of an {chip}"}
    features = roofline.on_chip(Work.from_json(work), chip)
    row |= {name: features[name] for name in roofline.FEATURES if name != "T"}
    if row["T"] > 1:
        return row | {"use": "check", "why": f"T = {row['T']}"}
    return row | {"use": "fit", "why": None}


def page() -> str:
    """The page of every measurement beside its prediction, as Markdown."""
    rows = roofline.points()
    rows = rows[rows["use"] != "no"].reset_index(drop=True)
    predictions = score_points(rows)["rows"]
    left_out_ms = roofline.calibration().rows.set_index("id")["author_ms"]
    published_ids = set(published("ane_points.csv")["id"])
    others, macs = [], []
    for row, prediction in zip(rows.to_dict("records"), predictions):
        first_cells = [row["id"], row["model"], row["format"], row["chip"]]
        last_cells = [
            f"{row['T']:.0f}",
            f"{row['ms']:.3g}",
            f"{prediction['predicted_ms']:.3g}",
            f"{prediction['low_ms']:.3g} to {prediction['high_ms']:.3g}",
            format_ms(left_out_ms.get(row["id"])),
        ]
        if row["id"] in published_ids:
            others.append([*first_cells, row["route"], *last_cells])
        else:
            macs.append([*first_cells, *last_cells])
    first_names = ["id", "model", "weights", "chip"]
    last_names = ["T", "measured ms", "predicted ms"]
    last_names += ["90% interval", "without its author"]
    empty = [[""] * (len(first_names) + len(last_names))]
    return PAGE.format(
        macs=markdown([*first_names, *last_names], macs or empty),
        others=markdown([*first_names, "route", *last_names], others),
    )


def format_ms(ms: float | None) -> str:
    """Three digits; nothing for a missing time."""
    return "" if ms is None or pd.isna(ms) else f"{ms:.3g}"


def markdown(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PAGE = """# Measurements on Neural Engines beside their predictions

Written by `python tools/predictor.py public`. A prediction is that of
`workbench/ane/roofline.py`; the last column has the one of a fit without the rows of
the same author.

## Measured with this workbench

On a Mac, `workbench sweep first-light` or any grid measures exports, and
`workbench log pack FILE.zip` writes the log as one file without names of user, host and
paths. Put the file into this folder, run the script and open a pull request with the
file, this page and `data/sources/public_points.csv`. Nobody has sent one so far if the
table is empty.

{macs}

## Published by others

{others}
"""


# --- commands


@app.command
def errors(*, json: bool = False) -> None:
    """Prints every table."""
    calibration = roofline.calibration()
    rows = calibration.rows
    doubled_sources = planted(rows)
    tables = {
        "constants": constants_table(rows),
        "left-out errors": left_out_errors(rows),
        "intervals": coverage(rows),
        "beyond the interval": beyond_interval(calibration),
        "checks, never fitted": checks(),
        "other routes": routes(),
        "orders": all_orders(),
        "doubled times": doubled_sources,
        "speculation": speculations(),
    }
    counts = {
        "rows": len(rows),
        "authors": rows["author"].nunique(),
        "sources": rows["source"].nunique(),
        "models": rows["model"].nunique(),
        "chips": rows["chip"].nunique(),
        "doubled_named": int(doubled_sources["named"].sum()),
        "doubled_beyond": int(doubled_sources["beyond"].sum()),
        "factor": calibration.factor,
        "widths": {kind: float(np.exp(w)) for kind, w in calibration.widths.items()},
    }
    if json:
        records = {name: table.to_dict("records") for name, table in tables.items()}
        print(json_module.dumps(without_nan(counts | records), allow_nan=False))
        return
    print(json_module.dumps(counts))
    for name, table in tables.items():
        print(f"\n## {name}")
        print(table.to_string(index=False, float_format="{:.3g}".format, na_rep="-"))


@app.command
def score(points: Path, *, json: bool = False) -> None:
    """Predicts the rows of a table.

    Args:
        points: A CSV file with the columns of data/sources/ane_points.csv.
    """
    scores = score_points(read_points(points))
    if json:
        print(json_module.dumps(without_nan(scores), allow_nan=False))
        return
    table = pd.DataFrame(scores.pop("rows"))
    table["extrapolates"] = table["extrapolates"].map(
        lambda reasons: "; ".join(reasons)
    )
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep="-"))
    print(json_module.dumps(without_nan(scores)))


@app.command
def public() -> None:
    """Reads the packed logs of Macs, and writes their points and the page."""
    write_public(PUBLIC, POINTS)


def write_public(folder: Path, points: Path) -> None:
    """Writes the points of the packed logs in a folder, and the folder's page."""
    rows = public_rows(folder)
    rows.to_csv(points, index=False)
    published.cache_clear()
    roofline.points.cache_clear()
    roofline.calibration.cache_clear()
    (folder / "README.md").write_text(page(), encoding="utf-8")
    print(f"{len(rows)} measurements in {len(list(folder.glob('*.zip')))} packed logs")


def main() -> None:
    try:
        app()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
