"""Calls that run together compute what they compute one after another."""

import numpy as np
import pytest
import tiny

from miltorch import calls
from workbench import Decoder
from workbench.bundle.names import X
from workbench.decode import calls as decode_calls
from workbench.decode.calls import run_layers
from workbench.runtime import portable

SIZES = 1, 3, 2, 4, 1, 2  # tokens of each call
FAMILIES = list(tiny.DIMS)


def call_inputs(decoder) -> tuple[list, list]:
    """Inputs and counts of every call, from the start of a sequence."""
    rng, ios, counts, start = np.random.default_rng(3), [], [], 0
    for size in SIZES:
        counts.append(np.array([size]))
        ios.append(decoder.host.inputs(np.array([start]), counts[-1], size))
        ids = rng.integers(0, decoder.manifest.dims.V, (1, size))
        ios[-1][X] = decoder.plane(decoder.bundle.embed(ids).transpose(0, 2, 1))
        start += size
    return ios, counts


def all_layers(decoder, ios, counts, together: bool):
    """(io of every call after all layers, states, what each call's hook saw)."""
    decoder.begin()
    seen = [[] for _ in ios]

    def hook(call: int):
        return lambda op, outputs: seen[call].append(
            (op.name, [tuple(value.shape) for value in outputs])
        )

    hooks = [hook(call) for call in range(len(ios))]
    for index in range(len(decoder.layers)):
        if together:
            ios = run_layers(decoder, index, ios, counts, hooks)
            continue
        for call, (io, count) in enumerate(zip(ios, counts)):
            with decoder.layers[index].hooked(hooks[call]):
                ios[call] = decoder.run_layers(index, io, count)
    states = {name: state.read(name) for state, name in decoder.named_states}
    return ios, states, seen


@pytest.mark.matrix(10)
@pytest.mark.parametrize("columns", [256, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_together_compute_what_they_do_one_after_another(
    exports, family, columns, monkeypatch
):
    monkeypatch.setattr(calls, "COLUMNS", columns)
    # shards with a matrix state, which would run call by call, run together here
    monkeypatch.setattr(decode_calls, "MATRIX", None)
    bundle = exports.bundle(exports.checkpoint(family), max_seq_len=32)
    decoder = Decoder(bundle, "portable", "exact")
    ios, counts = call_inputs(decoder)
    apart = all_layers(decoder, list(ios), counts, False)
    together = all_layers(decoder, list(ios), counts, True)
    pairs = [(one[X], other[X]) for one, other in zip(apart[0], together[0])]
    pairs += [(value, together[1][name]) for name, value in apart[1].items()]
    for one, other in pairs:
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    assert apart[2] == together[2]


@pytest.mark.parametrize("family", ["qwen3_5_text", "llama"])
def test_shards_with_a_matrix_state_run_call_by_call(exports, family, monkeypatch):
    """A call of `run_calls` for each call, and one for all where no shard has such a
    state."""
    bundle = exports.bundle(exports.checkpoint(family), max_seq_len=32)
    decoder = Decoder(bundle, "portable", "exact")
    ios, counts = call_inputs(decoder)
    numbers = []

    def run_calls(executable, inputs, *operands):
        numbers.append(len(inputs))
        return calls.run_calls(executable, inputs, *operands)

    monkeypatch.setattr(portable, "run_calls", run_calls)
    for index, model in enumerate(decoder.layers):
        numbers.clear()
        ios = run_layers(decoder, index, ios, counts)
        kinds = [kind.name for kind in map(model.shard.kind_of, model.shard.states)]
        assert numbers == ([1] * len(SIZES) if "matrix" in kinds else [len(SIZES)])
        assert ("matrix" in kinds) <= (family == "qwen3_5_text")


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_calls_together_run_each_on_its_own_state(exports, family):
    bundle = exports.bundle(exports.checkpoint(family), max_seq_len=32)
    decoder = Decoder(bundle, "portable", "exact")
    ios, counts = call_inputs(decoder)
    model, rng = decoder.layers[0], np.random.default_rng(0)
    values = []
    for _ in ios:
        shapes = {name: entry.shape for name, entry in model.shard.states.items()}
        values.append(
            {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
        )

    def filled(arrays):
        state = model.make_state()
        for name, array in arrays.items():
            state.write(name, array)
        return state

    own, states = decoder.states[0], [filled(arrays) for arrays in values]
    together = run_layers(decoder, 0, ios, counts, states=states)
    assert decoder.states[0] is own
    for call, state in enumerate(states):
        alone = filled(values[call])
        (io,) = run_layers(decoder, 0, [ios[call]], [counts[call]], None, [alone])
        pairs = [(io[X], together[call][X])]
        pairs += [(alone.read(name), state.read(name)) for name in values[call]]
        for one, other in pairs:
            assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()


def test_what_a_hook_returns_replaces_that_call_s_values_alone(llama_bundle):
    decoder = Decoder(llama_bundle, "portable", "exact")
    ios, counts = call_inputs(decoder)
    plain = run_layers(decoder, 0, ios, counts, [None] * len(ios))
    decoder.begin()
    products = [s.op.name for s in decoder.layers[0].executable.body.steps]
    last = products[-1]
    hooks = [None] * len(ios)
    hooks[2] = lambda op, outputs: [outputs[0] * 2] if op.name == last else None
    changed = run_layers(decoder, 0, ios, counts, hooks)
    for call, (one, other) in enumerate(zip(plain, changed)):
        factor = 2 if call == 2 else 1
        np.testing.assert_array_equal(one[X] * np.float32(factor), other[X])


def test_weights_are_read_for_all_calls_and_states_for_one_after_another(llama_bundle):
    decoder = Decoder(llama_bundle, "portable", "exact")
    stages = calls._stages(decoder.layers[0].executable)
    together = [s.op.kind for stage in stages if stage.axes for s in stage.steps]
    apart = [s.op.kind for stage in stages if not stage.axes for s in stage.steps]
    assert together.count("conv") == 7 and "conv" not in apart
    assert {"read_state", "write_state", "matmul"} <= set(apart)
