"""The benchmarks time every contestant beside its peers and keep every sample."""

import os

import bench
import pytest
import torch
from bench_record import Measurement, Series
from cyclopts import App
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.wide


@pytest.fixture
def short(monkeypatch):
    """Sets sizes that fit a small cache, without other libraries and child processes."""
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(
        bench, "run_in_process", lambda function, *arguments: function(*arguments)
    )


def by_name(measurement: Measurement, rounds: int) -> dict[str, Series]:
    """The series by name, after checks that each has a sample of every round or a reason, and that
    every comparison has its two series."""
    series = {one.name: one for one in measurement.series}
    assert len(series) == len(measurement.series)
    for one in series.values():
        if one.samples is None:
            assert one.missing
        else:
            assert min(one.samples) > 0 and len(one.samples) == rounds
    assert measurement.comparisons
    for comparison in measurement.comparisons:
        assert {comparison.series, comparison.peer} <= series.keys()
        assert measurement.ratio(comparison)
    return series


@pytest.mark.slow("three models of Hugging Face and two bundles decode")
def test_presets_and_prompts_stand_beside_hugging_face(exports, short):
    checkpoint = exports.checkpoint("qwen2")
    bundles = {
        kind: exports.bundle(checkpoint, compress=kind, tokens="1-4")
        for kind in ("fp16", "int8-channel")
    }
    decode = bench.measure_decode(bundles, checkpoint, 2, (4, 20))
    names = *bundles, "HF float16", "HF float32", "HF bfloat16"
    missing = "llama.cpp F16", "llama.cpp Q8_0"
    expected = {f"{name} at {n}" for name in (*names, *missing) for n in (4, 20)}
    series = by_name(decode, 2)
    assert series.keys() == expected
    assert series["llama.cpp F16 at 4"].samples is None
    compared = {(one.series, one.peer) for one in decode.comparisons}
    assert ("fp16 at 20", "HF float16 at 20") in compared
    prompt = bench.measure_prompt(bundles, checkpoint, 1, (1, 2))
    series = by_name(prompt, 1)
    assert len(series) == 2 * 2 + 3 + 2
    compared = {(one.series, one.peer) for one in prompt.comparisons}
    assert ("int8-channel, T = 2", "HF bfloat16") in compared


@pytest.mark.slow("exports with the workbench and with coremltools")
def test_an_export_stands_beside_coremltools_own(exports, tmp_path, short):
    source = exports.checkpoint("qwen2", num_hidden_layers=1)
    measured = bench.measure_export(source, tmp_path / "work", "int8-channel", 1)
    assert len(by_name(measured, 1)) == 3
    assert not (tmp_path / "work").exists()


def test_a_rate_is_tokens_over_their_time(monkeypatch):
    """One step of eight is slow, which a median of the steps would hide."""
    times = iter([0.1] * 7 + [1.3])
    monkeypatch.setattr(bench, "seconds", lambda step: next(times))
    contestant = bench.Contestant(lambda: None, lambda ids: None)
    assert bench.decode_rate(4, contestant) == pytest.approx(8 / 2.0)


def test_validation_evaluation_and_log_have_their_peers(exports, tmp_path, short):
    path = exports.checkpoint("qwen2")
    bundle, ids = exports.bundle(path), list(range(1, 13))
    validated = bench.measure_validate(bundle, path, ids[:6], 1, "tiny")
    assert len(by_name(validated, 1)) == 3
    evaluated = bench.measure_evaluate(bundle, path, ids, 1, "tiny")
    assert len(by_name(evaluated, 1)) == 3
    loaded = by_name(bench.measure_log(tmp_path, 1, 20), 1)
    assert loaded.keys() == {"first load of a copy", "later load", "pandas"}


def test_the_documented_loop_scores_every_token_but_the_first_once(exports):
    """In one window its mean is the model's own loss."""
    path = exports.checkpoint("qwen2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = list(range(1, 21))
    whole = torch.tensor([ids])
    with torch.inference_mode():
        loss = float(model(whole, labels=whole).loss)
        assert bench.documented_loop(model, ids, 32, 16) == pytest.approx(loss)
        logits = model(torch.tensor([ids[4:12]])).logits[0].log_softmax(-1)
        last = [-float(logits[i, ids[5 + i]]) for i in range(3, 7)]
        first = model(torch.tensor([ids[:8]])).logits[0].log_softmax(-1)
        others = [-float(first[i, ids[1 + i]]) for i in range(7)]
        expected = sum(last + others) / 11
        measured = bench.documented_loop(model, ids[:12], 8, 4)
    assert measured == pytest.approx(expected)


def test_what_is_measured_runs_in_a_process_of_its_own():
    assert bench.run_in_process(os.getpid) != os.getpid()


def test_every_published_measurement_parses():
    for command, options in bench.PUBLISHED_RUNS.items():
        app = App(default_command=bench.main)
        app.parse_args(
            [command, *options, "--rounds", "3", "--out", "x", "--folder", "y"]
        )
