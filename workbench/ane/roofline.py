"""Predicts the milliseconds of one call on a Neural Engine, and says how wrong the
prediction may be.

    ms = calls · call + max(stream, products) + cache + state

    stream    streamed bytes ÷ the chip's published rate; weights in lookup tables take
              at least their number ÷ unpack; formats that the chip unpacks when it
              loads them count as fp16
    products  2 · multiply-adds ÷ half the chip's published peak
    cache     bytes of K and V that the attention products read ÷ attend
    state     bytes of recurrent states ÷ recur

The four constants call, unpack, attend and recur are fitted to public measurements of
decoding (`data/sources/ane_points.csv`, the rows whose `use` is "fit"). Each row's own
prediction, and with them the width of every interval, comes from a fit without the rows
of its source or of its author. The result does not depend on this machine.

A row of measurements, or of predictions, has the columns `FEATURES`: chip; T; format
(that of most weights); table (whether weights are in lookup tables); calls in sequence;
weights_g and head_g (10⁹ weights, of the head alone); streamed_gb; rows of the cache;
cache_mb (K and V as stored), spread_mb (the same repeated for each query head, which
grouped-query attention shares between several); recurrent_mb.
Published exporters repeat K and V for each query head, so that their attention products
read spread_mb; where a column `repeats` is False, they read cache_mb. Bytes are decimal.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pandas as pd

from workbench.ane.chips import chips, generation, published
from workbench.ane.work import Work, stored_bits

ROUTE = "Core ML"
"""The way to the Neural Engine whose rows are fitted; other ways have other costs."""
REACHED_SHARE = 0.5
"""The share of the published peak that products reach (two rows: M1 Max at T = 64, M5 Pro
at T = 128)."""
LEVEL = 0.9
"""An interval should contain this share of the measurements."""
MISFIT_SCALE = 0.15
"""The log error beyond which a misfit counts linearly, not squared. The same package was
published with times that differ by 2 to 26%."""
FEATURES = """chip T format table calls weights_g head_g streamed_gb rows cache_mb
spread_mb recurrent_mb""".split()
TEXT_FEATURES = ("chip", "format", "table")
"""Features that are no numbers."""
LEAST_SHARE = 0.05
"""The share of an export's weights from which on a compressed format is one of its
formats. Public rows with an fp16 head beside lookup tables count as tables."""


@dataclass(frozen=True)
class Constants:
    """The fitted constants of the formula. Each default leaves its term out.

    Args:
        call: ms of a call.
        unpack: 10⁹ weights a second from lookup tables.
        attend: GB/s of K and V.
        recur: GB/s of recurrent states.
    """

    call: float = 0.0
    unpack: float = np.inf
    attend: float = np.inf
    recur: float = np.inf


# `chips.csv` has 0.5 to 2.3 ms for a call and 22 GB/s of activations on an M4 Max; the
# other two are orders of magnitude
PRIORS = Constants(call=1.0, unpack=100.0, attend=22.0, recur=5.0)
"""Medians of the constants before any row is seen."""
PRIOR_WIDTH = 3.0
"""The standard deviation of their logarithms. It is wide enough that a prior decides only
where no row has the term."""
CONSTANT_NAMES = ("call", "unpack", "attend", "recur")


@cache
def points() -> pd.DataFrame:
    """All public measurements with their features; `ms` of one call. Those that others
    published come first, then those that packed logs of Macs brought."""
    rows = published("ane_points.csv").assign(repeats=True)
    logged = published("public_points.csv")
    if len(logged):
        rows = pd.concat([rows, logged], ignore_index=True)
    rows["repeats"] = rows["repeats"].astype(str) == "True"
    return with_rates(rows.replace("", np.nan))


def with_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Converts the features to numbers, `table` to the share of the weights that are in
    lookup tables.

    Adds the rates of the rows' chips, weights_gb_s and tflops; measured_rate, whether
    somebody measured the rate of weights; and read_mb, the MB that attention products
    read. Chips without a rate get the rate of the first chip of their generation, or of
    the latest chip."""
    rated = chips().set_index("chip")
    rated["measured_rate"] = ~rated["assumed"].str.contains("weights_gb_s")
    names = rows["chip"].map(lambda name: _nearest_chip(str(name), rated.index))
    rates = rated.loc[names, ["weights_gb_s", "tflops", "measured_rate"]]
    rates = rates.set_axis(rows.index)
    rates["measured_rate"] &= names == rows["chip"]
    rows = rows.copy()
    for name in (*FEATURES, "ms"):
        if name in rows and name not in TEXT_FEATURES:
            rows[name] = pd.to_numeric(rows[name])
    rows["table"] = rows["table"].map(_table_share)
    repeats = rows["repeats"] if "repeats" in rows else pd.Series(True, rows.index)
    read_mb = rows["spread_mb"].where(repeats, rows["cache_mb"])
    return rows.assign(**rates, repeats=repeats, read_mb=read_mb)


def _nearest_chip(chip: str, rated: Iterable[str]) -> str:
    """The chip itself if it has a rate, otherwise the first chip of its generation,
    otherwise the latest of the M series."""
    if chip in rated:
        return chip
    of_generation = [name for name in rated if name.split()[0] == chip.split()[0]]
    return of_generation[0] if of_generation else max(rated)


def terms(rows: Mapping, constants: Constants) -> dict[str, np.ndarray]:
    """The ms of every term of the formula, for columns of `FEATURES` and rates, and
    `read_mb`, the MB of K and V that the attention products read. `table` is the share of
    the weights that are in lookup tables."""
    unpack_s = rows["table"] * rows["weights_g"] / constants.unpack
    body_g = rows["weights_g"] - rows["head_g"]
    products_g = body_g * rows["T"] + rows["head_g"]  # the head of one token
    return {
        "call": constants.call * rows["calls"],
        "stream": 1e3 * rows["streamed_gb"] / rows["weights_gb_s"],
        "unpack": 1e3 * unpack_s,
        # two operations a multiply-add; 10⁹ operations over 10¹² a second are ms
        "products": 2 * products_g / (REACHED_SHARE * rows["tflops"]),
        # MB over GB/s are ms
        "cache": rows["read_mb"] / constants.attend,
        "state": rows["recurrent_mb"] / constants.recur,
    }


def predict_ms(rows: Mapping, constants: Constants) -> np.ndarray | pd.Series | float:
    """The predicted ms of one call for each row of `with_rates` (see `terms`), or for one
    row."""
    ms = terms(rows, constants)
    weights = np.maximum(np.maximum(ms["stream"], ms["unpack"]), ms["products"])
    return ms["call"] + weights + ms["cache"] + ms["state"]


def fit(
    rows: pd.DataFrame,
    names: tuple[str, ...] = CONSTANT_NAMES,
    base: Constants = Constants(),
) -> Constants:
    """The constants `names` by robust least squares of log(predicted ÷ published); the
    others are those of `base`. The logarithm of a constant has the prior `PRIORS` with
    the width `PRIOR_WIDTH`.

    Args:
        rows: of `with_rates`, with their author and ms.
    """
    from scipy.optimize import least_squares

    medians = np.log([getattr(PRIORS, name) for name in names])
    columns = [name for name in FEATURES if name not in ("chip", "format")]
    columns += ["weights_gb_s", "tflops", "read_mb"]
    arrays = {name: rows[name].to_numpy() for name in columns}
    published_log = np.log(rows["ms"].to_numpy())
    # squared residuals count n^-1/2, so that the n rows of an author count as √n rows
    weight = rows.groupby("author")["ms"].transform("size").to_numpy() ** -0.25

    def residuals(logs: np.ndarray) -> np.ndarray:
        """The residuals of the rows, then those of the priors."""
        constants = replace(base, **dict(zip(names, np.exp(logs))))
        misfit = (np.log(predict_ms(arrays, constants)) - published_log) / MISFIT_SCALE
        # Half of its square is the pseudo-Huber loss √(1 + m²) − 1: a square near 0, a
        # line far from it (Charbonnier et al., 1997).
        robust = np.sign(misfit) * np.sqrt(2 * (np.sqrt(1 + misfit**2) - 1))
        return np.concatenate([weight * robust, (logs - medians) / PRIOR_WIDTH])

    solution = least_squares(residuals, medians)
    return replace(base, **dict(zip(names, np.exp(solution.x).tolist())))


def _table_share(value: bool | float | str) -> float:
    """The share of weights in lookup tables, from a cell of the column `table`. Published
    rows have all or none in tables: True, False, or these words in a CSV file."""
    shares = {"True": 1.0, "False": 0.0}
    return shares[str(value)] if str(value) in shares else float(value)


def cross_validated_ms(
    rows: pd.DataFrame, by: str, names=CONSTANT_NAMES, base: Constants = Constants()
) -> pd.Series:
    """The ms of every row, predicted by a fit without the rows that share its value of
    the column `by`."""
    result = pd.Series(np.nan, rows.index)
    for _, group in rows.groupby(by, sort=False):
        others = rows.drop(group.index)
        if len(others):
            result[group.index] = predict_ms(group, fit(others, names, base))
    return result


def factor_of(misfits: pd.Series, level: float = LEVEL) -> float:
    """The factor f for which [predicted ÷ f, predicted · f] contains the share `level` of
    the rows and of one more row, from the logarithms of predicted ÷ published."""
    sizes = misfits.abs().dropna()
    share = min(1.0, level * (len(sizes) + 1) / len(sizes))
    return float(np.exp(sizes.quantile(share)))


@dataclass(frozen=True)
class Calibration:
    """The fit to all rows, and its errors on rows that are left out.

    Args:
        rows: the fitted rows; `source_ms` and `author_ms` are predicted without the
            rows of the same source or author.
        factor: of the 90% interval of a prediction within the range of the fitted rows.
        widths: reason → logarithm of the further factor of a prediction beyond it.
    """

    constants: Constants
    rows: pd.DataFrame
    factor: float
    widths: dict[str, float] = field(default_factory=dict)

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


def calibrate(everything: pd.DataFrame) -> Calibration:
    """The calibration on the rows of a table whose `use` is "fit".

    The interval is the wider one of those by source and by author. Its further widths
    are measured, too: by format and by model from fits without the rows of the same one;
    by context from fits without the shortest or the longest caches; by chip from the
    rows that check chips without a fitted row."""
    fitted = fitted_rows(everything)
    constants = fit(fitted)
    misfits = {}  # column → log(predicted ÷ published) without the rows of the same value
    for by in ("source", "author", "format", "rows", "model"):
        fitted[f"{by}_ms"] = cross_validated_ms(fitted, by)
        misfits[by] = np.log(fitted[f"{by}_ms"] / fitted["ms"])
    cache_rows = fitted["rows"]
    is_end = cache_rows.isin([cache_rows.min(), cache_rows.max()])
    widths = {
        "chip": _chip_width(everything, fitted, constants),
        "format": np.log(factor_of(misfits["format"])),
        "context": np.log(factor_of(misfits["rows"][is_end])),
        "program": np.log(factor_of(misfits["model"])),
    }
    factor = max(factor_of(misfits["source"]), factor_of(misfits["author"]))
    return Calibration(constants, fitted, factor, widths)


def _chip_width(
    everything: pd.DataFrame, fitted: pd.DataFrame, constants: Constants
) -> float:
    """The largest log error of the rows that check whole models, at one token a call, on
    chips without a fitted row."""
    is_check = (everything["use"] == "check") & (everything["T"] == 1)
    checks = everything[is_check & ~everything["chip"].isin(fitted["chip"])]
    checks = checks[pd.to_numeric(checks["layers"]) > 0]
    misfits = np.log(predict_ms(checks, constants) / checks["ms"])
    return float(misfits.abs().max())


def extrapolations(row: Mapping, model: Calibration) -> dict[str, str]:
    """The reasons why no fitted row is like this one: chip, format, context, attention or
    program → the reason in words."""
    fitted, reasons = model.rows, {}
    chip = row["chip"]
    if chip not in set(fitted["chip"]):
        rate = "" if row["measured_rate"] else ", and its rate of weights is assumed"
        reasons["chip"] = f"no decode row on {chip}{rate}"
    if row["format"] not in set(fitted["format"]):
        reasons["format"] = f"no decode row with {row['format']} weights"
    cache_rows = fitted["rows"]
    least, most = cache_rows.min(), cache_rows.max()
    if row["cache_mb"] and not least <= row["rows"] <= most:
        reasons["context"] = (
            f"a cache of {row['rows']:.0f} rows; rows have {least:.0f} to {most:.0f}"
        )
    is_grouped = not row["repeats"] and row["spread_mb"] > row["cache_mb"]
    if is_grouped and fitted["repeats"].all():
        reasons["attention"] = (
            "attention that repeats no K and V, which no row measures: the interval "
            "reaches from K and V as stored to K and V for each query head"
        )
    if differences := _program_differences(row, model):
        differences = "; ".join(differences)
        reasons["program"] = f"no decode row like its program: {differences}"
    return reasons


def _program_differences(row: Mapping, model: Calibration) -> list[str]:
    """The properties of a row's program that no fitted row has, in words: its states, its
    number of calls, its slowest term, its route."""
    differences, states_mb = [], model.rows["recurrent_mb"].max()
    if row["recurrent_mb"] > states_mb * (1 + 1e-6):
        differences.append(
            f"{row['recurrent_mb']:.1f} MB of recurrent states; rows have "
            f"{states_mb:.1f}"
        )
    most_calls = model.rows["calls"].max()
    if row["calls"] > most_calls:
        differences.append(
            f"{row['calls']:.0f} calls; rows have at most {most_calls:.0f}"
        )
    ms = terms(row, model.constants)
    if ms["products"] > max(ms["stream"], ms["unpack"]):
        differences.append(f"products decide at T = {row['T']:.0f}")
    if row.get("route", ROUTE) != ROUTE:
        differences.append(f"not a program of {ROUTE}")
    return differences


def predict_with_intervals(
    rows: pd.DataFrame, model: Calibration | None = None
) -> pd.DataFrame:
    """The prediction of every row, with its 90% interval.

    No public row so far has attention products that read K and V as they are stored. The
    interval of such an export reaches from there to K and V repeated for each query head.

    Returns:
        ms, low_ms, high_ms (null where a feature is); extrapolates: the reasons why no
        fitted row is like this one, by kind.
    """
    model = model or calibration()
    predictions = [
        _predict_with_interval(row.to_dict(), model)
        for _, row in with_rates(rows).iterrows()
    ]
    return pd.DataFrame(predictions, rows.index)


def _predict_with_interval(row: dict, model: Calibration) -> dict:
    """The line of `predict_with_intervals` for one row of `with_rates`."""
    if pd.isna([row[name] for name in FEATURES]).any():
        missing = {"program": "features are missing"}
        return {
            "ms": np.nan,
            "low_ms": np.nan,
            "high_ms": np.nan,
            "extrapolates": missing,
        }
    reasons = extrapolations(row, model)
    # log errors of independent causes: their squares add up
    squares = [np.log(model.factor) ** 2]
    squares += [model.widths.get(kind, 0.0) ** 2 for kind in reasons]
    factor = np.exp(np.sqrt(sum(squares)))
    ms = repeated_ms = float(predict_ms(row, model.constants))
    if "attention" in reasons:
        repeated = row | {"read_mb": row["spread_mb"]}
        repeated_ms = float(predict_ms(repeated, model.constants))
    return {
        "ms": ms,
        "low_ms": ms / factor,
        "high_ms": repeated_ms * factor,
        "extrapolates": reasons,
    }


def published_predictions() -> pd.DataFrame:
    """Every public measurement that can be used beside its prediction: a fitted row
    predicted without the rows of its author, another one by the fit to all.

    Returns:
        id, source, page (a short name of the source), author, model, format,
        chip, route, T, ms, predicted_ms, low_ms, high_ms, fitted.
    """
    rows, model = points(), calibration()
    rows = rows[rows["use"] != "no"].reset_index(drop=True)
    predictions = predict_with_intervals(rows, model)
    left_out_ms = rows["id"].map(model.rows.set_index("id")["author_ms"])
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


def on_chip(work: Work, chip: str) -> dict:
    """The row of an export's call on a chip: `FEATURES`, `repeats`, and `weights`, the
    format of most weights, or the several formats, as stored and as streamed.

    The head computes every token of the call, as a verification of drafts needs it."""
    total = sum(work.weights.values())
    streamed_bytes, in_tables = 0.0, 0
    for format, count in work.weights.items():
        streamed = _streamed_format(format, chip)
        streamed_bytes += count * stored_bits(streamed) / 8
        if streamed.startswith("lut"):
            in_tables += count
    names = _main_formats(work.weights)
    streams = [f"{name} streamed as {_streamed_format(name, chip)}" for name in names]
    return {
        "chip": chip,
        "T": work.T * work.batch,
        "format": " and ".join(names),
        "table": in_tables / total,
        "calls": work.calls,
        "weights_g": total / 1e9,
        "head_g": 0.0,
        "streamed_gb": streamed_bytes / 1e9,
        "rows": work.cache_rows,
        "cache_mb": work.cache_bytes / 1e6,
        "spread_mb": work.spread_bytes / 1e6,
        "recurrent_mb": work.recurrent_bytes / 1e6,
        "repeats": False,
        "weights": ", ".join(streams),
    }


def _streamed_format(format: str, chip: str) -> str:
    """The format in which a chip streams weights that are stored in `format`: the same, or
    fp16 where the chip unpacks them when it loads them."""
    formats = published("weight_streams.csv").set_index("format")
    first_generation = formats["from_generation"].get(format, np.inf)
    return format if generation(chip) >= first_generation else "fp16"


def _main_formats(weights: dict[str, int]) -> list[str]:
    """The compressed formats that have at least `LEAST_SHARE` of the weights, most weights
    first, if there are several; otherwise the format of most weights.

    Args:
        weights: format → their number.
    """
    by_count = sorted(weights, key=weights.get, reverse=True)
    least = LEAST_SHARE * sum(weights.values())
    names = [name for name in by_count if name != "fp16" and weights[name] >= least]
    return names if len(names) > 1 else by_count[:1]


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
    rows = pd.DataFrame([on_chip(work, chip) for chip in selected["chip"]])
    table = pd.concat([rows[["chip"]], predict_with_intervals(rows)], axis="columns")
    table = table.assign(
        tokens_per_s=1e3 / table["ms"],
        weights=rows["weights"],
        streamed_mib=rows["streamed_gb"] * 1e9 / 2**20,
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


def describe_fit() -> str:
    """Sentences on the assumptions of the predictions, and their distance from public
    measurements."""
    model = calibration()
    rows = model.rows
    return (
        "ms and tok/s by chip assume that every operation runs on the Neural Engine, "
        f"whatever the placement says. {len(rows)} public measurements, of "
        f"{rows['author'].nunique()} authors on {rows['chip'].nunique()} chips, were "
        "each predicted without the rows of their author: the prediction is off by "
        f"{model.median_error:.0%} in the median. low_ms to high_ms is meant to contain "
        f"{LEVEL:.0%}: a factor of {model.factor:.2f} both ways, more where no "
        "measurement is like the export, and up to K and V read for each query head, as "
        "the measured programs read them."
    )
