"""Timing: every clock is there, warm-ups are apart, parts add up; nothing here judges how fast
anything is."""

from unittest import mock

import numpy as np
import pytest

from workbench import Decoder
from workbench.sweep import timing

PARTS = ["layer", "head", "host"]


@pytest.fixture(scope="module")
def decoder(llama_bundle):
    return Decoder(llama_bundle, "portable", fast=True)


def select_timed(samples, *phases):
    """The rows of these phases, without warm-ups."""
    return samples[samples["phase"].isin(phases) & ~samples["warmup"]]


def test_sequences_follow_until_the_tokens_and_the_seconds_are_through(decoder):
    samples = timing.measure_speed(decoder, n_gen=4, repetitions=1, min_tokens=15)
    calls = select_timed(samples, "call")
    assert len(calls) == 16 and calls["repetition"].nunique() == 4
    # parts of the sequences that were asked for by number
    assert set(samples[samples["phase"] == "layer"]["repetition"]) == {0}
    assert len(select_timed(samples, "tokens_per_s")) == 4
    samples = timing.measure_speed(decoder, n_gen=4, repetitions=1, min_seconds=0.5)
    seconds = samples[samples["phase"] == "call"]["elapsed_s"]
    assert seconds.is_monotonic_increasing and 0.5 <= seconds.max() < 10


@pytest.mark.shim
def test_a_device_ramps_up_before_anything_is_timed(llama_bundle, monkeypatch):
    counts = {}
    for runtime in ("portable", "stand-in"):
        decoder = Decoder(llama_bundle, runtime)
        spy = mock.Mock(wraps=decoder.layer_shards[0].predict_calls)
        monkeypatch.setattr(decoder.layer_shards[0], "predict_calls", spy)
        samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
        calls = sum(len(call.args[0]) for call in spy.call_args_list)
        counts[runtime] = calls - (samples["phase"] == "call").sum()
    assert counts == {"portable": 0, "stand-in": timing.RAMP_CALLS}


@pytest.mark.shim
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_times_of_the_parts_add_up_and_only_core_ml_has_its_own(llama_bundle, runtime):
    decoder = Decoder(llama_bundle, runtime)
    samples = timing.measure_speed(decoder, n_gen=4, T=2, repetitions=2)
    calls = samples[samples["phase"] == "call"].set_index("order")
    assert len(calls) == 2 * (timing.WARMUP_CALLS + 2) and calls.index.is_unique
    assert calls["warmup"].sum() == 2 * timing.WARMUP_CALLS
    spent = select_timed(samples, "call").groupby("repetition")["value"].sum()
    assert np.allclose(select_timed(samples, "tokens_per_s")["value"], 4 / spent * 1e3)
    parts = samples[samples["phase"].isin(PARTS)]
    sums = parts.groupby("order")[["value", "cpu_ms", "native_ms"]].sum()
    assert np.allclose(sums[["value", "cpu_ms"]], calls[["value", "cpu_ms"]])
    # a thread's clock and the wall's may differ by a step
    assert calls["cpu_ms"].between(0, calls["value"] + 1, "neither").all()
    table = timing.layer_table(samples, decoder)
    assert (table["cpu_ms"] > 0).all()
    if runtime == "portable":
        assert samples["native_ms"].isna().all() and table["native_ms"].isna().all()
        return
    steps = parts[parts["phase"] != "host"]
    assert samples[samples["phase"] == "host"]["native_ms"].isna().all()
    assert steps["native_ms"].between(0, steps["value"], "neither").all()
    assert np.allclose(sums["native_ms"], calls["native_ms"])
    assert table["native_ms"].between(0, table["layer_ms"], "neither").all()


def test_a_layer_of_a_shard_of_several_gets_its_share(exports, tiny_llama):
    bundle = exports.bundle(tiny_llama.path, layers_per_shard=2)
    decoder = Decoder(bundle, "portable", fast=True)
    samples = timing.measure_speed(decoder, n_gen=2, repetitions=1)
    table = timing.layer_table(samples, decoder)
    medians = select_timed(samples, "layer").groupby("shard")["value"].median()
    assert table["layer"].tolist() == [0, 1, 2, 3]
    assert np.allclose(table.groupby("shard")["layer_ms"].sum(), medians)


def test_the_profile_books_every_operation_once(decoder):
    profile = timing.profile(decoder, calls=2)
    assert set(profile["part"]) == {"attention", "mlp", "rest"}
    assert (profile["ms"] > 0).all()
    assert {"self_attn.q_proj", "mlp.up_proj", "residual"} <= set(profile["module"])
    steps = [
        step for model in decoder.layer_shards for step in model.executable.body.steps
    ]
    assert set(profile["op"]) == {step.op.kind for step in steps}


def test_the_first_prefill_is_never_timed(decoder):
    """It compiles; with one sequence the log says nothing of the prompt's speed."""
    for repetitions, count in ((1, 0), (3, 2)):
        samples = timing.measure_speed(
            decoder, depth=4, n_gen=1, repetitions=repetitions
        )
        assert len(select_timed(samples, "prefill")) == count
        assert (samples["phase"] == "prefill").sum() == repetitions
