"""Bundles of several functions compute what one flexible program does, on both runtimes; states
pass from function to function."""

import shutil

import numpy as np
import pytest
import tiny

from workbench import Bundle, Decoder, InputError
from workbench.ane import placement
from workbench.check import states
from workbench.export import template
from workbench.runtime import load_shard
from workbench.runtime.coreml import CoreMLModel
from workbench.sweep import timing

PROMPT, MORE = 8, 5  # tokens that T = 4 divides, tokens decoded one by one behind them


@pytest.fixture(scope="module")
def source(exports):
    return exports.checkpoint("zaya", num_hidden_layers=3, num_experts=2)


@pytest.fixture(scope="module")
def bundle(exports, source):
    return exports.bundle(source, tokens="1,4", max_seq_len=24)


def check_alike(one: Decoder, several: Decoder) -> None:
    """The same logits of a prompt and of single tokens behind it, and the same states after them;
    layers then have the functions of T = 1 and 4, the head that of 1."""
    ids = tiny.prompt(90, PROMPT + MORE)
    for each in (one, several):
        each.begin()
    found, expected = (
        [d.prefill(ids[:PROMPT]), *map(d.decode_one_token, ids[PROMPT:])]
        for d in (several, one)
    )
    assert np.array_equal(found, expected)
    rows, states = (
        {name: state.read(name) for state, name in d.seqs.named_states}
        for d in (one, several)
    )
    assert states.keys() == rows.keys()
    for name in rows:
        assert rows[name].any() and np.array_equal(states[name], rows[name]), name
    if several.is_device:
        loaded = [sorted(m.models) for m in (*several.layers, *several.heads)]
    else:
        models = (*several.layers, *several.heads)
        loaded = [[T for T, _ in m.executables] for m in models]
    assert loaded == [[1, 4]] * len(several.layers) + [[1]]


@pytest.mark.matrix(1, wide=9)
@pytest.mark.parametrize("precision", ["exact", "declared"])
@pytest.mark.parametrize(
    "family, changed, chosen",
    [
        ("zaya", {"num_hidden_layers": 3, "num_experts": 2}, {}),
        ("llama", {}, {"kv_write": "slice", "compress": "int8-tensor"}),
        ("gemma3_text", {}, {"sliding": "ring", "layers_per_shard": 3}),
    ],
)
def test_prefill_at_t_and_decode_at_1_are_those_of_a_flexible_program(
    exports, precision, family, changed, chosen
):
    checkpoint = exports.checkpoint(family, **changed)
    how = {"max_seq_len": 24} | chosen
    check_alike(
        *(
            exports.decoder(checkpoint, precision, tokens=T, **how)
            for T in ("1-4", "1,4")
        )
    )


def test_core_ml_copies_states_between_functions(shimmed, bundle, exports, source):
    flexible = exports.bundle(source, tokens="1-4", max_seq_len=24)
    check_alike(*(Decoder(each, "coreml") for each in (flexible, bundle)))


@pytest.mark.parametrize("runtime", ["portable", "coreml"])
def test_a_state_belongs_to_the_function_that_ran_last(shimmed, bundle, runtime):
    model = load_shard(bundle, bundle.manifest.shards[1], runtime)
    assert model.functions == {1: "t1", 4: "t4"}
    one, other = model.make_state(), model.make_state()
    name, entry = next(iter(model.shard.states.items()))
    value = np.random.default_rng(0).normal(size=entry.shape).astype(np.float16)
    one.write(name, value)
    for T in (4, 1, 4):
        inputs = {
            n: np.zeros([T if k == "T" else k for k in shape], np.float32)
            for n, shape in model.shard.inputs.items()
        }
        model.predict(inputs, one)
        assert np.array_equal(one.read(name), value) and not other.read(name).any()
    assert model.loading_ms["load"] > 0


def test_a_call_of_another_t_is_padded_to_the_next_function(exports, source, bundle):
    g = tiny.golden(exports.hf(source), tiny.prompt(109, 20))
    decoder = Decoder(bundle, "portable", "exact")
    for sizes in ([3], [2, 4, 1], [4]):
        assert tiny.relative(tiny.chained(decoder, g.ids, sizes), g.logits) < 3e-6


def test_a_slice_write_splits_a_prompt_into_calls_that_need_no_dummies(exports):
    checkpoint = exports.checkpoint("llama")
    decoder = exports.decoder(
        checkpoint, tokens="1,4", kv_write="slice", max_seq_len=16
    )
    g = tiny.golden(exports.hf(checkpoint), tiny.prompt(97, 11))
    assert tiny.relative(decoder.prefill(g.ids), g.logits[-1]) < 3e-6
    assert decoder.seqs.offsets.tolist() == [11]


def test_a_function_that_writes_wrongly_turns_its_gate_red(exports, tiny_llama):
    """The fault is in t4 alone: only calls that run it may show it."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, tokens="1,4")
    decoder = Decoder(bundle, "portable")
    program = decoder.layers[1].runs(4, False)
    execute = program.run_calls

    def shifted(calls, *rest):
        masks = [inputs["kv_write_mask"].roll(1, dims=2) for inputs in calls]
        pairs = zip(calls, masks, strict=True)
        return execute([own | {"kv_write_mask": mask} for own, mask in pairs], *rest)

    program.run_calls = shifted
    wrong = [r for r in states.write_probe(decoder) if not r["right"]]
    assert (
        wrong
        and {r["layer"] for r in wrong} == {1}
        and {r["T"] for r in wrong} == {2, 3, 4}
    )


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
    with pytest.raises(InputError, match="no function 't4'"):
        load_shard(damaged, shard, "portable")
    with pytest.raises(InputError, match="differ|bytes"):
        Bundle.open(tmp_path / "b")


def test_times_of_several_functions_are_samples_of_one_shard(exports, tiny_llama):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, tokens="1,4")
    decoder = Decoder(bundle, "portable")
    for T in (1, 4):
        samples = timing.measure_speed(decoder, depth=4, n_gen=8, T=T, repetitions=1)
        assert set(samples.loc[samples["phase"] == "layer", "shard"]) == {
            shard.name for shard in bundle.shards("layers")
        }
        assert (samples["phase"] == "load").sum() == len(bundle.manifest.shards)


def test_each_function_is_placed_by_itself(bundle):
    one, four, *_ = placement.predicted_placement(bundle)
    assert [one.shard, four.shard] == ["layers_00_00 t1", "layers_00_00 t4"]
    rules = {rule["id"]: rule for rule in four.rules}
    assert "K4" not in {rule["id"] for rule in one.rules}
    assert rules["K4"][
        "disputed"
    ]  # so that it alone keeps nothing off the Neural Engine
    assert not {"D1", "D3"} & rules.keys()


@pytest.mark.wide
def test_routed_experts_run_the_function_of_the_call(exports, source):
    g = tiny.golden(exports.hf(source), tiny.prompt(109, 14))
    decoder = exports.decoder(source, tokens="1,4", moe="routed", max_seq_len=16)
    for sizes in ([1], [4], [3, 1]):
        assert tiny.relative(tiny.chained(decoder, g.ids, sizes), g.logits) < 3e-6
    assert {T for m in decoder.experts.models.values() for T in m.functions} == {1, 4}
