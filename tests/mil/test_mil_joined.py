"""A step that runs once for several calls gives each of them what it computes alone."""

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from one_op import Op, Ref, Type, close, given, literal, numbers, program, tensor
from refusal import refused

from miltorch import Executable, run_calls

X = Ref("x")
SIZES = 2, 6, 4
ALL = [True] * 4


def draw_attributes(draw, kind):
    """Arguments that a program may have beside x."""
    axis, axes = st.integers(-4, 3), st.permutations(range(-4, 0))
    if kind == "transpose":
        return {"perm": draw(axes)}
    if kind in ("softmax", "concat", "split"):
        parts = {"num_splits": 2} if kind == "split" else {}
        return {"axis": draw(axis)} | parts
    if kind.startswith("reduce"):
        some = draw(axes)[: draw(st.integers(1, 3))]
        return {"axes": some, "keep_dims": draw(st.booleans())}
    if kind == "reshape":
        sizes = draw(st.sampled_from([[48], [2, 24], [12, 4], [4, 12], [2, 6, 4]]))
        place = draw(st.integers(0, len(sizes)))
        return {"shape": [*sizes[:place], -1, *sizes[place:]]}
    if kind == "slice_by_index":
        masks = st.lists(st.booleans(), min_size=4, max_size=4)
        bounds = {"begin": [0, 1, 0, 0], "end": [1, 2, 2, 2]}
        return bounds | {"begin_mask": draw(masks), "end_mask": draw(masks)}
    if kind == "mul":
        return {"y": numbers(1, 6, 1, 1)}
    return {"weight": numbers(3, 6, 1, 1)} if kind == "conv" else {}


KINDS = """transpose softmax concat split reduce_max reduce_mean reduce_sum reshape
slice_by_index mul conv silu""".split()


def executable_of(kind, place, **attributes):
    shape = [*SIZES[:place], None, *SIZES[place:]]
    operand = {"values": [X, X]} if kind == "concat" else {"x": X}
    arguments = {name: literal(value) for name, value in attributes.items()}
    results = [
        (f"y{i}", Type("FLOAT32", (None,))) for i in range(1 + (kind == "split"))
    ]
    op = Op(kind, kind, operand | arguments, results)
    inputs = {"x": Type("FLOAT32", tuple(shape))}
    return Executable(program([op], inputs, [name for name, _ in results]))


def inputs_of(place, counts):
    """The inputs of a call for each of `counts`, its number of columns."""
    shapes = [[*SIZES[:place], count, *SIZES[place:]] for count in counts]
    return [{"x": tensor(numbers(*s, seed=i))} for i, s in enumerate(shapes)]


def run_together(executable, calls):
    return run_calls(executable, calls, [{}] * len(calls), [None] * len(calls))


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


@pytest.mark.parametrize(
    "kind, attributes, place, times",
    [
        ("silu", {}, 2, 1),
        ("mul", {"y": numbers(1, 6, 1, 1)}, 2, 1),
        ("mul", {"y": numbers(1, 6, 1, 1)}, 1, 2),
        ("prelu", {"alpha": numbers(6)}, 1, 2),
        ("conv", {"weight": numbers(3, 6, 1, 1)}, 2, 1),
        ("conv", {"weight": numbers(3, 6, 1, 1)}, 1, 2),
        ("transpose", {"perm": [0, 2, 1, 3]}, 2, 1),
        ("reshape", {"shape": [2, 3, 2, -1, 4]}, 2, 1),
        ("reshape", {"shape": [2, -1, 4]}, 2, 2),
        ("softmax", {"axis": 1}, 2, 1),
        ("softmax", {"axis": 2}, 2, 2),
        ("reduce_mean", {"axes": [1], "keep_dims": True}, 2, 1),
        ("reduce_mean", {"axes": [-2], "keep_dims": True}, 2, 2),
        ("reduce_mean", {"axes": [-1]}, 2, 2),
        ("slice_by_index", {"begin": [0] * 4, "end": [1] * 4, "end_mask": ALL}, 2, 1),
        ("slice_by_index", {"begin": [1] * 4, "end": [1] * 4, "end_mask": ALL}, 2, 2),
    ],
)
def test_a_step_runs_once_for_all_calls_unless_it_mixes_columns(
    kind, attributes, place, times
):
    executable, runs = executable_of(kind, place, **attributes), []
    (step,) = executable.body.steps
    function = step.function

    def counted(**arguments):
        runs.append(arguments)
        return function(**arguments)

    step.function = counted
    run_together(executable, inputs_of(place, (6, 6)))
    assert len(runs) == times


def test_too_few_results_are_refused_for_several_calls_too():
    executable = executable_of("split", 2, axis=1, num_splits=1)
    with refused("1 results of 2"):
        run_together(executable, inputs_of(2, (2, 4)))


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_columns_along_different_axes_stay_apart(shape):
    op = Op("add", "add", {"x": X, "y": Ref("y")}, [("y0", Type("FLOAT32", (None,)))])
    shapes = {"x": (*SIZES[:2], None, 4), "y": (None,)}
    inputs = {name: Type("FLOAT32", shape) for name, shape in shapes.items()}
    executable = Executable(program([op], inputs, ["y0"]))
    calls = [call | {"y": tensor(numbers(4))} for call in inputs_of(2, (2, 4))]
    calls[0]["y"] = tensor(numbers(*shape))
    for inputs, outputs in zip(calls, run_together(executable, calls), strict=True):
        assert np.array_equal(outputs["y0"], executable.run(inputs, {})["y0"])


def test_a_hook_may_replace_the_columns_of_its_call():
    executable, calls = executable_of("silu", 2), inputs_of(2, (2, 4))

    def zeros(op, outputs):
        return [value * 0 for value in outputs]

    first, second = run_calls(executable, calls, [{}] * 2, [None, zeros])
    assert np.array_equal(first["y0"], executable.run(calls[0], {})["y0"])
    assert not second["y0"].any()
