"""Predicted times by the formats of matrices agree with those of whole exports."""

import pytest
from refusal import refused
from tiny import DATA

from workbench.ane.roofline import by_chip
from workbench.ane.timing import Timing
from workbench.ane.work import call_work
from workbench.bundle.presets import find_preset
from workbench.exporter import make_options
from workbench.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def source():
    return Checkpoint(DATA / "tiny-llama")


def work_of(source, compress):
    return call_work(source, make_options(compress=compress))


def test_a_chip_that_is_none_is_refused_before_anything_is_predicted(source):
    with refused("chip.*M99"):
        Timing(work_of(source, "fp16"), "M99")


@pytest.mark.parametrize("chip", ["M1", "M4"])
@pytest.mark.parametrize("compress", ["fp16", "int8-channel", "lut6-g16", "lut4-g8"])
def test_one_format_takes_the_time_of_its_export_with_its_interval(
    source, compress, chip
):
    count = sum(work_of(source, "fp16").weights.values())
    timing = Timing(work_of(source, "fp16"), chip)
    (expected,) = by_chip(work_of(source, compress), [chip]).to_dict("records")
    time = timing.call_time({compress: count})
    assert time == pytest.approx([expected[name] for name in time._fields])
    assert time.low_ms < time.ms < time.high_ms


def test_half_of_the_weights_in_tables_unpack_in_half_the_time(source):
    """On a chip that streams four bits faster than it unpacks them."""
    count = sum(work_of(source, "fp16").weights.values())
    timing = Timing(work_of(source, "fp16"), "M4 Max")
    prices = [
        timing.matrix_time(count, find_preset(name)) for name in ("lut4-g8", "fp16")
    ]
    (stream, unpack), (fp16_stream, no_unpack) = prices
    assert no_unpack == 0 and unpack > stream
    others = timing.call_time({"lut4-g8": count}).ms - unpack
    formats = {"lut4-g8": count // 2, "fp16": count - count // 2}
    half = timing.call_time(formats).ms
    expected = max((stream + fp16_stream) / 2, unpack / 2)
    assert half - others == pytest.approx(expected, rel=1e-4)


def test_prices_are_times_of_streamed_bytes_and_of_unpacked_weights(source):
    timing = Timing(work_of(source, "fp16"), "M4")
    fp16, int8, lut4, lut6 = (
        timing.matrix_time(1_000_000, find_preset(name))
        for name in ("fp16", "int8-channel", "lut4-g8", "lut6-g16")
    )
    assert fp16[0] == pytest.approx(2 * int8[0]) == pytest.approx(4 * lut4[0])
    assert fp16[1] == int8[1] == 0
    assert lut4[1] == pytest.approx(lut6[1])
    assert lut4[1] > 0
    triple = timing.matrix_time(3_000_000, find_preset("lut4-g8"))
    assert triple == pytest.approx((3 * lut4[0], 3 * lut4[1]))


def test_a_chip_that_unpacks_a_format_at_load_streams_it_as_fp16(source):
    timing = Timing(work_of(source, "fp16"), "M1")
    presets = [find_preset(name) for name in ("fp16", "int8-channel")]
    assert len({timing.matrix_time(10**6, preset) for preset in presets}) == 1
