"""Whether an export is faulty or costs more than the limit, and a preset that keeps the limit, measured."""

from dataclasses import replace

import pandas as pd
import pytest

from workbench import Decoder
from workbench.check import gates
from workbench.check.validate import chained_kl, measure
from workbench.sweep import recommend


def results(cost: float, limit: float, *more: gates.Gate) -> list[gates.Gate]:
    sound = gates.holds("program", True, "")
    return [sound, *more, gates.within("max_kl", cost, limit, "")]


@pytest.fixture
def source(checkout, tiny_llama, llama_golden):
    """A golden with its checkpoint; bundles go to the checkout's own folder."""
    return replace(llama_golden, source=tiny_llama)


@pytest.mark.slow("exports and runs a trained checkpoint in two presets")
def test_a_preset_that_keeps_the_limit_is_measured_and_named(source):
    options = {"max_seq_len": 32}
    red = results(0.2, 0.01)
    presets = recommend.measure_presets(source, red, "int4-block32", **options)
    assert presets["compress"].tolist() == ["int8-channel"] and presets["passes"].all()
    (size,) = presets["MiB"]
    assert 0.1 < size < 10
    # no preset keeps a limit of nothing: both are tried, and the next step is the limit
    none = recommend.measure_presets(source, results(0.2, 0.0), "lut6-g16", **options)
    assert none["compress"].tolist() == ["int8-channel", "fp16"]
    assert not none["passes"].any() and none["kl_mean"].is_monotonic_decreasing
    words = recommend.describe_verdict(results(0.2, 0.0), none)
    assert "None of the presets tried keeps the limit" in words[-1]
    words = recommend.describe_verdict(red, presets)
    assert words[0].startswith("Export GREEN") and words[1].startswith("Quality OVER")
    assert words[-1].startswith("Next step: export with compress = int8-channel")


def test_nothing_is_exported_for_a_kept_limit_or_a_faulty_export(source, monkeypatch):
    monkeypatch.setattr(recommend, "export", None)
    fault = gates.holds("host", False, "")
    for gates_of_bundle in (results(0.001, 0.05), results(0.2, 0.05, fault)):
        presets = recommend.measure_presets(source, gates_of_bundle, "lut6-g16")
        assert list(presets) == recommend.COLUMNS and presets.empty
    words = recommend.describe_verdict(results(0.2, 0.05, fault), presets)
    assert "1 of 2 gates on it are RED (host)" in words[0]
    assert words[1].startswith("Quality not judged")


def test_a_check_that_is_over_is_named_beside_a_kept_limit_of_kl():
    few = gates.reached("answers", 0.5, 0.7, "7 of 14 known answers, the golden 10")
    presets = pd.DataFrame(columns=recommend.COLUMNS)
    sentences = recommend.describe_verdict(results(0.01, 0.05, few), presets)
    assert not any("WITHIN" in sentence for sentence in sentences)
    assert sentences[-1].startswith(
        "Quality OVER: answers is 0.5, less than your limit"
    )
    fault = gates.holds("host", False, "")
    sentences = recommend.describe_verdict(results(0.01, 0.05, few, fault), presets)
    assert not any("OVER" in sentence for sentence in sentences)


def test_the_cost_of_a_preset_is_that_of_a_validation(llama_bundle, llama_golden):
    decoder = Decoder(llama_bundle, "portable")
    whole = measure(decoder, llama_golden, (1, 4))
    assert (chained_kl(decoder, llama_golden, (1, 4)) == whole.kl).all()
