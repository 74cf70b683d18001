"""Predictions of any table of points, with intervals, and how well they agree with its
times: what `predictor.py score` prints, and the predictions on the page of
`predictor_public.py`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.ane import features, formula, roofline
from workbench.ane.formula import Constants
from workbench.ane.roofline import ROUTE
from workbench.errors import InputError

ROUTE_CONSTANTS = {"Core AI": ("call", "attend")}
"""Routes other than Core ML that are fitted separately, and their own constants."""


def read_points(path: Path) -> pd.DataFrame:
    """A table with an id, a chip, `ms` and the features of `features.FEATURES`.

    Raises:
        InputError: no file, another kind of file, or missing columns.
    """
    needed = "a CSV file with the columns of data/sources/ane_points.csv"
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as problem:
        actual = " ".join(str(problem).split())
        raise InputError(f"points {path}", actual, needed, "check the path") from None
    if missing := {"id", "ms", *features.FEATURES} - set(rows.columns):
        actual = f"no column {', '.join(sorted(missing))}"
        raise InputError(f"points {path}", actual, needed, "add these columns")
    numbers = set(features.FEATURES) - set(features.TEXT_FEATURES) | {"ms"}
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
    """Predictions of a table of points or of calls: rows with their intervals, the median
    error, the factor that 90% of the errors are within, and the share of times inside
    their interval."""
    rows = features.with_rates(features.read_points(rows))
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
    log_errors = np.log(ratio).dropna().abs()
    if log_errors.empty:
        figures = {"median_error": None, "factor_90": None, "covered": None}
        return {"rows": lines} | figures
    is_inside = rows["ms"].between(predicted["low_ms"], predicted["high_ms"])
    return {
        "rows": lines,
        "median_error": float((ratio - 1).abs().median()),
        "factor_90": float(np.exp(log_errors.quantile(0.9))),
        "covered": float(is_inside[log_errors.index].mean()),
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
    rows["source_ms"] = formula.cross_validated_ms(
        rows, "source", names, calibration.constants
    )
    rows["author_ms"] = rows["source_ms"]
    factor = roofline.conformal_factor(np.log(rows["source_ms"] / rows["ms"]))
    factor = max(factor, calibration.factor)
    constants = route_constants(route)
    return replace(calibration, constants=constants, rows=rows, factor=factor)


def route_constants(route: str) -> Constants:
    """The constants of a route: those of Core ML, except for the constants that are
    fitted to its own rows."""
    base = roofline.calibration().constants
    rows = route_rows(route)
    if route not in ROUTE_CONSTANTS or rows.empty:
        return base
    return formula.fit(rows, ROUTE_CONSTANTS[route], base)


def route_rows(route: str) -> pd.DataFrame:
    """The public rows of a route that have features."""
    rows = features.points()
    return rows[(rows["route"] == route) & (rows["use"] == "route")]
