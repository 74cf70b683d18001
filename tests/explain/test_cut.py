"""Packages of some operations of a program compute what the program does."""

from itertools import cycle

import numpy as np
import pytest
import tiny

import miltorch
from workbench.bundle import PRESETS
from workbench.explain.cut import Flow, cut
from workbench.explain.running import evaluate, evaluate_every_value
from workbench.runtime import Settings, load_package


def check(package, function, T, folder, step=40):
    """Cuts a program, and compares each package with the program on two calls of seeded
    normals: packages of its first operations, and one of each kind of operation alone."""
    flow = Flow(miltorch.read(package, function))
    whole = load_package(package, Settings("portable"), function)
    rng, calls = np.random.default_rng(0), []
    states = {n: np.zeros(t.shape, np.float32) for n, t in flow.program.states.items()}
    for _ in range(2):
        inputs = {}
        for name, kind in flow.program.inputs.items():
            shape = [T if n is None else n for n in kind.shape]
            inputs[name] = np.float32(np.float16(rng.standard_normal(shape)))
        after = evaluate_every_value(whole, inputs | states)
        calls.append((inputs | states, after))
        states = {name: after[name] for name in states}
    kinds = {op.kind: [index] for index, op in enumerate(flow.ops)}
    kinds.pop("read_state", None)  # alone it reads what was there before the call
    ends = [*range(step, len(flow.ops), step), len(flow.ops)]
    firsts = [range(end) for end in ends]
    for number, ops in enumerate([*firsts, *kinds.values()]):
        written = {name for index in ops for name in flow.results(index)}
        part = None
        for before, after in calls:
            values = after | before
            operands = flow.operands(ops)
            arrays = {n: values[n] for n in operands if np.ndim(values.get(n))}
            part = part or cut(flow, ops, arrays, folder / f"{number}.mlpackage")
            actual = evaluate(load_package(part, Settings("portable")), arrays)
            assert actual
            unwritten = {n: x for n, x in before.items() if n not in written}
            expected = after | unwritten
            for name in actual.keys() & expected.keys():
                assert np.array_equal(actual[name], expected[name], equal_nan=True), (
                    name
                )
        if len(ops) == len(flow.ops) and function is None:
            assert weight_bytes(part) == pytest.approx(weight_bytes(package), rel=0.2)


def weight_bytes(package) -> int:
    return sum(file.stat().st_size for file in package.rglob("*.bin"))


@pytest.mark.slow("exports a bundle and cuts its programs")
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("family", "compress"), list(zip(sorted(tiny.DIMS), cycle(PRESETS)))
)
def test_every_package_computes_what_the_program_does(
    exports, family, compress, tmp_path
):
    """And keeps its weights compressed."""
    bundle = exports.bundle(family, compress=compress)
    for shard in bundle.manifest.shards:
        if shard.name.startswith(("layers_00", "head")) or len(shard.states) > 2:
            check(bundle.package(shard), None, 3, tmp_path / shard.name)


def test_one_function_of_several_is_cut(exports, tmp_path):
    bundle = exports.bundle("qwen2", tokens="1,4")
    shard = bundle.manifest.shards[0]
    for name, T in shard.functions.items():
        check(bundle.package(shard), name, T, tmp_path / name, step=60)
