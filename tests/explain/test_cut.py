"""A package of some operations of a program, as `explain.cut.cut` writes it, computes for them
what the whole program does, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import tiny

import miltorch
from workbench.bundle import PRESETS
from workbench.explain.cut import Flow, cut
from workbench.explain.running import evaluate, evaluate_every_value
from workbench.runtime import Settings, load_package

Values = dict[str, np.ndarray]
"""Arrays by the names that they have in the program."""


@dataclass(frozen=True)
class Call:
    """The values of a program in one call.

    Attributes:
        before: inputs and states.
        after: every result, and the states as the call leaves them.
    """

    before: Values
    after: Values

    def operands(self, flow: Flow, ops: Sequence[int]) -> Values:
        """The arrays that the operations at the indices `ops` read and do not compute.
        Scalars are left out, and so are constants, which belong to no call."""
        # a state that the call changes is read as it was before the call
        values = self.after | self.before
        names = flow.operands(ops)
        return {name: values[name] for name in names if np.ndim(values.get(name))}

    def results(self, flow: Flow, ops: Sequence[int]) -> Values:
        """The values after the operations at the indices `ops`; a state that they do not
        write has its value from before the call."""
        written = {name for index in ops for name in flow.results(index)}
        unwritten = {
            name: value for name, value in self.before.items() if name not in written
        }
        return self.after | unwritten


def run_two_calls(
    package: Path, function: str | None, program: miltorch.Program, T: int
) -> list[Call]:
    """Two calls of T tokens on seeded normal draws. The first starts from states of zeros,
    the second from those that the first leaves."""
    model = load_package(package, Settings("portable"), function)
    rng, calls = np.random.default_rng(0), []
    states = {
        name: np.zeros(declared.shape, np.float32)
        for name, declared in program.states.items()
    }
    for _ in range(2):
        inputs = {}
        for name, declared in program.inputs.items():
            shape = [T if size is None else size for size in declared.shape]
            inputs[name] = np.float32(np.float16(rng.standard_normal(shape)))
        after = evaluate_every_value(model, inputs | states)
        calls.append(Call(inputs | states, after))
        states = {name: after[name] for name in states}
    return calls


def choose_cuts(flow: Flow, step: int) -> list[Sequence[int]]:
    """Indices of the operations of every package to cut: the first `step` operations, the
    first 2 · `step` and so on up to all of them, then the last one of each kind alone."""
    ends = [*range(step, len(flow.ops), step), len(flow.ops)]
    beginnings = [range(end) for end in ends]
    last_of_kind = {op.kind: [index] for index, op in enumerate(flow.ops)}
    # alone, it reads the state as it is before the call, also where the program reads it
    # after a write
    last_of_kind.pop("read_state", None)
    return [*beginnings, *last_of_kind.values()]


def assert_cuts_compute_the_same(
    package: Path, function: str | None, T: int, folder: Path, step: int = 40
) -> None:
    """Cuts a program into packages in `folder`, and compares each with the whole program on
    two calls of T tokens. Where a package has all operations, its weights must also take as
    many bytes as the program's, within 20%: they stay compressed."""
    flow = Flow(miltorch.read(package, function))
    calls = run_two_calls(package, function, flow.program, T)
    for number, ops in enumerate(choose_cuts(flow, step)):
        first_arrays = calls[0].operands(flow, ops)
        part = cut(flow, ops, first_arrays, folder / f"{number}.mlpackage")
        model = load_package(part, Settings("portable"))
        for call in calls:
            actual = evaluate(model, call.operands(flow, ops))
            assert_equal_values(actual, call.results(flow, ops))
        # a package with several functions stores the weights of all of them
        if len(ops) == len(flow.ops) and function is None:
            assert weight_bytes(part) == pytest.approx(weight_bytes(package), rel=0.2)


def assert_equal_values(actual: Values, expected: Values) -> None:
    """There is a value, and each that has an expected value equals it bit for bit."""
    assert actual
    for name in actual.keys() & expected.keys():
        assert np.array_equal(actual[name], expected[name], equal_nan=True), name


def weight_bytes(package: Path) -> int:
    return sum(file.stat().st_size for file in package.rglob("*.bin"))


@pytest.mark.slow("exports a bundle and cuts its programs")
@pytest.mark.matrix(1, wide=1)
# every family once, with the presets in turn
@pytest.mark.parametrize(
    ("family", "compress"), list(zip(sorted(tiny.DIMS), cycle(PRESETS)))
)
def test_every_package_computes_what_the_program_does(
    exports, family, compress, tmp_path
):
    """For the first layers, the head, and shards with states other than K and V."""
    bundle = exports.bundle(family, compress=compress)
    for shard in bundle.manifest.shards:
        if shard.name.startswith(("layers_00", "head")) or len(shard.states) > 2:
            package, folder = bundle.package(shard), tmp_path / shard.name
            assert_cuts_compute_the_same(package, None, 3, folder)


def test_one_function_of_several_is_cut(exports, tmp_path):
    bundle = exports.bundle("qwen2", tokens="1,4")
    shard = bundle.manifest.shards[0]
    package = bundle.package(shard)
    for name, T in shard.functions.items():
        assert_cuts_compute_the_same(package, name, T, tmp_path / name, step=60)
