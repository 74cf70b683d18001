"""`miltorch.run_calls` runs several calls of a program, and gives each what it computes alone.

A column of a value is one entry along the axis whose size the program leaves open. A step whose
columns do not depend on each other runs once, on the columns of all calls joined along that axis.
The programs here are one operation on an input x of sizes (2, 6, 4), with the axis of the columns
inserted at index `place`."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from one_op import Op, Ref, Type, close, given, literal, numbers, program, tensor
from refusal import refused

from miltorch import Executable, run_calls

X = Ref("x")
SIZES = 2, 6, 4
KINDS = """transpose softmax concat split reduce_max reduce_mean reduce_sum reshape
slice_by_index mul conv silu""".split()


def executable_of(kind: str, place: int, **attributes) -> Executable:
    """A program of one operation on x with these constant operands; `concat` concatenates x with
    itself. Its results are y0 and, for `split`, y1."""
    shape = [*SIZES[:place], None, *SIZES[place:]]
    operand = {"values": [X, X]} if kind == "concat" else {"x": X}
    constants = {name: literal(value) for name, value in attributes.items()}
    names = ["y0", "y1"] if kind == "split" else ["y0"]
    results = [(name, Type("FLOAT32", (None,))) for name in names]
    op = Op(kind, kind, operand | constants, results)
    inputs = {"x": Type("FLOAT32", tuple(shape))}
    return Executable(program([op], inputs, names))


def inputs_of(place: int, counts: list[int]) -> list[dict[str, torch.Tensor]]:
    """The inputs of a call for each of `counts`, its number of columns."""
    calls = []
    for seed, count in enumerate(counts):
        shape = [*SIZES[:place], count, *SIZES[place:]]
        calls.append({"x": tensor(numbers(*shape, seed=seed))})
    return calls


def run_together(
    executable: Executable, calls: list[dict[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """The outputs of all calls, without states and hooks."""
    return run_calls(executable, calls, [{}] * len(calls), [None] * len(calls))


# --- the same results ---------------------------------------------------------------------


def draw_attributes(draw, kind: str) -> dict:
    """Constant operands that an operation of this kind may have beside x, which has rank 4."""
    axis, axes = st.integers(-4, 3), st.permutations(range(-4, 0))
    if kind == "transpose":
        return {"perm": draw(axes)}
    if kind == "split":
        return {"axis": draw(axis), "num_splits": 2}
    if kind in ("softmax", "concat"):
        return {"axis": draw(axis)}
    if kind.startswith("reduce"):
        some_axes = draw(axes)[: draw(st.integers(1, 3))]
        return {"axes": some_axes, "keep_dims": draw(st.booleans())}
    if kind == "reshape":
        sizes = draw(st.sampled_from([[48], [2, 24], [12, 4], [4, 12], [2, 6, 4]]))
        place_of_columns = draw(st.integers(0, len(sizes)))
        shape = [*sizes[:place_of_columns], -1, *sizes[place_of_columns:]]
        return {"shape": shape}
    if kind == "slice_by_index":
        masks = st.lists(st.booleans(), min_size=4, max_size=4)
        return {
            "begin": [0, 1, 0, 0],
            "end": [1, 2, 2, 2],
            "begin_mask": draw(masks),
            "end_mask": draw(masks),
        }
    if kind == "mul":
        return {"y": numbers(1, 6, 1, 1)}
    if kind == "conv":
        return {"weight": numbers(3, 6, 1, 1)}
    return {}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_together_compute_what_each_computes_alone(kind):
    @given(
        st.data(), st.integers(0, 3), st.lists(st.sampled_from([2, 4, 6]), min_size=2)
    )
    def alike(data, place, counts):
        assume(kind not in ("mul", "conv") or place > 1)  # channels are axis 1
        executable = executable_of(kind, place, **draw_attributes(data.draw, kind))
        calls = inputs_of(place, counts)
        for inputs, outputs in zip(calls, run_together(executable, calls), strict=True):
            for name, expected in executable.run(inputs, {}).items():
                close(outputs[name].numpy(), expected.numpy(), 1e-6)

    alike()


# --- the number of runs -------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation, its constant operands, and the index of the axis of x's columns."""

    kind: str
    attributes: dict
    place: int = 2


WEIGHT, FACTORS = numbers(3, 6, 1, 1), numbers(1, 6, 1, 1)
ALL = [True] * 4  # axes
# each column of the result comes from one column of x
COLUMNWISE = [
    Operation("silu", {}),
    Operation("mul", {"y": FACTORS}),
    Operation("conv", {"weight": WEIGHT}),
    Operation("transpose", {"perm": [0, 2, 1, 3]}),
    Operation("reshape", {"shape": [2, 3, 2, -1, 4]}),
    Operation("softmax", {"axis": 1}),
    Operation("reduce_mean", {"axes": [1], "keep_dims": True}),
    Operation("slice_by_index", {"begin": [0] * 4, "end": [1] * 4, "end_mask": ALL}),
]
# columns meet, or a constant operand has one value for each
MIXING = [
    Operation("mul", {"y": FACTORS}, place=1),
    Operation("prelu", {"alpha": numbers(6)}, place=1),
    Operation("conv", {"weight": WEIGHT}, place=1),
    Operation("reshape", {"shape": [2, -1, 4]}),
    Operation("softmax", {"axis": 2}),
    Operation("reduce_mean", {"axes": [-2], "keep_dims": True}),
    Operation("reduce_mean", {"axes": [-1]}),
    Operation("slice_by_index", {"begin": [1] * 4, "end": [1] * 4, "end_mask": ALL}),
]


def count_runs_for_two_calls(operation: Operation) -> int:
    """How often the operation's function runs for two calls of 6 columns each."""
    executable = executable_of(operation.kind, operation.place, **operation.attributes)
    (step,) = executable.body.steps
    function, runs = step.function, []

    def record(**arguments):
        runs.append(arguments)
        return function(**arguments)

    step.function = record
    run_together(executable, inputs_of(operation.place, [6, 6]))
    return len(runs)


@pytest.mark.parametrize("operation", COLUMNWISE, ids=lambda case: case.kind)
def test_a_step_runs_once_for_all_calls_if_its_columns_are_independent(operation):
    assert count_runs_for_two_calls(operation) == 1


@pytest.mark.parametrize("operation", MIXING, ids=lambda case: case.kind)
def test_a_step_runs_for_each_call_if_it_mixes_columns(operation):
    assert count_runs_for_two_calls(operation) == 2


# --- what joined calls must not change ----------------------------------------------------


def test_too_few_results_are_refused_for_several_calls_too():
    executable = executable_of("split", 2, axis=1, num_splits=1)
    with refused("1 results of 2"):
        run_together(executable, inputs_of(2, [2, 4]))


@pytest.mark.parametrize("shape_of_first_y", [(4,), (1, 4)])
def test_operands_whose_columns_are_along_different_axes_are_not_joined(
    shape_of_first_y,
):
    """x + y, where the open axis of y is not that of x, and y has one shape in each call."""
    op = Op("add", "add", {"x": X, "y": Ref("y")}, [("y0", Type("FLOAT32", (None,)))])
    shapes = {"x": (*SIZES[:2], None, 4), "y": (None,)}
    declared = {name: Type("FLOAT32", shape) for name, shape in shapes.items()}
    executable = Executable(program([op], declared, ["y0"]))
    calls = [call | {"y": tensor(numbers(4))} for call in inputs_of(2, [2, 4])]
    calls[0]["y"] = tensor(numbers(*shape_of_first_y))
    for inputs, outputs in zip(calls, run_together(executable, calls), strict=True):
        assert np.array_equal(outputs["y0"], executable.run(inputs, {})["y0"])


def test_a_hook_replaces_the_columns_of_its_call_alone():
    executable, calls = executable_of("silu", 2), inputs_of(2, [2, 4])

    def zeros(op, outputs):
        return [value * 0 for value in outputs]

    first, second = run_calls(executable, calls, [{}] * 2, [None, zeros])
    assert np.array_equal(first["y0"], executable.run(calls[0], {})["y0"])
    assert not second["y0"].any()
