"""The formula: what each feature costs, intervals that say how wrong it is, and what it has no
row for."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from workbench.ane import features, formula, roofline
from workbench.ane.chips import chips, published
from workbench.ane.formula import Constants
from workbench.ane.work import ShardWork, Work

LAYER = ShardWork("layers", {"int8": 50_000_000}, 8_000_000, 8_000_000, 0, 2048)
WORK = Work(tuple([LAYER] * 20))


def changed(**fields) -> Work:
    return Work(tuple([replace(LAYER, **fields)] * 20))


def predicted(chip: str = "M4 Max", work: Work = WORK) -> pd.Series:
    return roofline.by_chip(work, [chip]).iloc[0]


def test_public_rows_are_predicted_without_their_author():
    fitted = roofline.calibration()
    assert len(fitted.rows) >= 30 and fitted.rows["author"].nunique() > 1
    assert fitted.median_error <= 0.15
    ratio = fitted.rows["author_ms"] / fitted.rows["ms"]
    inside = np.log(ratio).abs() <= np.log(fitted.factor)
    assert inside.mean() >= roofline.INTERVAL_LEVEL


def test_the_formula_is_its_terms():
    """Computed by hand: 1 GB at the M4 Max's 118.9 GB/s, and one term after the other."""
    call = features.on_chip(WORK, "M4 Max")
    row = features.calls_table([call]).iloc[0].to_dict()
    stream = 1e3 / 118.9
    assert formula.predict_ms(row, Constants()) == pytest.approx(stream)
    for constants, more in (
        (Constants(call=0.5), 20 * 0.5),
        (Constants(attend=20), 160 / 20),
        (Constants(unpack=1), 0),  # int8 has no table
    ):
        ms = formula.predict_ms(row, constants)
        assert ms == pytest.approx(stream + more)
    table = row | {"table_share": 1.0, "recurrent_mb": 9.0}
    unpacked = formula.predict_ms(table, Constants(unpack=50, recur=3))
    assert unpacked == pytest.approx(1e3 / 50 + 3)
    many = row | {"T": 512}
    products = 2 * 512 * 1e9 / (0.5 * 14.3e12) * 1e3
    assert formula.predict_ms(many, Constants()) == pytest.approx(products)


@pytest.mark.parametrize(
    "more",
    [
        {"weights": {"int8": 90_000_000}},
        {"cache_bytes": 30_000_000, "repeated_cache_bytes": 30_000_000},
        {"recurrent_bytes": 2_000_000},
        {"calls": 3},
    ],
)
def test_more_bytes_states_and_calls_and_slower_chips_take_longer(more):
    assert predicted(work=changed(**more))["ms"] > predicted()["ms"]
    assert predicted("M1")["ms"] > predicted()["ms"]


def test_constants_are_recovered_from_times_that_they_made():
    rows = roofline.calibration().rows
    true = Constants(call=0.3, unpack=90.0, attend=40.0, recur=2.0)
    synthetic = rows.assign(ms=formula.predict_ms(rows, true))
    synthetic.loc[:2, "ms"] *= 4  # three false rows of 34 hardly move a robust fit
    result = formula.fit(synthetic)
    for name in formula.CONSTANT_NAMES:
        assert getattr(result, name) == pytest.approx(getattr(true, name), rel=0.15)


def test_a_row_is_predicted_by_the_others_alone():
    """A source with times ten times too long does not move its own left-out prediction."""
    rows = roofline.calibration().rows
    source = rows["source"].iloc[-1]
    wrong = rows["source"] == source
    planted = rows.assign(ms=rows["ms"].where(~wrong, 10 * rows["ms"]))
    before = formula.cross_validated_ms(rows, "source")[wrong]
    after = formula.cross_validated_ms(planted, "source")[wrong]
    # others of the same author weigh the same: their number did not change
    assert after.tolist() == before.tolist()


def test_a_factor_contains_its_share_of_rows_and_one_more():
    logs = pd.Series(np.linspace(-1, 1, 21))
    factor = roofline.conformal_factor(logs)
    assert (logs.abs() <= np.log(factor)).mean() >= 0.9
    assert roofline.conformal_factor(logs.iloc[:2]) == pytest.approx(np.e)


EXTRAPOLATED = {
    "chip": ("M3 Max", WORK),
    "format": ("M4 Max", changed(weights={"int4-block32": 50_000_000})),
    "context": ("M4 Max", changed(cache_rows=32_768)),
    "program": ("M4 Max", Work(tuple([LAYER] * 200))),
}


@pytest.mark.parametrize("kind", EXTRAPOLATED)
def test_what_has_no_row_says_so_and_has_a_wider_interval(kind):
    plain = predicted()
    assert plain["extrapolates"] == {}
    chip, work = EXTRAPOLATED[kind]
    row = predicted(chip, work)
    assert set(row["extrapolates"]) == {kind} and row["extrapolates"][kind]
    widths = [r["high_ms"] / r["low_ms"] for r in (plain, row)]
    assert widths[1] > 1.2 * widths[0]
    assert row["low_ms"] < row["ms"] < row["high_ms"]


def test_recurrent_states_beyond_those_of_rows_and_long_calls_are_extrapolated():
    states = predicted(work=changed(recurrent_bytes=2_000_000))["extrapolates"]
    assert "recurrent states" in states["program"]
    long = predicted(work=replace(WORK, T=512))["extrapolates"]
    assert "products decide" in long["program"]


def test_attention_that_repeats_nothing_has_an_interval_up_to_every_query_head():
    """The ms are those of the bytes that the program reads; the upper end has K and V for
    each query head, as every measured program reads them."""
    grouped = predicted(work=changed(repeated_cache_bytes=4 * 8_000_000))
    plain = predicted()
    assert grouped["ms"] == plain["ms"] and grouped["low_ms"] == plain["low_ms"]
    more = 3 * 160 / roofline.calibration().constants.attend
    factor = roofline.calibration().factor
    assert grouped["high_ms"] == pytest.approx(plain["high_ms"] + factor * more)
    assert "repeats no K and V" in grouped["extrapolates"]["attention"]


def test_a_measured_row_of_such_attention_ends_that_interval():
    points = features.points()
    one = points[points["id"] == "p29"].assign(repeats_kv=False, id="mac", author="mac")
    fitted = roofline.calibrate(pd.concat([points, one], ignore_index=True))
    call = features.on_chip(changed(repeated_cache_bytes=32_000_000), "M4 Max")
    calls = features.calls_table([call])
    result = roofline.predict_with_intervals(calls, fitted).iloc[0]
    assert "attention" not in result["extrapolates"]
    assert result["high_ms"] / result["ms"] == pytest.approx(fitted.factor)


def test_rates_that_nobody_measured_are_marked():
    assumed = chips().set_index("chip")["assumed"]
    assert assumed["M4 Max"] == "" and "tflops" in assumed["M3 Max"]
    for chip in ("A17 Pro", "A19 Pro", "M2 Pro", "M5 Pro"):
        assert "weights_gb_s" in assumed[chip]
    row = predicted("A17 Pro")
    assert "rate of weights is assumed" in row["extrapolates"]["chip"]


def test_a_chip_without_any_figure_has_the_rate_of_its_generation():
    call = replace(features.on_chip(WORK, "M4 Max"), chip="M3 Pro")
    calls = features.calls_table([call])
    assert calls["weights_gb_s"].item() == 63.1
    result = roofline.predict_with_intervals(calls, roofline.calibration()).iloc[0]
    assert "chip" in result["extrapolates"]


@pytest.mark.parametrize(
    ("format", "chip", "streamed"),
    [
        ("int8", "M1", "fp16"),
        ("int8", "M2", "int8"),
        ("lut4", "M1", "lut4"),
        ("int4-channel", "M4 Max", "fp16"),
        ("int4-block32", "M4 Max", "fp16"),
        ("int4-block32", "M5", "int4-block32"),
    ],
)
def test_a_chip_streams_a_format_as_stored_or_as_fp16(format, chip, streamed):
    """A format that the chip unpacks when it loads saves no time: its ms are those of fp16."""
    row, plain = (
        predicted(chip, changed(weights={name: 50_000_000}))
        for name in (format, "fp16")
    )
    assert (row["ms"] == plain["ms"]) == (streamed == "fp16")
    assert row["weights"] == f"{format} streamed as {streamed}"


def test_every_preset_has_a_published_stream():
    from workbench.ane.work import stored_format
    from workbench.bundle import PRESETS

    formats = set(published("weight_streams.csv")["format"])
    assert {stored_format(preset) for preset in PRESETS.values()} <= formats


def test_published_rows_stand_beside_what_others_predict():
    table, fitted = roofline.published_predictions(), roofline.calibration()
    assert (table["low_ms"] < table["predicted_ms"]).all()
    assert (table["predicted_ms"] < table["high_ms"]).all()
    rows = table[table["fitted"]]
    assert rows["id"].tolist() == fitted.rows["id"].tolist()
    assert rows["predicted_ms"].tolist() == pytest.approx(fitted.rows["author_ms"])
    outside = ~rows["ms"].between(rows["low_ms"], rows["high_ms"])
    assert 0 < outside.sum() <= 0.18 * len(rows)
    assert len(table) > len(rows) + 20 and table["route"].nunique() == 3
    assert table["page"].nunique() == table["source"].nunique()
    assert {"CoreML-LLM SPEED_8K", "coreai-model-zoo minicpm5-2b"} <= set(table["page"])


def test_the_words_have_the_error_and_the_interval():
    fitted, words = roofline.calibration(), roofline.describe_fit()
    assert "assume that every operation runs on the Neural Engine" in words
    assert f"{fitted.median_error:.0%} in the median" in words
    assert f"a factor of {fitted.factor:.2f}" in words
    speeds = roofline.by_chip(changed(cache_rows=32_768), ["M1", "M4 Max"])
    lines = roofline.describe_extrapolations(speeds)
    assert lines[0] == "extrapolated: M1: no decode row on the chip"
    assert "32768 rows" in lines[1] and "M1" not in lines[1]
