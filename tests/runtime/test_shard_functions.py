"""Bundles of several functions compute the results of one flexible program, on both runtimes;
states are copied from function to function."""

import shutil

import numpy as np
import pytest
import tiny
from circle import wide
from refusal import refused

from workbench import Bundle, Decoder
from workbench.check import states
from workbench.exporter import template
from workbench.runtime import Settings, load_shard
from workbench.runtime.coreml import CoreMLState
from workbench.sweep import timing

# tokens of a prompt, which T = 4 divides, and tokens that are decoded one by one after it
PROMPT, MORE = 8, 5


@pytest.fixture(scope="module")
def source(exports):
    """One layer has every kind of state and two experts."""
    return exports.checkpoint("zaya", num_hidden_layers=1, num_experts=2)


@pytest.fixture(scope="module")
def bundle(exports, source):
    return exports.bundle(source, tokens="1,4", max_seq_len=24)


def test_core_ml_copies_states_between_functions(shimmed, bundle, exports, source):
    """A prompt at T = 4, then single tokens, as with one flexible program; the head has one T."""
    flexible = exports.bundle(source, tokens="1-4", max_seq_len=24)
    one, several = (Decoder(exported, "coreml") for exported in (flexible, bundle))
    ids = tiny.prompt(90, PROMPT + MORE)
    logits, expected = (
        [decoder.prefill(ids[:PROMPT]), *map(decoder.decode_one_token, ids[PROMPT:])]
        for decoder in (several, one)
    )
    assert np.array_equal(logits, expected)
    rows, states = (
        {name: state.read(name) for state, name in decoder.seqs.named_states}
        for decoder in (one, several)
    )
    assert states.keys() == rows.keys()
    for name in rows:
        assert rows[name].any() and np.array_equal(states[name], rows[name]), name
    loaded = [
        sorted(model.loaded_functions)
        for model in (*several.layer_shards, *several.heads)
    ]
    assert loaded == [[1, 4]] * len(several.layer_shards) + [[1]]


@pytest.mark.slow("the experts are shards, each with a program for each T")
@pytest.mark.parametrize("moe", ["routed", wide("dense")])
def test_a_call_of_another_t_is_padded_to_the_next_function(exports, source, moe):
    g = exports.golden(source, 14)
    decoder = exports.decoder(source, tokens="1,4", max_seq_len=24, moe=moe)
    for sizes in ([1], [3], [2, 4, 1], [4], [3, 1]):
        assert tiny.logits_error(decoder, g, *sizes) < 3e-6
    experts = (
        decoder.experts.models.values() if moe == "routed" else decoder.layer_shards
    )
    assert {T for model in experts for T in model.function_names} == {1, 4}


def test_a_state_that_is_not_copied_turns_a_gate_red(shimmed, bundle, monkeypatch):
    def move_without_values(self, T):
        if self.T != T:
            self.mlstate, self.T = self.model.loaded_functions[T].make_state(), T

    monkeypatch.setattr(CoreMLState, "move_to", move_without_values)
    gates = states.state_gates(Decoder(bundle, "coreml"))
    assert {g.name: g.verdict for g in gates}["write_address"] == "RED"


def test_every_function_is_checked_against_the_manifest(
    exports, source, bundle, tmp_path
):
    shutil.copytree(bundle.root, tmp_path / "b")
    damaged = Bundle.open(tmp_path / "b")
    shard = damaged.manifest.shards[0]
    path = damaged.package(shard) / template.MODEL
    model = template.read_package(damaged.package(shard))
    del model.mlProgram.functions["t4"]
    path.write_bytes(template.serialize(model))
    with refused("no function 't4'"):
        load_shard(damaged, shard, Settings("portable"))
    with refused("differ|bytes"):
        Bundle.open(tmp_path / "b")


def test_times_of_several_functions_are_samples_of_one_shard(exports):
    decoder = exports.decoder("llama", "declared", tokens="1,4")
    shards = decoder.bundle.manifest.shards
    for T in (1, 4):
        samples = timing.measure_speed(decoder, depth=4, n_gen=8, T=T, repetitions=1)
        layers = samples.loc[samples["phase"] == "layer", "shard"]
        assert set(layers) == {shard.name for shard in shards if shard.kind == "layers"}
        assert (samples["phase"] == "load").sum() == len(shards)
