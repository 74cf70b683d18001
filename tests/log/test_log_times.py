"""The statistic of times: a process is one value, a setting the median over processes;
what disturbed a process is recognised and left out where others are there."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from workbench import log, sweep
from workbench.log import times
from workbench.sweep import summary
from workbench.sweep.table import table_lines


def samples(run_id: str, repetitions: list[list[float]], T: int = 1) -> pd.DataFrame:
    """Calls in ms of one process and the rate of each repetition, after a warm-up."""
    rows = []
    for number, calls in enumerate(repetitions):
        columns = {"repetition": number, "T": T, "unit": "ms", "warmup": False}
        rows.append(columns | {"phase": "call", "value": 500.0, "warmup": True})
        rows += [columns | {"phase": "call", "value": ms} for ms in calls]
        rate = T * len(calls) / sum(calls) * 1e3
        rows.append(columns | {"phase": "tokens_per_s", "value": rate, "unit": "tok/s"})
    return pd.DataFrame(rows).assign(run_id=run_id)


def test_a_process_is_its_tokens_over_the_time_of_its_calls():
    """Repetitions of 100 and 25 tok/s: 8 tokens in 0.2 s, which is neither their mean
    nor their median."""
    result = log.speeds(samples("1", [[10.0] * 4, [40.0] * 4]))
    assert result.loc["1", "tokens_per_s"] == pytest.approx(40)
    assert result.loc["1", "call_ms"] == 25 and result.loc["1", "call_p90_ms"] == 40


def test_a_setting_is_the_median_over_processes_and_not_over_their_calls():
    """One process has many more calls than two others together: it counts once."""
    parts = [samples("1", [[10.0] * 90]), samples("2", [[20.0] * 5])]
    processes = log.by_process(pd.concat([*parts, samples("3", [[30.0] * 5])]))
    result = log.summarize(processes, "phase")
    assert result.loc["call"].tolist() == [20, 10, 30, 3]
    assert result.loc["tokens_per_s", "median"] == pytest.approx(50)


def test_the_table_computes_speeds_from_samples_and_leaves_disturbed_processes_out(
    tmp_path,
):
    """The stored column of an older row is the median over repetitions."""
    row = {"status": "ok", "setting": "s", "machine": "chip, 4 GiB, 2 cores"}
    for run_id, ms, load in (("1", 10.0, 1.0), ("2", 20.0, 1.0), ("3", 90.0, 7.0)):
        columns = row | {"load_start": load, "tokens_per_s": 1.0, "call_ms": 1.0}
        log.append("samples", samples(run_id, [[ms] * 3]), tmp_path, run_id)
        log.append("runs", columns, tmp_path, run_id)
    (result,) = summary.summary(tmp_path).to_dict("records")
    assert (result["n"], result["disturbed"]) == (2, 1) and result["call_ms"] == 15
    assert result["tokens_per_s"] == pytest.approx(75)
    assert (result["slowest"], result["fastest"]) == pytest.approx((50, 100))
    text = table_lines(summary.summary(tmp_path))
    assert "disturbed" in " ".join(text)


def test_settings_are_listed_by_mean_and_99_percent_kl(tmp_path):
    price = {"kl": {"mean": 0.01, "p99": 0.2, "max": 0.3}}
    row = {"status": "ok", "verdict": "GREEN", "kl_mean": 0.01, "worst_update": 0.09}
    log.append("runs", row | {"config": {"price": price}}, tmp_path, "1")
    log.append("runs", row | {"config": {"other": 1}}, tmp_path, "2")
    result = summary.summary(tmp_path)
    assert result["kl_p99"].tolist()[0] == 0.2 and np.isnan(result["kl_p99"][1])
    titles = " ".join(table_lines(result))
    assert "mean KL 0.01" in titles and "99% KL" in titles and "cos" not in titles


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"load_start": 2.4, "load_end": 2.5, "steal": 0.0}, None),
        ({}, None),
        ({"load_start": 2.6}, "load 2.6 on 2 cores before it"),
        ({"load_end": 9.0}, "load 9.0 on 2 cores after it"),
        ({"steal": 0.1}, "10% of processor time went to other machines"),
    ],
)
def test_load_and_steal_disturb_a_run(row, words):
    runs = pd.DataFrame([{"machine": "chip, 2 cores"} | row])
    assert log.disturbance_reasons(runs).tolist() == [words]


def test_one_odd_process_disturbs_three_but_not_five():
    assert log.vary_too_much([10, 10.1, 13]) and not log.vary_too_much([10, 10.1, 12])
    assert not log.vary_too_much([10, 10.1, 10.2, 9.9, 30])
    assert not log.vary_too_much([10])


def test_figures_get_one_value_of_each_process(tmp_path):
    """Of three processes the disturbed one is left out; a setting in which every one is
    disturbed keeps them, with the reason."""
    parts, columns = [], {"machine": "chip, 2 cores", "warmup": False}
    for run_id, setting, load in (("1", "a", 1), ("2", "a", 9), ("3", "b", 9)):
        rows = samples(run_id, [[10.0] * 4, [40.0] * 4]).assign(setting=setting)
        reason = log.disturbance_reasons(
            pd.DataFrame([columns | {"load_start": load}])
        )[0]
        parts.append(rows.assign(disturbed=reason))
    result = sweep.per_process(pd.concat(parts), "tokens_per_s")
    assert result["run_id"].tolist() == ["1", "3"]
    assert result["value"].tolist() == pytest.approx([40, 40])
    assert result["disturbed"].notna().tolist() == [False, True]


@pytest.mark.parametrize("pairs", [2, 3, 8])
def test_the_interval_has_the_quantile_of_student_s_distribution(pairs):
    ratios = np.linspace(1.1, 1.3, pairs)
    estimate = times.compare_settings(pd.Series(np.ones(pairs)), pd.Series(ratios))
    logs = np.log(ratios)
    quantile = stats.t.ppf((1 + times.CONFIDENCE) / 2, pairs - 1)
    half_width = quantile * logs.std(ddof=1) / pairs**0.5
    interval = np.exp([logs.mean() - half_width, logs.mean() + half_width])
    np.testing.assert_array_equal([estimate.low, estimate.high], interval)
