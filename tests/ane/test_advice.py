"""Exports that are predicted to be faster by more than the interval are named, and no others."""

from dataclasses import replace

import pytest

from workbench.ane import features, roofline
from workbench.ane.advice import advise
from workbench.ane.work import ShardWork, Work, call_work
from workbench.exporter import make_options

LAYER = ShardWork("layers", {"int8": 50_000_000}, 8_000_000, 8_000_000, 0, 2048)
HEAD = ShardWork("head", {"int8": 100_000_000})
LONG = {"max_seq_len": 2048, "compress": "int8-channel"}


def work(count: int = 4, **fields) -> Work:
    layer = replace(LAYER, **fields)
    return Work((*[layer] * count, HEAD))


def advised(work: Work, chip: str = "M4 Max", **chosen) -> dict:
    result = advise(work, make_options(**LONG | chosen), chip)
    return {advice.option: advice for advice in result}


def test_fewer_calls_are_proposed_where_calls_cost_most():
    result = advised(work(200, weights={"int8": 500_000}))["layers_per_shard"]
    factor = roofline.calibration().factor
    assert result.ms * factor < result.ms_now and result.value == 200
    assert "201 calls to 2" in result.reason
    assert "layers_per_shard" not in advised(work(2))


def test_shards_stay_below_what_leaves_the_neural_engine():
    small = {
        "weights": {"int8": 300_000_000},
        "cache_bytes": 0,
        "repeated_cache_bytes": 0,
    }
    result = advised(work(8, **small))
    assert "layers_per_shard" not in result or result["layers_per_shard"].value <= 3


def test_a_shorter_cache_is_proposed_where_the_cache_costs_most():
    heavy = {"cache_bytes": 200_000_000, "repeated_cache_bytes": 200_000_000}
    result = advised(work(**heavy))["max_seq_len"]
    assert result.value < 2048 and result.ms < result.ms_now
    assert "max_seq_len" not in advised(work())


@pytest.mark.parametrize(
    ("chip", "proposed"), [("M4 Max", True), ("M5 Max", True), ("M2", False)]
)
def test_a_finer_table_is_proposed_where_unpacking_is_the_limit(chip, proposed):
    """lut6 takes the time of lut4 above about 112 GB/s."""
    layers = work(weights={"lut4": 50_000_000}).shards[:-1]
    head = replace(HEAD, weights={"lut4": 100_000_000})
    result = advised(Work((*layers, head)), chip, compress="lut4-g8")
    finer = [
        a for name, a in result.items() if name == "compress" and a.value == "lut6-g16"
    ]
    assert bool(finer) == proposed
    if proposed:
        assert finer[0].ms == pytest.approx(finer[0].ms_now, rel=0.05)
        assert "M4 Max" in finer[0].sentence("M4 Max")


def test_a_head_in_integers_is_not_unpacked():
    """Streaming then takes longer than unpacking, and finer tables take longer still."""
    tables = work(weights={"lut4": 50_000_000})
    call = features.on_chip(tables, "M4 Max")
    assert call.table_share == pytest.approx(200 / 300)
    assert call.format == "lut4 and int8"
    reasons = roofline.by_chip(tables, ["M4 Max"])["extrapolates"].item()
    assert "lut4 and int8" in reasons["format"]
    assert "compress" not in advised(tables, compress="lut4-g8")


def test_a_format_that_the_chip_unpacks_is_replaced():
    blocks = work(2, weights={"int4-block32": 800_000_000})
    result = advised(blocks, "M4 Max", compress="int4-block32")["compress"]
    assert result.value == "int8-channel" and "compress" not in advised(blocks, "M5")


def test_a_good_export_of_a_checkpoint_gets_no_advice(tiny_llama):
    chosen = make_options(max_seq_len=256, layers_per_shard=4, compress="int8-channel")
    assert advise(call_work(tiny_llama, chosen), chosen, "M4 Max") == []
