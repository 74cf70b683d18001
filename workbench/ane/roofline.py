"""Predicts the milliseconds of one call on a Neural Engine, and says how wrong the
prediction may be.

`features` says what a call reads and computes, `formula` turns that into milliseconds
with four constants, and this file fits the constants to public measurements
(`data/sources/ane_points.csv`, the rows whose `use` is "fit") and gives every prediction
an interval. The result does not depend on this machine.

Intervals come from cross-validation: a row is predicted by a fit that leaves out its
source, and by another that leaves out its author. The interval contains 90% of the rows
so predicted. A call that resembles no row has a wider one, by the errors of rows that
were predicted without the rows that resemble them in the same way (`Calibration`)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pandas as pd

from workbench.ane.chips import chips
from workbench.ane.features import (
    FEATURES,
    calls_table,
    describe_streams,
    on_chip,
    points,
)
from workbench.ane.formula import Constants, cross_validated_ms, fit, predict_ms, terms
from workbench.ane.work import Work

ROUTE = "Core ML"
"""The way to the Neural Engine whose rows are fitted; other ways have other costs."""
INTERVAL_LEVEL = 0.9
"""An interval should contain this share of the measurements."""


def conformal_factor(log_errors: pd.Series, level: float = INTERVAL_LEVEL) -> float:
    """The factor f for which [predicted ÷ f, predicted · f] contains a further
    measurement with the probability `level`: the quantile of the absolute errors of
    split-conformal prediction, with its correction (n + 1) ÷ n for the further one.

    Args:
        log_errors: the logarithms of predicted ÷ published of n rows.
    """
    sizes = log_errors.abs().dropna()
    share = min(1.0, level * (len(sizes) + 1) / len(sizes))
    return float(np.exp(sizes.quantile(share)))


@dataclass(frozen=True)
class Calibration:
    """The fit to all rows, and its errors on rows that are left out.

    Args:
        rows: the fitted rows; `source_ms` and `author_ms` are predicted without the
            rows of the same source or author.
        factor: the 90% interval of a call that resembles the fitted rows reaches from
            its ms ÷ factor to its ms · factor.
        extra_log_widths: for a call that does not, the kind of difference (a key of
            `extrapolations`) → the logarithm of the factor of the errors that such a
            difference adds.
    """

    constants: Constants
    rows: pd.DataFrame
    factor: float
    extra_log_widths: dict[str, float] = field(default_factory=dict)

    @property
    def median_error(self) -> float:
        """The median error of rows that are predicted without the rows of their author."""
        return float((self.rows["author_ms"] / self.rows["ms"] - 1).abs().median())


def fitted_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are fitted."""
    return rows[rows["use"] == "fit"].reset_index(drop=True)


@cache
def calibration() -> Calibration:
    """The calibration on the published rows."""
    return calibrate(points())


def calibrate(rows: pd.DataFrame) -> Calibration:
    """The calibration on the rows of a table whose `use` is "fit".

    The interval is the wider one of those by source and by author. The extra widths are
    measured, too: by format and by model from fits without the rows of the same one; by
    context from fits without the shortest or the longest caches; by chip from the rows
    that check chips without a fitted row."""
    fitted = fitted_rows(rows)
    constants = fit(fitted)
    log_errors = {}  # column → log(predicted ÷ published), by fits without the same value
    for by in ("source", "author", "format", "cache_rows", "model"):
        predicted_ms = cross_validated_ms(fitted, by)
        log_errors[by] = np.log(predicted_ms / fitted["ms"])
        if by in ("source", "author"):
            fitted[f"{by}_ms"] = predicted_ms
    cache_rows = fitted["cache_rows"]
    is_end = cache_rows.isin([cache_rows.min(), cache_rows.max()])
    extra_log_widths = {
        "chip": _chip_log_width(rows, fitted, constants),
        "format": np.log(conformal_factor(log_errors["format"])),
        "context": np.log(conformal_factor(log_errors["cache_rows"][is_end])),
        "program": np.log(conformal_factor(log_errors["model"])),
    }
    factor = max(conformal_factor(log_errors[by]) for by in ("source", "author"))
    return Calibration(constants, fitted, factor, extra_log_widths)


def _chip_log_width(
    rows: pd.DataFrame, fitted: pd.DataFrame, constants: Constants
) -> float:
    """The largest log error of the rows that check whole models, at one token a call, on
    chips without a fitted row."""
    is_check = (rows["use"] == "check") & (rows["T"] == 1)
    checks = rows[is_check & ~rows["chip"].isin(fitted["chip"])]
    checks = checks[pd.to_numeric(checks["layers"]) > 0]
    log_errors = np.log(predict_ms(checks, constants) / checks["ms"])
    return float(log_errors.abs().max())


def extrapolations(call: Mapping, calibration: Calibration) -> dict[str, str]:
    """The differences of a call from every fitted row: chip, format, context, attention or
    program → the difference in words. Each kind but attention has a width in
    `Calibration.extra_log_widths`.

    Args:
        call: a row of a table of calls with rates.
    """
    fitted, reasons = calibration.rows, {}
    chip = call["chip"]
    if chip not in set(fitted["chip"]):
        rate = "" if call["measured_rate"] else ", and its rate of weights is assumed"
        reasons["chip"] = f"no decode row on {chip}{rate}"
    if call["format"] not in set(fitted["format"]):
        reasons["format"] = f"no decode row with {call['format']} weights"
    least, most = fitted["cache_rows"].min(), fitted["cache_rows"].max()
    if call["cache_mb"] and not least <= call["cache_rows"] <= most:
        reasons["context"] = (
            f"a cache of {call['cache_rows']:.0f} rows; rows have {least:.0f} to "
            f"{most:.0f}"
        )
    is_grouped = call["repeated_cache_mb"] > call["cache_mb"]
    if is_grouped and not call["repeats_kv"] and fitted["repeats_kv"].all():
        reasons["attention"] = (
            "attention that repeats no K and V, which no row measures: the interval "
            "reaches from K and V as stored to K and V for each query head"
        )
    if differences := _program_differences(call, calibration):
        differences = "; ".join(differences)
        reasons["program"] = f"no decode row like its program: {differences}"
    return reasons


def _program_differences(call: Mapping, calibration: Calibration) -> list[str]:
    """The properties of a call's program that no fitted row has, in words: its states,
    its number of calls, its slowest term, its route."""
    differences, states_mb = [], calibration.rows["recurrent_mb"].max()
    # by more than a rounding error
    if call["recurrent_mb"] > states_mb * (1 + 1e-6):
        differences.append(
            f"{call['recurrent_mb']:.1f} MB of recurrent states; rows have "
            f"{states_mb:.1f}"
        )
    most_calls = calibration.rows["calls"].max()
    if call["calls"] > most_calls:
        differences.append(
            f"{call['calls']:.0f} calls; rows have at most {most_calls:.0f}"
        )
    ms = terms(call, calibration.constants)
    if ms.products > max(ms.stream, ms.unpack):
        differences.append(f"products decide at T = {call['T']:.0f}")
    if call.get("route", ROUTE) != ROUTE:
        differences.append(f"not a program of {ROUTE}")
    return differences


def predict_with_intervals(
    calls: pd.DataFrame, calibration: Calibration
) -> pd.DataFrame:
    """The prediction of every call, with its 90% interval.

    In all public rows so far, attention products read K and V that are repeated for each
    query head. In an export they may read K and V as stored: then the lower end of the
    interval is of K and V as stored, and the upper end of repeated ones.

    Args:
        calls: a table of calls with rates (see `features`). The column `route` says by
            which way they reached the Neural Engine; default: `ROUTE`.

    Returns:
        ms, low_ms, high_ms (null where a feature is); extrapolates: `extrapolations`.
    """
    predictions = [
        _predict_with_interval(call.to_dict(), calibration)
        for _, call in calls.iterrows()
    ]
    return pd.DataFrame(predictions, calls.index)


def _predict_with_interval(call: dict, calibration: Calibration) -> dict:
    """The row of `predict_with_intervals` for one call."""
    if pd.isna([call[name] for name in FEATURES.values()]).any():
        missing = {"program": "features are missing"}
        return {
            "ms": np.nan,
            "low_ms": np.nan,
            "high_ms": np.nan,
            "extrapolates": missing,
        }
    reasons = extrapolations(call, calibration)
    # Log errors of independent causes: their squares add up. "attention" has no width; it
    # moves the upper end alone (below).
    squares = [np.log(calibration.factor) ** 2]
    squares += [calibration.extra_log_widths.get(kind, 0.0) ** 2 for kind in reasons]
    factor = np.exp(np.sqrt(sum(squares)))
    ms = highest_ms = float(predict_ms(call, calibration.constants))
    if "attention" in reasons:
        repeating = call | {"read_cache_mb": call["repeated_cache_mb"]}
        highest_ms = float(predict_ms(repeating, calibration.constants))
    return {
        "ms": ms,
        "low_ms": ms / factor,
        "high_ms": highest_ms * factor,
        "extrapolates": reasons,
    }


def published_predictions() -> pd.DataFrame:
    """Every public measurement that can be used, beside its prediction: that of a fitted
    row by a fit without the rows of its author, that of another row by the fit to all.

    Returns:
        id, source, author, model, format, chip, route, T, ms, predicted_ms, low_ms,
        high_ms, page (a short name of the source), fitted (whether it is a fitted row).
    """
    rows = points()
    rows = rows[rows["use"] != "no"].reset_index(drop=True)
    predictions = predict_with_intervals(rows, calibration())
    fitted = calibration().rows.set_index("id")
    left_out_ms = rows["id"].map(fitted["author_ms"])
    # Both ends move by the same factor as the prediction, so that the ratio of the ends
    # stays.
    shift = (left_out_ms / predictions["ms"]).fillna(1.0)
    table = rows[["id", "source", "author", "model", "format", "chip", "route", "T"]]
    table = table.assign(ms=rows["ms"], predicted_ms=predictions["ms"] * shift)
    ends = {name: predictions[name] * shift for name in ("low_ms", "high_ms")}
    return table.assign(
        **ends, page=table["source"].map(_page), fitted=rows["use"] == "fit"
    )


def _page(source: str) -> str:
    """The repository and the file of a source, without owner, commit and folders."""
    text = re.sub(r"@\w+| \(\w{7}\)", "", source)
    repository, _, path = text.partition(" ")
    if "/" not in repository:
        return text
    parts = path.split("/")
    if parts[-1] == "README.md" and len(parts) > 1:
        parts.pop()  # the folder says more
    name = re.sub(r"\.\w+$", "", parts[-1])
    return f"{repository.partition('/')[2]} {name}"


# --- exports


def by_chip(work: Work, names: Iterable[str] | None = None) -> pd.DataFrame:
    """The prediction of one call on every chip (or on those that are named), without
    host time.

    Returns:
        chip, ms, low_ms, high_ms, tokens_per_s (at one token a call), weights (the
        format stored and streamed), streamed_mib (per call), assumed (figures that
        nobody measured on the chip), extrapolates (the reasons why no public row is
        like this export, by kind).
    """
    selected = chips() if names is None else chips()[chips()["chip"].isin(list(names))]
    calls = calls_table([on_chip(work, chip) for chip in selected["chip"]])
    predictions = predict_with_intervals(calls, calibration())
    table = pd.concat([calls[["chip"]], predictions], axis="columns")
    table = table.assign(
        tokens_per_s=1e3 / table["ms"],
        weights=[describe_streams(work, chip) for chip in selected["chip"]],
        streamed_mib=calls["streamed_gb"] * 1e9 / 2**20,
        assumed=selected["assumed"].tolist(),
    )
    columns = (
        "chip ms low_ms high_ms tokens_per_s extrapolates weights streamed_mib assumed"
    )
    return table[columns.split()]


def describe_extrapolations(speeds: pd.DataFrame) -> list[str]:
    """The reasons why predictions extrapolate, a line for each, with the chips that it
    holds for (see `by_chip`)."""
    chips_of: dict[str, list[str]] = {}  # reason → chips
    for row in speeds.itertuples():
        for kind, reason in row.extrapolates.items():
            # one line for all chips without a row
            text = "no decode row on the chip" if kind == "chip" else reason
            chips_of.setdefault(text, []).append(row.chip)
    lines = []
    for text, names in chips_of.items():
        where = "" if len(names) == len(speeds) > 1 else f"{', '.join(names)}: "
        lines.append(f"extrapolated: {where}{text}")
    return lines


ASSUMED_RATES = {
    "tflops": "the rate of fp16 convolutions",
    "weights_gb_s": "the rate at which weights are read",
}
"""A figure of a chip (see `chips.chips`) → in words."""


def describe_assumed_rates(speeds: pd.DataFrame) -> list[str]:
    """The figures of chips that are assumed, a line for each, with their chips (see
    `by_chip`)."""
    lines = []
    for name, words in ASSUMED_RATES.items():
        chips = speeds.loc[speeds["assumed"].str.contains(name), "chip"]
        if len(chips):
            lines.append(f"assumed: {', '.join(chips)}: {words}")
    return lines


def describe_fit() -> str:
    """Sentences on the assumptions of the predictions, and their distance from public
    measurements."""
    median_error, factor = calibration().median_error, calibration().factor
    rows = calibration().rows
    return (
        "ms and tok/s by chip assume that every operation runs on the Neural Engine, "
        f"whatever the placement says. {len(rows)} public measurements, of "
        f"{rows['author'].nunique()} authors on {rows['chip'].nunique()} chips, were "
        "each predicted without the rows of their author: the prediction is off by "
        f"{median_error:.0%} in the median. low_ms to high_ms is meant to contain "
        f"{INTERVAL_LEVEL:.0%}: a factor of {factor:.2f} both ways, more where no "
        "measurement is like the export, and up to K and V read for each query head, as "
        "the measured programs read them."
    )
