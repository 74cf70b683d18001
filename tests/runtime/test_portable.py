"""A runtime refuses bundles whose bundle.json and packages disagree, and positions past the cache;
it then writes nothing."""

import numpy as np
import pytest
import tiny
from refusal import refused

import miltorch
from workbench import Decoder
from workbench.runtime import interface

ROWS = 32  # of the cache of every bundle here


@pytest.fixture
def bundle(exports):
    return exports.bundle("llama")


V_STATE = "layers.0.v_state"
INPUTS, STATES = "shards/0/inputs", "shards/0/states"
CHANGES = {  # words of the refusal → place in bundle.json, change
    "inputs of shard": (INPUTS, tiny.without("rope_cos")),
    "inputs of shard.*y": (f"{INPUTS}/y", [1]),
    "outputs of shard": ("shards/0/outputs", lambda named: {"y": named["hidden"]}),
    "states of shard": (STATES, tiny.without(V_STATE)),
    V_STATE: (f"{STATES}/{V_STATE}/shape", [1, 2, 31, 32]),
    "attn_mask": (f"{INPUTS}/attn_mask/3", 128),
    "T from 1 to 9": ("options/tokens", "1-9"),
}


@pytest.mark.matrix(6, wide=8)
@pytest.mark.parametrize("runtime", ["portable", "coreml"])
@pytest.mark.parametrize("words, change", CHANGES.items())
def test_a_manifest_that_disagrees_with_its_package_is_refused_on_loading(
    shimmed, bundle, tmp_path, words, change, runtime
):
    """On coreml, over the shim, before anything is compiled."""
    changed = tiny.edited_copy(bundle, tmp_path / "b", change)
    with refused(words):
        Decoder(changed, runtime)
    assert not (tmp_path / ".b.compiled").exists()


def test_an_input_of_another_dtype_is_refused(exports):
    bundle = exports.bundle("llama", kv_write="slice")
    shard = bundle.shards("layers")[0]
    program = miltorch.read(bundle.package(shard))
    program.inputs["pos"] = miltorch.Type("FLOAT16", (1,))
    with refused("INT32"):
        interface.check_interface(shard, program, 4)


@pytest.mark.matrix(4, wide=12)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("position", [ROWS, ROWS + 90, 1_200_000, -ROWS - 1])
@pytest.mark.parametrize("T", [1, 2])
def test_a_position_past_the_cache_is_refused_and_nothing_is_written(
    exports, fast, position, T
):
    bundle = exports.bundle("llama", kv_write="slice")
    decoder = Decoder(bundle, "portable", fast=fast)
    decoder.prefill([1, 2, 3])
    named = decoder.seqs.named_states
    before = [state.read(name) for state, name in named]
    model = decoder.layer_shards[0]
    inputs = tiny.make_inputs(model.shard, T)
    inputs["pos"] = np.array([position], np.int32)
    with refused("an update of shape"):
        model.predict(inputs, named[0][0])
    for (state, name), value in zip(named, before, strict=True):
        assert np.array_equal(state.read(name), value)
