"""Bundles of several functions compute what one flexible program does, on both runtimes; states
pass from function to function."""

import shutil

import numpy as np
import pytest
import tiny
from circle import wide
from refusal import refused

from workbench import Bundle, Decoder
from workbench.ane import placement
from workbench.check import states
from workbench.export import template
from workbench.runtime import load_shard
from workbench.runtime.coreml import CoreMLModel
from workbench.sweep import timing

PROMPT, MORE = 8, 5  # tokens that T = 4 divides, tokens decoded one by one behind them


@pytest.fixture(scope="module")
def source(exports):
    return exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)


@pytest.fixture(scope="module")
def bundle(exports, source):
    return exports.bundle(source, tokens="1,4", max_seq_len=24)


def test_core_ml_copies_states_between_functions(shimmed, bundle, exports, source):
    """A prompt at T = 4, then single tokens, as with one flexible program; the head has one T."""
    flexible = exports.bundle(source, tokens="1-4", max_seq_len=24)
    one, several = (Decoder(each, "coreml") for each in (flexible, bundle))
    ids = tiny.prompt(90, PROMPT + MORE)
    found, expected = (
        [each.prefill(ids[:PROMPT]), *map(each.decode_one_token, ids[PROMPT:])]
        for each in (several, one)
    )
    assert np.array_equal(found, expected)
    rows, states = (
        {name: state.read(name) for state, name in each.seqs.named_states}
        for each in (one, several)
    )
    assert states.keys() == rows.keys()
    for name in rows:
        assert rows[name].any() and np.array_equal(states[name], rows[name]), name
    loaded = [sorted(model.models) for model in (*several.layers, *several.heads)]
    assert loaded == [[1, 4]] * len(several.layers) + [[1]]


@pytest.mark.slow("the experts are shards, each with a program for each T")
@pytest.mark.parametrize("moe", ["routed", wide("dense")])
def test_a_call_of_another_t_is_padded_to_the_next_function(exports, source, moe):
    g = exports.golden(source, 14)
    decoder = exports.decoder(source, tokens="1,4", max_seq_len=24, moe=moe)
    for sizes in ([1], [3], [2, 4, 1], [4], [3, 1]):
        assert tiny.logits_error(decoder, g, *sizes) < 3e-6
    experts = decoder.experts.models.values() if moe == "routed" else decoder.layers
    assert {T for model in experts for T in model.functions} == {1, 4}


def test_a_slice_write_splits_a_prompt_into_calls_that_need_no_dummies(exports):
    checkpoint = exports.checkpoint("llama")
    decoder = exports.decoder(
        checkpoint, tokens="1,4", kv_write="slice", max_seq_len=16
    )
    g = exports.golden(checkpoint, 11)
    assert tiny.relative(decoder.prefill(g.ids), g.logits[-1]) < 3e-6
    assert decoder.seqs.offsets.tolist() == [11]


def test_a_function_that_writes_wrongly_turns_its_gate_red(exports):
    """The fault is in t4 alone: only calls that run it may show it."""
    decoder = exports.decoder("llama", "declared", tokens="1,4")
    program = decoder.layers[1].runs(4, False)
    execute = program.run_calls

    def shifted(calls, *rest):
        masks = [inputs["kv_write_mask"].roll(1, dims=2) for inputs in calls]
        pairs = zip(calls, masks, strict=True)
        return execute([own | {"kv_write_mask": mask} for own, mask in pairs], *rest)

    program.run_calls = shifted
    wrong = [r for r in states.write_probe(decoder) if not r["right"]]
    places = {(row["layer"], row["T"]) for row in wrong}
    assert places == {(1, 2), (1, 3), (1, 4)}


def test_a_state_that_is_not_copied_turns_a_gate_red(shimmed, bundle, monkeypatch):
    def fresh(self, handle, T):
        if handle.T != T:
            handle.mlstate, handle.T = self.models[T].make_state(), T
        return handle.mlstate

    monkeypatch.setattr(CoreMLModel, "_mlstate", fresh)
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
        load_shard(damaged, shard, "portable")
    with refused("differ|bytes"):
        Bundle.open(tmp_path / "b")


def test_times_of_several_functions_are_samples_of_one_shard(exports):
    decoder = exports.decoder("llama", "declared", tokens="1,4")
    shards = decoder.bundle.manifest.shards
    for T in (1, 4):
        samples = timing.measure_speed(decoder, depth=4, n_gen=8, T=T, repetitions=1)
        layers = samples.loc[samples["phase"] == "layer", "shard"]
        assert set(layers) == {each.name for each in shards if each.kind == "layers"}
        assert (samples["phase"] == "load").sum() == len(shards)


def test_each_function_is_placed_by_itself(bundle):
    one, four, *_ = placement.predicted_placement(bundle)
    assert [one.shard, four.shard] == ["layers_00_00 t1", "layers_00_00 t4"]
    rules = {rule["id"]: rule for rule in four.rules}
    assert "K4" not in {rule["id"] for rule in one.rules}
    # so that it alone keeps nothing off the Neural Engine
    assert rules["K4"]["disputed"]
    assert not {"D1", "D3"} & rules.keys()
