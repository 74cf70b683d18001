"""The predictor that the formula of `workbench/ane/formula.py` replaced, as of commit
2e6baa47. It is kept because tests/tools/test_predictor.py shows that the formula is
better."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.ane import features
from workbench.ane.chips import chips, generation, published
from workbench.ane.work import stored_bits

BASE_CHIPS = {1: "M1", 2: "M1", 3: "M1", 4: "M4", 5: "M5", 6: "M5"}
"""Generation → the base chip of the latest generation, up to it, whose rate of activations was
published."""


def earlier_roofline(rows: pd.DataFrame, by: str) -> pd.Series:
    """The cross-validated ms of the earlier predictor, null where it has no answer:

        dispatches · t_dispatch + max(flops / peak, stream) / share
        stream = weights / weight rate + 2 · states / activation rate

    Its two coefficients minimize the squared relative errors of ane-book's rows of parts
    of a model on the M4 Max, without the rows of the same group."""
    everything = features.points()
    is_part = everything["id"].str.startswith("d") & (everything["chip"] == "M4 Max")
    calibration = earlier_terms(everything[is_part])
    calibration[by] = everything[by]
    terms = earlier_terms(rows)[["calls", "busy"]]
    result = pd.Series(np.nan, rows.index)
    for value, group in rows.groupby(by, sort=False):
        others = calibration[calibration[by] != value]
        if len(others) > 1:
            scaled = others[["calls", "busy"]].div(others["ms"], axis="index")
            coefficients = np.linalg.lstsq(scaled, np.ones(len(others)), rcond=None)[0]
            result[group.index] = terms.loc[group.index] @ coefficients
    return result


def earlier_terms(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns `calls`, the number of dispatches, `busy`, max(flops / peak, stream) in
    ms, and `ms` of rows; `busy` is null where the earlier predictor did not know the chip
    or the format."""
    rates = Rates.read()
    busy = [busy_ms(row, rates) for row in rows.to_dict("records")]
    return pd.DataFrame({"calls": rows["calls"], "busy": busy, "ms": rows["ms"]})


@dataclass(frozen=True)
class Rates:
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
    def read(cls) -> "Rates":
        formats = published("weight_streams.csv").set_index("format")["from_generation"]
        published_rates = published("chips.csv")
        is_assumed = published_rates["condition"].str.startswith("assumed")
        # (quantity, chip) → the lower end of the published rate
        low = published_rates[~is_assumed].set_index(["quantity", "chip"])["low"]
        rated = chips().set_index("chip")
        rated = rated[~rated["assumed"].str.contains("weights")]
        measured_tflops = low["fp16 convolution"].to_dict()
        return cls(
            from_generation=formats.drop("lut8"),  # which that predictor did not know
            weights_gb_s=rated["weights_gb_s"],
            activations_gb_s=low["activation stream"],
            tflops=pd.Series(rated["tflops"].to_dict() | measured_tflops),
        )


def busy_ms(row: dict, rates: Rates) -> float:
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
