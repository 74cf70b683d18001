"""Packages of some operations of a program compute what the program does."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import tiny

import miltorch
from workbench.bundle import PRESETS
from workbench.explain.cut import Flow, cut
from workbench.explain.running import evaluate, evaluate_every_value
from workbench.runtime import Settings, load_package

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Call:
    """The values of a program in one call, by name."""

    before: Values
    """Inputs and states."""
    after: Values
    """Every result, and the states as the call leaves them."""

    def operands(self, flow: Flow, ops: Sequence[int]) -> Values:
        """The arrays that some operations read."""
        values = self.after | self.before
        names = flow.operands(ops)
        return {name: values[name] for name in names if np.ndim(values.get(name))}

    def results(self, flow: Flow, ops: Sequence[int]) -> Values:
        """The values after some operations; a state that they do not write has its value
        from before the call."""
        written = {name for index in ops for name in flow.results(index)}
        return self.after | {n: x for n, x in self.before.items() if n not in written}


def two_calls(package, function, program, T) -> list[Call]:
    """Two calls of a program on seeded normals, the second on the states of the first."""
    model = load_package(package, Settings("portable"), function)
    rng, calls = np.random.default_rng(0), []
    states = {n: np.zeros(t.shape, np.float32) for n, t in program.states.items()}
    for _ in range(2):
        inputs = {}
        for name, kind in program.inputs.items():
            shape = [T if n is None else n for n in kind.shape]
            inputs[name] = np.float32(np.float16(rng.standard_normal(shape)))
        after = evaluate_every_value(model, inputs | states)
        calls.append(Call(inputs | states, after))
        states = {name: after[name] for name in states}
    return calls


def parts_of(flow: Flow, step: int) -> list[Sequence[int]]:
    """Indices of operations to cut: the first `step`, the first 2 · `step` and so on, and
    one operation of each kind alone."""
    one_of_kind = {op.kind: [index] for index, op in enumerate(flow.ops)}
    # alone it reads the state before the call
    one_of_kind.pop("read_state", None)
    ends = [*range(step, len(flow.ops), step), len(flow.ops)]
    return [*map(range, ends), *one_of_kind.values()]


def check(package, function, T, folder, step=40):
    """Cuts a program into packages, and compares each with the program on two calls."""
    flow = Flow(miltorch.read(package, function))
    calls = two_calls(package, function, flow.program, T)
    for number, ops in enumerate(parts_of(flow, step)):
        first_arrays = calls[0].operands(flow, ops)
        part = cut(flow, ops, first_arrays, folder / f"{number}.mlpackage")
        model = load_package(part, Settings("portable"))
        for call in calls:
            actual = evaluate(model, call.operands(flow, ops))
            assert_equal_values(actual, call.results(flow, ops))
        if len(ops) == len(flow.ops) and function is None:
            assert weight_bytes(part) == pytest.approx(weight_bytes(package), rel=0.2)


def assert_equal_values(actual: Values, expected: Values) -> None:
    """Some values are there, and those with an expected value equal it bit for bit."""
    assert actual
    for name in actual.keys() & expected.keys():
        assert np.array_equal(actual[name], expected[name], equal_nan=True), name


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
