"""A cut package shows the values of the whole program, and its states advance as before."""

import numpy as np
import pytest
import tiny

import miltorch
from workbench.explain.cut import SHOWN, Flow, cut, values
from workbench.runtime import open_model

FAMILIES = sorted(tiny.DIMS)
WIDTH = 8


def calls(program, T: int, count: int, seed: int = 0):
    """Inputs of a few calls: seeded normals, writes of rows where masks are expected."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        inputs = {}
        for name, kind in program.inputs.items():
            shape = [T if n is None else n for n in kind.shape]
            value = rng.standard_normal(shape).astype(np.float32)
            inputs[name] = value.astype(np.float16).astype(np.float32)
        yield inputs


def check(package, function, T, path, width=WIDTH):
    flow = Flow(miltorch.read(package, function))
    declared = miltorch.Executable(flow.program)
    uncut = open_model(package, "portable", function=function)
    names = [n for i in flow.computed for n in flow.results(i) if flow.showable(n)]
    names = [n for n in names if n not in flow.program.states]
    assert len(names) > len(flow.computed) / 2
    runs = list(calls(flow.program, T, 2))
    for first in range(0, len(names), width):
        chosen = names[first : first + width]
        package = cut(flow, path / f"{first}.mlpackage", chosen)
        model = open_model(package, "portable", function=function)
        states = uncut.make_state(), model.make_state()
        for inputs in runs:
            before = {n: states[0].raw.read(n) for n in flow.program.states}
            expected = values(declared, inputs, before)
            whole = uncut.predict(inputs, states[0])
            found = model.predict(inputs, states[1])
            for name, value in whole.items():
                assert np.array_equal(found[name], value, equal_nan=True)
            for name in chosen:
                shown = found.get(name, found.get(name + SHOWN))
                assert np.array_equal(shown, expected[name], equal_nan=True), name
            for name in flow.program.states:
                before, after = (state.read(name) for state in states)
                assert np.array_equal(before, after, equal_nan=True)
                assert np.array_equal(before, expected[name], equal_nan=True)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_shows_the_values_of_the_whole_program(exports, family, tmp_path):
    bundle = exports.bundle(exports.checkpoint(family))
    for shard in bundle.manifest.shards:
        if shard.name.startswith(("layers_00", "head")) or len(shard.states) > 2:
            folder = tmp_path / shard.name
            check(bundle.package(shard), None, 3, folder)


def test_weights_are_shared(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    package = bundle.package(bundle.manifest.shards[0])
    flow = Flow(miltorch.read(package))
    made = cut(flow, tmp_path / "cut.mlpackage", flow.results(flow.computed[0]))
    (weights,) = made.rglob("*.bin")
    assert weights.stat().st_nlink > 1


def test_one_function_of_several_is_cut(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("qwen2"), tokens="1,4")
    package = bundle.package(bundle.manifest.shards[0])
    for name, T in bundle.manifest.shards[0].functions.items():
        check(package, name, T, tmp_path / name, width=30)
