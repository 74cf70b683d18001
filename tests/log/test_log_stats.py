"""Summaries and comparisons of samples: robust figures, and no claim that the samples cannot
carry."""

import numpy as np
import pandas as pd
import pytest

from workbench import log
from workbench.errors import InputError
from workbench.log import stats


def samples(values, **columns) -> list[dict]:
    base = {"phase": "decode", "unit": "ms", "T": 1}
    return [
        base | {"repetition": i, "value": value} | columns
        for i, value in enumerate(values)
    ]


def logged(root, rows, **settings) -> str:
    run_id = log.new_run_id()
    log.append("runs", {"status": "ok"} | settings, root, run_id)
    log.append("samples", rows, root, run_id)
    return run_id


# --- one run's samples
# ------------------------------------------------------------------------------------------------


def frame(rows: list[dict]) -> pd.DataFrame:
    columns = log.SCHEMAS["samples"].names
    return pd.DataFrame(rows).reindex(columns=columns).assign(order=range(len(rows)))


def test_flags_say_in_words_what_makes_a_run_doubtful():
    rows = samples([10.0, 10.5, 11.0, 11.5, 12.0, 12.5], phase="call")
    rows += samples([1.0, 1.0, 1.0, 9.0], phase="tokens_per_s")
    rows += samples([1.0, 9.0, 1.0, 1.0], phase="head")
    warm_ups = samples([900.0] * 3, phase="call", warmup=True)
    found = log.flags(frame([row | {"warmup": False} for row in rows] + warm_ups))
    assert found == ["call drifts by +22%", "tokens_per_s is unstable"]


def test_the_drift_of_a_long_run_is_that_of_its_course():
    """A run of ten minutes has a hundred thousand calls; all pairs of them take 115 GB."""
    noise = np.random.default_rng(0).normal(0, 1, 120_000)
    values = np.linspace(10.0, 12.0, 120_000) + noise
    assert stats.drift(values) == pytest.approx(2 / 11, rel=0.05)


@pytest.mark.parametrize(
    ("values", "drift"),
    [
        ([10.0] * 8, None),
        ([10.0, 10.1, 9.9, 10.0, 10.1, 9.9], None),
        ([10.0, 10.5, 11.0, 11.5, 12.0, 12.5], 2.5 / 11.25),
        ([12.5, 12.0, 11.5, 11.0, 10.5, 10.0], -2.5 / 11.25),
        # significant, and too small to matter
        ([10.00, 10.01, 10.02, 10.03, 10.04, 10.05], None),
        ([10.0, 12.0, 14.0], None),  # three points prove no trend
        ([10.0, 10.0, 10.0, 40.0, 10.0, 10.0], None),
        ([0.0, 0.0, 0.0, 5.0], None),
    ],
)
def test_a_drift_is_large_and_significant(values, drift):
    found = stats.drift(np.array(values))
    assert found is None if drift is None else found == pytest.approx(drift)


def test_drift_follows_the_order_of_measuring_not_of_rows():
    rows = samples([10.0, 11.0, 12.0, 13.0, 14.0, 15.0], phase="call", warmup=False)
    rows = [row | {"repetition": i // 3, "order": i} for i, row in enumerate(rows)]
    shuffled = [rows[i] for i in (3, 0, 5, 1, 4, 2)]
    made = frame(shuffled).assign(order=[row["order"] for row in shuffled])
    assert log.flags(made) == ["call drifts by +40%"]


# --- compare
# ------------------------------------------------------------------------------------------------


def noisy(median: float, n: int = 8) -> list[float]:
    return list(median * (1 + 0.01 * np.random.default_rng(0).standard_normal(n)))


def test_only_settings_that_differ_are_shown(tmp_path):
    same = {"max_seq_len": 128, "compress": "fp16", "platform": "x"}
    young = {"time": pd.Timestamp(0, tz="UTC"), "config": {"flags": []}}
    a = logged(tmp_path, samples([1.0]), depth=0, **same, **young)
    b = logged(tmp_path, samples([1.0]), depth=64, runtime="portable", **same)
    found = log.compare(a, b, tmp_path).settings
    assert {row.setting: (row.a, row.b) for row in found.itertuples()} == {
        "depth": (0, 64),
        "runtime": (None, "portable"),
    }


def repeated(
    root, seed: int, slower: float = 1.0, rounds: int = 6, interleaved: bool = True
) -> tuple[str, str]:
    """Two settings measured round by round in random order: every process has a speed of its own
    (2%), the machine slows down by 2% meanwhile, calls are noisy and some take twice as long.
    Returns a run of each."""
    rng = np.random.default_rng(seed)
    order = [side for _ in range(rounds) for side in rng.permutation(["a", "b"])]
    order = order if interleaved else sorted(order)
    for i, side in enumerate(order):
        speed = (
            np.exp(0.02 * rng.standard_normal())
            * (1 + 0.02 * i / len(order))
            * (slower if side == "b" else 1.0)
        )
        rows = []
        for phase, ms in {"call": 10.0, "head": 2.0, "host": 0.5, "layer": 1.2}.items():
            calls = (
                ms
                * speed
                * (1 + 0.03 * rng.standard_normal((3, 16)))
                * np.where(rng.random((3, 16)) < 0.05, 2, 1)
            )
            rows += [
                row | {"repetition": r, "order": i}
                for r in range(3)
                for i, row in enumerate(samples(calls[r], phase=phase))
            ]
        run_id = f"{seed:03}-{i:03}-{side}"
        log.append(
            "runs",
            {
                "status": "ok",
                "setting": f"{seed}{side}",
                "round": i // 2,
                "machine": "x",
            },
            root,
            run_id,
        )
        log.append("samples", rows, root, run_id)
    return f"{seed:03}-{order.index('a'):03}-a", f"{seed:03}-{order.index('b'):03}-b"


@pytest.mark.matrix(2, wide=18)
@pytest.mark.parametrize("seed", range(20))
def test_a_slow_down_of_a_tenth_is_found_and_none_is_imagined(tmp_path, seed):
    found = log.compare(
        *repeated(tmp_path / "slower", seed, slower=1.1), tmp_path / "slower"
    )
    assert (
        set(found.measures["phase"]) == {"call", "head", "host", "layer"}
        and (found.measures["low"] > 1).all()
    )
    assert found.measures["ratio"].between(1.04, 1.16).all() and (
        found.measures[["n_a", "n_b"]] == 6
    ).all(axis=None)
    same = log.compare(*repeated(tmp_path / "same", seed), tmp_path / "same")
    assert same.measures.empty and same.indistinguishable == 4


@pytest.mark.parametrize(("rounds", "interleaved"), [(2, True), (6, False)])
def test_too_few_rounds_or_one_side_after_the_other_are_not_enough(
    tmp_path, rounds, interleaved
):
    found = log.compare(
        *repeated(tmp_path, 0, 1.5, rounds, interleaved), tmp_path
    ).measures
    assert set(found["note"]) == {"not enough runs"} and found[
        ["low", "high"]
    ].isna().all(axis=None)
    assert (found["ratio"] > 1.3).all()


def test_two_runs_of_one_setting_stand_for_themselves(tmp_path):
    repeated(tmp_path, 0)
    first, second, *_ = [
        run for run in log.load("runs", tmp_path)["run_id"] if run.endswith("a")
    ]
    found = log.compare(first, second, tmp_path)
    assert (found.measures[["n_a", "n_b"]] == 1).all(axis=None) and set(
        found.measures["note"]
    ) == {"not enough runs"}


def test_many_repetitions_of_one_process_are_no_evidence(tmp_path):
    a, b = (
        logged(tmp_path, samples(noisy(10.0))),
        logged(tmp_path, samples(noisy(20.0))),
    )
    (row,) = log.compare(a, b, tmp_path).measures.itertuples()
    assert (row.n_a, row.note) == (1, "not enough runs") and row.ratio == pytest.approx(
        2.0
    )


def test_comparing_turns_the_ratio_round(tmp_path):
    a, b = repeated(tmp_path, 1, slower=3.0)
    there, back = (
        log.compare(a, b, tmp_path).measures.iloc[0],
        log.compare(b, a, tmp_path).measures.iloc[0],
    )
    assert there["ratio"] == pytest.approx(1 / back["ratio"])
    assert (there["low"], there["high"]) == pytest.approx(
        (1 / back["high"], 1 / back["low"])
    )


@pytest.mark.parametrize(
    ("values_a", "values_b", "note"),
    [([1.0], [0.0], "not positive"), ([1.0], [np.nan], "on one side only")],
)
def test_what_cannot_be_compared_is_shown_without_an_interval(
    tmp_path, values_a, values_b, note
):
    a, b = logged(tmp_path, samples(values_a)), logged(tmp_path, samples(values_b))
    found = log.compare(a, b, tmp_path)
    assert found.measures["note"].tolist() == [note] and found.indistinguishable == 0
    assert found.measures[["low", "high"]].isna().all(axis=None)


def test_a_run_without_samples_still_compares_its_settings(tmp_path):
    log.append("runs", {"status": "failed", "reason": "no memory"}, tmp_path, "bare")
    found = log.compare("bare", logged(tmp_path, samples([1.0, 1.0, 1.0])), tmp_path)
    assert found.settings.empty
    assert found.measures["note"].tolist() == ["on one side only"]


def test_an_unknown_run_is_refused(tmp_path):
    known = logged(tmp_path, samples([1.0]))
    with pytest.raises(InputError, match="run missing: found none"):
        log.compare(known, "missing", tmp_path)
    logged(tmp_path, samples([1.0]))
    with pytest.raises(InputError, match="run : found"):
        log.compare(known, "", tmp_path)


def test_the_end_of_an_id_names_a_run(tmp_path):
    a, b = (logged(tmp_path, samples([v]), T=v) for v in (1, 4))
    found = log.compare(log.short(a), log.short(b), tmp_path)
    assert len(log.short(a)) == 8
    assert found.settings[["a", "b"]].values.tolist() == [[1, 4]]
    assert found.measures["ratio"].tolist() == [4.0]
