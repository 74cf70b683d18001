"""Packages of a program's first operations, and of some alone, compute what the program does."""

import numpy as np
import pytest
import tiny

import miltorch
from workbench.explain.cut import Flow, alone, first
from workbench.explain.running import Call, evaluate, recompute
from workbench.explain.search import operands
from workbench.runtime import open_model


def equal(found, expected):
    for name, value in found.items():
        assert np.array_equal(value, expected[name], equal_nan=True), name


def check(package, function, T, folder, step=8):
    """Two calls of seeded normals: every eighth package of first operations, and one of each
    kind of operation alone."""
    flow = Flow(miltorch.read(package, function))
    whole = open_model(package, "portable", function=function)
    rng, calls = np.random.default_rng(0), []
    states = {n: np.zeros(t.shape, np.float32) for n, t in flow.program.states.items()}
    for _ in range(2):
        inputs = {}
        for name, kind in flow.program.inputs.items():
            shape = [T if n is None else n for n in kind.shape]
            inputs[name] = np.float32(np.float16(rng.standard_normal(shape)))
        call = Call(inputs, states)
        calls.append((call, recompute(whole, call, {})))
        states = {name: calls[-1][1][name] for name in states}
    for last in flow.computed[step::step]:
        model = open_model(first(flow, last, folder / f"{last}.mlpackage"), "portable")
        late = {n for i in flow.computed for n in flow.results(i) if i > last}
        for call, expected in calls:
            before = {name: call.states[name] for name in late & states.keys()}
            equal(evaluate(model, call), expected | before)
    kinds = {flow.ops[index].kind: index for index in flow.computed}
    kinds.pop("read_state", None)  # alone it reads what was there before the call
    for index in kinds.values():
        for call, expected in calls:
            values = expected | call.inputs | call.states
            arrays = operands(flow, [index], values)
            made = alone(flow, [index], arrays, folder / f"{index}-alone.mlpackage")
            found = evaluate(open_model(made, "portable"), Call(arrays, arrays))
            equal({n: value for n, value in found.items() if n in expected}, expected)
            assert found


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", sorted(tiny.DIMS))
def test_every_package_computes_what_the_program_does(exports, family, tmp_path):
    bundle = exports.bundle(exports.checkpoint(family))
    for shard in bundle.manifest.shards:
        if shard.name.startswith(("layers_00", "head")) or len(shard.states) > 2:
            check(bundle.package(shard), None, 3, tmp_path / shard.name)


def test_weights_are_shared(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    flow = Flow(miltorch.read(bundle.package(bundle.manifest.shards[0])))
    made = first(flow, flow.computed[9], tmp_path / "cut.mlpackage")
    (weights,) = made.rglob("*.bin")
    assert weights.stat().st_nlink > 1


def test_one_function_of_several_is_cut(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("qwen2"), tokens="1,4")
    shard = bundle.manifest.shards[0]
    for name, T in shard.functions.items():
        check(bundle.package(shard), name, T, tmp_path / name, step=30)
