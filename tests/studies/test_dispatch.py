"""The dispatch cost is the slope of a call's time over its shards, and nothing else that bundles
differ in."""

import itertools

import numpy as np
import pandas as pd
import pytest

from workbench.studies.dispatch import dispatch_cost
from workbench.sweep import runs

DISPATCH_MS, NATIVE_MS, LAYERS = 2.3, 0.4, 8


def samples(
    compress=("fp16", "int8-tensor"), rounds=3, noise=0.0, native=True
) -> pd.DataFrame:
    """Layer steps of bundles of eight layers in 8, 4 and 1 shards; int8 is twice as fast."""
    rng, rows = np.random.default_rng(0), []
    for number, (kind, per_shard, _) in enumerate(
        itertools.product(compress, (1, 2, 8), range(rounds))
    ):
        setting = dict.fromkeys(runs.TIMES) | {
            "compress": kind,
            "layers_per_shard": per_shard,
        }
        layer_ms = 1.0 if kind == "fp16" else 0.5
        for order, shard in itertools.product(range(5), range(LAYERS // per_shard)):
            ms = DISPATCH_MS + per_shard * layer_ms + rng.normal(0, noise)
            rows.append(
                setting
                | {
                    "run_id": f"{number:02}",
                    "checkpoint_hash": "c",
                    "machine": "M4",
                    "T": 1,
                }
                | {
                    "phase": "layer",
                    "shard": f"layers_{shard}",
                    "value": ms,
                    "invalid": None,
                }
                | {
                    "cpu_ms": 0.1,
                    "native_ms": ms - DISPATCH_MS + NATIVE_MS if native else None,
                }
                | {"repetition": 0, "order": order, "warmup": False}
            )
    return pd.DataFrame(rows)


def test_the_slope_over_shards_is_the_dispatch_cost_of_each_clock():
    table = dispatch_cost(samples()).set_index("clock")
    assert table.loc["wall", "dispatch_ms"] == pytest.approx(DISPATCH_MS)
    assert table.loc["native", "dispatch_ms"] == pytest.approx(NATIVE_MS)
    assert table.loc["cpu", "dispatch_ms"] == pytest.approx(0.1)
    assert table.loc["wall", ["runs", "least_shards", "most_shards"]].tolist() == [
        18,
        1,
        8,
    ]
    assert set(table["machine"]) == {"M4"} and set(table["T"]) == {1}


def test_the_interval_holds_the_truth_and_narrows_with_runs():
    few, many = (dispatch_cost(samples(rounds=n, noise=0.2)).iloc[0] for n in (1, 20))
    for row in (few, many):
        assert row["low"] < DISPATCH_MS < row["high"]
        assert row["low"] < row["dispatch_ms"] < row["high"]
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 2


def test_two_runs_give_a_slope_and_no_interval():
    frame = samples(compress=["fp16"], rounds=1)
    (row,) = (
        dispatch_cost(frame[frame["layers_per_shard"] != 2])
        .query("clock == 'wall'")
        .values
    )
    assert (
        row[2] == pytest.approx(DISPATCH_MS) and np.isnan(row[3]) and np.isnan(row[4])
    )


def test_warm_ups_and_invalid_runs_are_left_out():
    frame = samples()
    slow = frame.assign(value=1e3, warmup=True)
    wrong = frame.assign(
        value=1e3 * frame["layers_per_shard"], invalid="not on the Neural Engine"
    )
    wrong["run_id"] = "x" + wrong["run_id"]
    pd.testing.assert_frame_equal(
        dispatch_cost(pd.concat([frame, slow, wrong])), dispatch_cost(frame)
    )


def test_what_no_run_says_is_no_row():
    assert list(dispatch_cost(samples(native=False))["clock"]) == ["wall", "cpu"]
    alike = samples()
    assert dispatch_cost(alike[alike["layers_per_shard"] == 1]).empty


def test_times_of_two_machines_are_refused():
    with pytest.raises(ValueError, match="machine"):
        dispatch_cost(pd.concat([samples(), samples().assign(machine="M5")]))
