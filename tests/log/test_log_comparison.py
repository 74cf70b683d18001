"""Comparisons of samples: robust figures, and no claim that the samples cannot carry."""

import numpy as np
import pandas as pd
import pytest
from refusal import refused

from workbench import log


def samples(values, **columns) -> list[dict]:
    base = {"phase": "decode", "unit": "ms", "T": 1} | columns
    return [base | {"repetition": i, "value": value} for i, value in enumerate(values)]


def logged(root, rows, run_id: str | None = None, **settings) -> str:
    run_id = run_id or log.new_run_id()
    log.append("runs", {"status": "ok"} | settings, root, run_id)
    log.append("samples", rows, root, run_id)
    return run_id


def test_only_settings_that_differ_are_shown(tmp_path):
    same = {"max_seq_len": 128, "compress": "fp16", "platform": "x"}
    young = {"time": pd.Timestamp(0, tz="UTC"), "config": {"x": []}}
    a = logged(tmp_path, samples([1.0]), depth=0, **same, **young)
    b = logged(tmp_path, samples([1.0]), depth=64, runtime="portable", **same)
    settings = log.compare(a, b, tmp_path).settings
    assert {row.setting: (row.a, row.b) for row in settings.itertuples()} == {
        "depth": (0, 64),
        "runtime": (None, "portable"),
    }


def repeated(root, seed: int, slower=1.0, rounds=6, interleaved=True) -> list[str]:
    """Two settings measured round by round in random order: every process has a speed of its own
    (2%), the machine slows down by 2% meanwhile, calls are noisy and some take twice as long.
    Returns a run of each."""
    rng = np.random.default_rng(seed)
    order = [side for _ in range(rounds) for side in rng.permutation(["a", "b"])]
    order = order if interleaved else sorted(order)
    for i, side in enumerate(order):
        speed = np.exp(0.02 * rng.standard_normal()) * (1 + 0.02 * i / len(order))
        speed *= slower if side == "b" else 1.0
        rows = []
        for phase, ms in {"call": 10.0, "head": 2.0, "host": 0.5, "layer": 1.2}.items():
            noise = 1 + 0.03 * rng.standard_normal(48)
            calls = ms * speed * noise * np.where(rng.random(48) < 0.05, 2, 1)
            of_phase = samples(calls, phase=phase, order=i)
            rows += [row | {"repetition": n % 3} for n, row in enumerate(of_phase)]
        run_id = f"{seed:03}-{i:03}-{side}"
        row = {"setting": f"{seed}{side}", "round": i // 2, "machine": "x"}
        logged(root, rows, run_id, **row)
    return [f"{seed:03}-{order.index(side):03}-{side}" for side in "ab"]


@pytest.mark.matrix(2, wide=18)
@pytest.mark.parametrize("seed", range(20))
def test_a_slow_down_of_a_tenth_is_found_and_none_is_imagined(tmp_path, seed):
    slower = tmp_path / "slower"
    measures = log.compare(*repeated(slower, seed, slower=1.1), slower).measures
    assert set(measures["phase"]) == {"call", "head", "host", "layer"}
    assert (measures["low"] > 1).all() and measures["ratio"].between(1.04, 1.16).all()
    assert (measures[["n_a", "n_b"]] == 6).all(axis=None)
    same = tmp_path / "same"
    _, measures, alike = log.compare(*repeated(same, seed), same)
    assert measures.empty and alike == 4


@pytest.mark.parametrize(("rounds", "interleaved"), [(2, True), (6, False)])
def test_too_few_rounds_or_one_side_after_the_other_are_not_enough(
    tmp_path, rounds, interleaved
):
    runs = repeated(tmp_path, 0, 1.5, rounds, interleaved)
    measures = log.compare(*runs, tmp_path).measures
    assert (
        set(measures["note"]) == {"not enough runs"} and (measures["ratio"] > 1.3).all()
    )
    assert measures[["low", "high"]].isna().all(axis=None)


def test_two_runs_of_one_setting_stand_for_themselves(tmp_path):
    repeated(tmp_path, 0)
    ids = log.load("runs", tmp_path)["run_id"]
    first, second, *_ = ids[ids.str.endswith("a")]
    measures = log.compare(first, second, tmp_path).measures
    assert (measures[["n_a", "n_b"]] == 1).all(axis=None)
    assert set(measures["note"]) == {"not enough runs"}


def test_an_end_that_several_ids_have_is_refused_with_the_newest_of_them(tmp_path):
    for number in range(6):
        logged(tmp_path, samples([1.0]), f"2026-0{number}-run{number}a")
    with refused(
        "run a: found 6 runs whose ids end in 'a': run5a, run4a, run3a, run2a, …"
    ):
        log.compare("a", "run0a", tmp_path)
    with refused("run b: found no id in the log that ends in 'b'"):
        log.compare("b", "run0a", tmp_path)


def test_what_cannot_be_compared_is_shown_without_an_interval(tmp_path):
    a, b = logged(tmp_path, samples([1.0])), logged(tmp_path, samples([np.nan]))
    _, measures, alike = log.compare(a, b, tmp_path)
    assert measures["note"].tolist() == ["on one side only"] and alike == 0
    assert measures[["low", "high"]].isna().all(axis=None)
