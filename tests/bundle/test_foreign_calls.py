"""Which functions of another exporter's packages run for the tokens of a call."""

import pytest

from workbench.bundle.foreign import Foreign, Function, Part

ONE, FOUR = Function(name="decode"), Function(name="verify", t_min=4, t_max=4)
UP_TO_FOUR = Function(name="any", t_max=4)
WITH_STATE = Part(package="a.mlpackage", state=0)


def foreign(*functions: Function, parts=(WITH_STATE,)) -> Foreign:
    return Foreign(parts=parts, roles={}, functions=functions)


@pytest.mark.parametrize(
    "functions, expected",
    [([UP_TO_FOUR], [(3, 2), (5, 4)]), ([ONE, FOUR], [(3, 1), (4, 1), (5, 4)])],
)
def test_no_call_goes_on_past_the_last_row_of_a_ring(functions, expected):
    """Of 5 rows; position 3 is in row 3, position 5 in row 0."""
    calls = foreign(*functions).calls(3, 6, ring_rows=5)
    assert [(3 + tokens[0], len(tokens)) for _, tokens in calls] == expected


def test_without_a_ring_calls_are_as_long_as_functions_take():
    calls = foreign(UP_TO_FOUR).calls(3, 6)
    assert [len(tokens) for _, tokens in calls] == [4, 2]


def test_a_package_without_a_state_runs_the_function_of_the_call():
    both = Part(package="b.mlpackage", functions=("decode", "verify"))
    first = Part(package="c.mlpackage", functions=("decode", "other"))
    only = Part(package="d.mlpackage")
    described = foreign(ONE, FOUR, parts=(WITH_STATE, both, first, only))
    assert [described.functions_of(part) for part in described.parts] == [
        ["decode", "verify"],
        ["decode", "verify"],
        ["decode", None],
        [None],
    ]
    assert described.function_of(both, FOUR) == "verify"
    assert described.function_of(first, FOUR) is None
