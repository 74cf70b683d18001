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
from dataclasses import replace
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
LEAST_DIFFERENCE = 1.05  # ratio of measured times below which they have no order
SAME_ORDER = 1.01  # the same of predicted times
RESAMPLINGS = 100
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


def _earlier_terms(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns calls and busy (ms) of that formula; null where its chip or format was
    not known."""
    formats = published("weight_streams.csv").set_index("format")["from_generation"]
    formats = formats.drop("lut8")  # which that predictor did not know
    rates = published("chips.csv")
    rates = rates[~rates["condition"].str.startswith("assumed")]
    activations = rates[rates["quantity"] == "activation stream"].set_index("chip")
    peaks = rates[rates["quantity"] == "fp16 convolution"].set_index("chip")["low"]
    rated = chips()[~chips()["assumed"].str.contains("weights")].set_index("chip")
    busy = []
    for row in rows.to_dict("records"):
        if row["format"] not in formats or row["chip"] not in rated.index:
            busy.append(np.nan)
            continue
        chip, chip_generation = row["chip"], generation(row["chip"])
        states_gb_s = activations["low"].get(chip)
        if states_gb_s is None:  # the base chip's of the latest generation that has one
            bases = {1: "M1", 2: "M1", 3: "M1", 4: "M4", 5: "M5", 6: "M5"}
            states_gb_s = activations["low"][bases[chip_generation]]
        gigabytes = row["streamed_gb"]
        if chip_generation < formats[row["format"]]:
            gigabytes *= 16 / stored_bits(row["format"])
        stream = gigabytes / rated["weights_gb_s"][chip]
        stream += 2 * row["cache_mb"] / 1e3 / states_gb_s
        tflops = peaks.get(chip, rated["tflops"][chip])
        flops = 2 * row["weights_g"] * row["T"]
        busy.append(1e3 * max(stream, flops / tflops / 1e3))
    return pd.DataFrame({"calls": rows["calls"], "busy": busy, "ms": rows["ms"]})


def predictors(rows: pd.DataFrame) -> dict:
    """Name → a function of the rows and a group's column that gives cross-validated ms."""

    def without(name):
        names = tuple(other for other in CONSTANT_NAMES if other != name)
        return lambda rows, by: roofline.cross_validated_ms(rows, by, names)

    table = {
        "earlier roofline": earlier_roofline,
        "formula": roofline.cross_validated_ms,
    }
    table |= {f"without {name}": without(name) for name in CONSTANT_NAMES}
    table["cache as stored"] = lambda rows, by: roofline.cross_validated_ms(
        as_stored(rows), by
    )
    return table


# --- tables


def left_out_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """The cross-validated error of every predictor, by what is left out."""
    lines = []
    for name, predictor in predictors(rows).items():
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
    lines = []
    for route in ("Core AI", "private"):
        rows = route_rows(route)
        own_constants = route_constants(route)
        table = rows[["id", "route", "model", "format", "rows", "ms"]]
        table = table.assign(
            by_core_ml=roofline.predict_ms(rows, roofline.calibration().constants),
            by_own=roofline.predict_ms(rows, own_constants),
            as_fp16=roofline.predict_ms(
                rows.assign(streamed_gb=2 * rows["weights_g"], table=0.0), own_constants
            ),
        )
        lines.append(table)
    return pd.concat(lines)


# --- orders


def orders(ms: pd.Series, predicted_ms: pd.Series, names: pd.Series) -> dict:
    """The number of pairs whose measured times differ by more than 5%, the number of those
    that the prediction puts into the same order, and the names of the others."""
    right, wrong = 0, []
    for a, b in combinations(ms.index, 2):
        measured = np.log(ms[a] / ms[b])
        if abs(measured) <= np.log(LEAST_DIFFERENCE):
            continue
        predicted = np.log(predicted_ms[a] / predicted_ms[b])
        if measured * predicted > 0 and abs(predicted) > np.log(SAME_ORDER):
            right += 1
        else:
            wrong.append(f"{names[a]} and {names[b]}")
    return {"right": right, "pairs": right + len(wrong), "wrong": "; ".join(wrong)}


def all_orders() -> pd.DataFrame:
    """The orders of formats, chips and lengths of the cache, and the gains of lut4 over
    lut6.

    In each of these sets of rows one thing varies."""
    points = roofline.points()
    best = roofline.calibration().constants
    # one model in five formats on one chip
    formats = points[
        points["model"].str.startswith("Qwen3-VL-2B") & (points["chip"] == "M4 Max")
    ]
    # "version 1" of a model: the one package that was timed on five chips
    package = points[points["model"].str.contains("version 1")]
    # one model at several lengths of the cache; by Core AI, which has constants of its own
    lengths = points[(points["model"] == "Qwen3-4B") & (points["route"] == "Core AI")]
    lines = []
    for name, rows, constants, by in (
        ("five formats of Qwen3-VL-2B", formats, best, "format"),
        ("one package on five chips", package, best, "chip"),
        ("Qwen3-4B by cache", lengths, route_constants("Core AI"), "context"),
    ):
        ms = roofline.predict_ms(rows, constants)
        lines.append({"orders": name} | orders(rows["ms"], ms, rows[by]))
    times = roofline.predict_ms(formats, best).groupby(formats["format"]).first()
    # one model in two formats on a phone, with the shortest cache, where weights decide
    small = points[points["model"].eq("MiniCPM5-2B") & points["rows"].eq(256)]
    core_ai = roofline.predict_ms(small, route_constants("Core AI"))
    core_ai = core_ai.groupby(small["format"]).first()
    for name, predicted, rows in (
        ("lut6 ÷ lut4, Qwen3-VL-2B, M4 Max", times, formats),
        ("lut6 ÷ lut4, MiniCPM5-2B, A19 Pro", core_ai, small),
    ):
        ms = rows.groupby("format")["ms"].first()
        line = {"orders": name, "published": ms["lut6"] / ms["lut4"]}
        lines.append(line | {"predicted": predicted["lut6"] / predicted["lut4"]})
    return pd.DataFrame(lines)


# --- planted faults


def planted(rows: pd.DataFrame) -> pd.DataFrame:
    """Doubles the times of each source in turn. A line says which source the fit then
    misses most, in the median of its rows, whether that is the doubled source, and
    whether the doubled source lies beyond the interval."""
    logs = np.log(roofline.cross_validated_ms(rows, "source") / rows["ms"])
    interval = np.log(roofline.factor_of(logs))
    lines = []
    for source in rows["source"].unique():
        doubled = rows.copy()
        is_doubled = doubled["source"] == source
        doubled.loc[is_doubled, "ms"] *= 2
        logs = np.log(roofline.cross_validated_ms(doubled, "source") / doubled["ms"])
        medians = logs.groupby(doubled["source"]).median().abs()
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
    plain = roofline.predict_ms(rows, best)
    # the head of every token
    many = roofline.predict_ms(rows.assign(T=row["tokens"], head_g=0.0), best)
    if row["program"] == "dense":
        return float(many.sum() / plain.sum())
    # the shards of attention run for all tokens at once, experts and head for each token
    attention, expert, head = plain
    experts = ATTENTION_SHARDS * expert + head
    verified = ATTENTION_SHARDS * many.iloc[0] + row["tokens"] * experts
    return float(verified / (ATTENTION_SHARDS * attention + experts))


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
    parts = []
    for route, group in rows.groupby("route", sort=False):
        calibration = roofline.calibration()
        if route in ROUTE_CONSTANTS:
            calibration = route_calibration(route)
            # the calibration is of this route: that it is another one is no extrapolation
            group = group.assign(route=ROUTE)
        parts.append(roofline.predict_with_intervals(group, calibration))
    predicted = pd.concat(parts).loc[rows.index]
    ratio = predicted["ms"] / rows["ms"]
    logs = np.log(ratio).dropna().abs()
    inside = rows["ms"].between(predicted["low_ms"], predicted["high_ms"])[logs.index]
    lines = []
    for index, row in rows.iterrows():
        line = {
            "id": row["id"],
            "ms": row["ms"],
            "predicted_ms": predicted["ms"][index],
        }
        line |= {name: predicted[name][index] for name in ("low_ms", "high_ms")}
        lines.append(line | {"extrapolates": predicted["extrapolates"][index]})
    empty = logs.empty
    return {
        "rows": lines,
        "median_error": None if empty else float((ratio - 1).abs().median()),
        "factor_90": None if empty else float(np.exp(logs.quantile(0.9))),
        "covered": None if empty else float(inside.mean()),
    }


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
    chip = run["machine"].split(",")[0].removeprefix("Apple ")
    row = {
        "id": id,
        "source": source,
        "author": source,
        "model": run["checkpoint"],
        "precision": run["compress"],
        "chip_as_published": run["machine"].split(",")[0],
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
    scores = pd.DataFrame(score_points(rows)["rows"])
    fitted_rows = roofline.calibration().rows.set_index("id")
    published_ids = set(published("ane_points.csv")["id"])
    others, macs = [], []
    for row, prediction in zip(rows.to_dict("records"), scores.to_dict("records")):
        predicted_ms = f"{prediction['predicted_ms']:.3g}"
        interval = f"{prediction['low_ms']:.3g} to {prediction['high_ms']:.3g}"
        left_out_ms = fitted_rows["author_ms"].get(row["id"])
        cells = [row["id"], row["model"], row["format"], row["chip"], f"{row['T']:.0f}"]
        cells += [f"{row['ms']:.3g}", predicted_ms, interval]
        cells.append(
            "" if left_out_ms is None or pd.isna(left_out_ms) else f"{left_out_ms:.3g}"
        )
        if row["id"] in published_ids:
            others.append([*cells[:4], row["route"], *cells[4:]])
        else:
            macs.append(cells)
    shared = ["T", "measured ms", "predicted ms", "90% interval", "without its author"]
    names = ["id", "model", "weights", "chip"]
    empty = [[""] * (len(names) + len(shared))]
    return PAGE.format(
        macs=markdown([*names, *shared], macs or empty),
        others=markdown([*names, "route", *shared], others),
    )


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
