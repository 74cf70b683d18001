"""Timing: every clock is there, warm-ups are apart, parts add up; nothing here judges how fast
anything is."""

from unittest import mock

import numpy as np
import pytest

from workbench import Decoder
from workbench.errors import InputError
from workbench.sweep import timing


@pytest.fixture(scope="module")
def decoder(llama_bundle):
    return Decoder(llama_bundle, "portable", fast=True)


def test_samples_hold_every_call_and_their_parts_add_up(decoder):
    samples = timing.measure_speed(decoder, depth=3, n_gen=6, T=2, repetitions=2)
    calls = samples[samples["phase"] == "call"]
    assert (
        len(calls) == 2 * (timing.WARMUP_CALLS + 3)
        and calls["warmup"].sum() == 2 * timing.WARMUP_CALLS
    )
    parts = (
        samples[samples["phase"].isin(["layer", "head", "host"])]
        .groupby("order")["value"]
        .sum()
    )
    assert np.allclose(parts, calls.set_index("order")["value"])
    rates = samples[samples["phase"] == "tokens_per_s"]["value"]
    spent = calls[~calls["warmup"]].groupby("repetition")["value"].sum()
    assert np.allclose(rates, 6 / spent * 1e3)


def test_sequences_follow_until_the_tokens_and_the_seconds_are_through(decoder):
    samples = timing.measure_speed(decoder, n_gen=4, repetitions=1, min_tokens=15)
    calls = samples[(samples["phase"] == "call") & ~samples["warmup"]]
    assert len(calls) == 16 and calls["repetition"].nunique() == 4
    layers = samples[samples["phase"] == "layer"]
    # steps of the sequences that were asked for by number
    assert set(layers["repetition"]) == {0}
    assert (samples["phase"] == "tokens_per_s").sum() == 4
    samples = timing.measure_speed(decoder, n_gen=4, repetitions=1, min_seconds=0.5)
    calls = samples[samples["phase"] == "call"]
    assert (
        calls["elapsed_s"].is_monotonic_increasing
        and 0.5 <= calls["elapsed_s"].max() < 10
    )
    assert (calls["value"] <= 1e3 * calls["elapsed_s"].diff().fillna(1)).all()


def test_a_long_run_says_how_hot_the_machine_was_on_the_way(decoder, monkeypatch):
    levels = iter([0, 0, 1, None])
    monkeypatch.setattr(timing, "thermal_level", lambda: next(levels, 2))
    monkeypatch.setattr(timing, "PRESSURE_EVERY_S", 0)
    samples = timing.measure_speed(decoder, n_gen=2, repetitions=5, min_seconds=1e-3)
    hot = samples[samples["phase"] == "thermal_pressure"]
    assert (
        hot["value"].tolist() == [0, 0, 1, 2]
        and hot["elapsed_s"].is_monotonic_increasing
    )
    assert set(hot["unit"]) == {"level"}
    samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
    assert "thermal_pressure" not in set(samples["phase"])


@pytest.mark.shim
def test_a_device_ramps_up_before_anything_is_timed(llama_bundle, monkeypatch):
    counts = {}
    for runtime in ("portable", "stand-in"):
        decoder = Decoder(llama_bundle, runtime)
        spy = mock.Mock(wraps=decoder.layers[0].predict)
        monkeypatch.setattr(decoder.layers[0], "predict", spy)
        samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
        counts[runtime] = spy.call_count - (samples["phase"] == "call").sum()
    assert counts == {"portable": 0, "stand-in": timing.RAMP_CALLS}


@pytest.mark.shim
def test_cpu_time_of_the_parts_adds_up_and_only_core_ml_has_its_own(
    decoder, llama_bundle
):
    native = Decoder(llama_bundle, "stand-in")
    for model in (decoder, native):
        samples = timing.measure_speed(model, n_gen=4, T=2, repetitions=1).set_index(
            "order"
        )
        calls = samples[samples["phase"] == "call"]
        parts = samples[samples["phase"].isin(["layer", "head", "host"])]
        assert np.allclose(parts["cpu_ms"].groupby(level=0).sum(), calls["cpu_ms"])
        assert (calls["cpu_ms"] > 0).all()
        steps = parts[parts["phase"] != "host"]
        assert samples[samples["phase"] == "host"]["native_ms"].isna().all()
        table = timing.layer_table(samples.reset_index(), model)
        assert (table["cpu_ms"] > 0).all()
        if model is decoder:
            assert samples["native_ms"].isna().all() and table["native_ms"].isna().all()
            continue
        assert (steps["native_ms"] > 0).all() and (
            steps["native_ms"] < steps["value"]
        ).all()
        assert np.allclose(
            steps["native_ms"].groupby(level=0).sum(), calls["native_ms"]
        )
        assert (table["native_ms"] > 0).all() and (
            table["native_ms"] < table["layer_ms"]
        ).all()


@pytest.mark.shim
def test_a_routed_layer_s_native_time_holds_that_of_its_experts(exports):
    bundle = exports.bundle(exports.checkpoint("zaya"), moe="routed", max_seq_len=16)
    decoder = Decoder(bundle, "stand-in")
    samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
    routers = [model.last_native_ms for model in decoder.layers]
    last = samples[
        (samples["phase"] == "layer") & (samples["order"] == samples["order"].max())
    ]
    experts = np.array(last["native_ms"], float) - routers
    assert (experts > 0).any() and (experts >= -1e-9).all()


def test_a_layer_of_a_shard_of_several_gets_its_share(exports, tiny_llama):
    decoder = Decoder(
        exports.bundle(tiny_llama.path, layers_per_shard=2), "portable", fast=True
    )
    samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
    table = timing.layer_table(samples, decoder)
    timed = (
        samples[(samples["phase"] == "layer") & ~samples["warmup"]]
        .groupby("shard")["value"]
        .median()
    )
    assert table["layer"].tolist() == [0, 1, 2, 3]
    assert np.allclose(table.groupby("shard")["layer_ms"].sum(), timed)


@pytest.mark.parametrize(
    ("wrong", "words"), [({"T": 9}, "t_max"), ({"depth": 30}, "max_seq_len")]
)
def test_what_cannot_be_measured_is_refused(decoder, wrong, words):
    with pytest.raises(InputError, match=words):
        timing.measure_speed(decoder, **wrong)


def test_the_profile_books_every_operation_once(decoder):
    profile = timing.profile(decoder, calls=2)
    assert set(profile["part"]) == {"attention", "mlp", "rest"}
    assert set(profile["layer"]) == {0, 1, 2, 3} and (profile["ms"] > 0).all()
    kinds = {
        step.op.kind for model in decoder.layers for step in model.executable.body.steps
    }
    assert set(profile["op"]) == kinds
