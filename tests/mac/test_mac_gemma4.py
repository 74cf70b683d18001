"""What a device must do for layers that keep a copy of another layer's cache. On a Mac the tests
ask Core ML; elsewhere they ask the stand-in, over which everything else is tested."""

import numpy as np
import pytest
import tiny

from workbench import Decoder
from workbench.bundle.names import K_ROWS, K_STATE, V_ROWS, V_STATE
from workbench.runtime import COMPUTE_UNITS
from workbench.runtime.coreml import compiled_path, compute_plan

RUNTIMES = [
    *(pytest.param("coreml", u, marks=pytest.mark.mac) for u in COMPUTE_UNITS),
    pytest.param("stand-in", "CPU_ONLY", marks=pytest.mark.shim),
]
OWNERS, COPIES = (2, 3), {4: 2, 5: 3}


@pytest.fixture(scope="module")
def bundle(exports):
    return exports.bundle("gemma4_text")


@pytest.mark.slow("exports and compiles a bundle")
@pytest.mark.parametrize("runtime, units", RUNTIMES)
def test_a_shard_may_output_the_rows_that_it_writes_and_the_state_holds_them(
    bundle, runtime, units
):
    decoder = Decoder(bundle, runtime, compute_units=units)
    ids = tiny.prompt(decoder.manifest.dims.V, 3)
    run, rows = decoder.run_calls, {}

    def record(model, *arguments):
        (io,) = run(model, *arguments)
        for name, values in io.items():
            if name.startswith((K_ROWS, V_ROWS)):
                rows[name] = values
        return [io]

    decoder.run_calls = record
    decoder.seqs.advance([ids])
    states = {name: state.read(name) for state, name in decoder.seqs.named_states}
    layers = decoder.manifest.layers
    for layer in (*OWNERS, *COPIES):
        for name, leaf in zip(layers[layer].shared_rows, (K_STATE, V_STATE)):
            written = states[f"layers.{layer}.{leaf}"][:, :, : len(ids)]
            output = np.asarray(rows[name], np.float16)
            assert np.array_equal(written, output), f"layer {layer}, {leaf}"
    # the logits are those of the portable runtime
    decoder.begin()
    expected = Decoder(bundle, "portable").prefill(ids)
    assert tiny.relative(decoder.prefill(ids), expected) < 1.5e-2


@pytest.mark.mac
@pytest.mark.parametrize("layer", sorted(COPIES))
def test_a_shard_that_copies_rows_has_a_compute_plan(bundle, layer):
    Decoder(bundle, "coreml")  # compiles it
    shard = bundle.shards("layers")[layer]
    compiled = compiled_path(bundle, shard)
    placed = compute_plan(bundle.package(shard), compiled, "CPU_AND_NE")
    assert {op.preferred for op in placed} <= {"ane", "cpu", None}
