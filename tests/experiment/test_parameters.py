"""Parameters are Python in a notebook, and the text of `--set` outside it."""

import math

import pytest
from experiment import toy
from hypothesis import given, settings
from hypothesis import strategies as some
from refusal import refused

from workbench.experiment import Experiment, notebook_parameters, parse_value
from workbench.experiment import parameters as under_test
from workbench.experiment.parameters import (
    Parameters,
    parameter_names,
    portable_values,
    value_text,
)
from workbench.experiment.sources import Source

PYTHON = """
import math
from pathlib import Path

SIZE: int = 2 * 32
LENGTHS = [SIZE, SIZE // 2]
a, B = 1e-5, (1, 2)
FOLDER = Path("data")
_hidden = 3


def helper():
    inner = 1
    return inner


RATIO = math.sqrt(16)
"""
VALUES = {"SIZE": 64, "LENGTHS": [64, 32], "a": 1e-5, "B": (1, 2), "RATIO": 4.0}
SCALARS = some.none() | some.booleans() | some.integers() | some.text() | some.floats()
JSON = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=5,
)


def test_the_names_of_a_cell_are_those_that_it_sets():
    names = parameter_names(PYTHON)
    assert sorted(names) == sorted([*VALUES, "FOLDER"])
    assert parameter_names("%matplotlib inline\nX = 1") == ["X"]
    with refused("cell Parameters"):
        parameter_names("X = ")


@pytest.mark.slow("a kernel starts")
def test_a_command_takes_the_values_of_expressions_from_a_kernel(checkout, forked):
    toy.write_notebook(checkout, PYTHON)
    parameters = notebook_parameters("07")
    expected = VALUES | {"B": [1, 2]}  # JSON has no tuples
    assert parameters.values == expected
    assert (
        parameters.fixed.keys() == {"FOLDER"} and "data" in parameters.fixed["FOLDER"]
    )


def test_values_that_are_literals_start_no_kernel(checkout, monkeypatch):
    monkeypatch.setattr(under_test.kernel, "execute", pytest.fail)
    toy.write_notebook(
        checkout, 'A = 1\nB: list[int] = [1, 2]\nC = {"a": None}\nD = -1.5'
    )
    values = {"A": 1, "B": [1, 2], "C": {"a": None}, "D": -1.5}
    assert notebook_parameters("07") == Parameters(values)


def test_a_notebook_takes_its_values_from_the_kernel(checkout):
    toy.write_notebook(checkout, PYTHON)
    values = {}
    exec(PYTHON, values)
    experiment = Experiment(toy.NAME, values | {"SIZE": 16})
    assert experiment.parameters == VALUES | {"SIZE": 16}
    assert experiment.fixed_parameters.keys() == {"FOLDER"}


def same(first, second) -> bool:
    """Whether both are equal, nan being nan."""
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same(first[name], second[name]) for name in first
        )
    return type(first) is type(second) and first == second


@settings(deadline=None)
@given(JSON)
def test_what_a_report_writes_is_read_as_the_same_value(value):
    for default in (value, None):
        assert same(parse_value("NAME", value_text(value, default), default), value)


@pytest.mark.parametrize(
    "text", ['"quoted"', "'", '"', 'say "no"', " x ", "12", "a\nb"]
)
def test_a_text_is_the_parameter_as_given(text):
    assert parse_value("PROMPT", text, "") == text


@pytest.mark.parametrize(
    "text, default, value",
    [("1e-5", 0.5, 1e-5), ("[1e-5]", [0.1], [1e-5]), ("[1, 2]", (3,), (1, 2))],
)
def test_numbers_are_read_as_people_write_them(text, default, value):
    assert parse_value("NAME", text, default) == value


def test_what_is_no_value_is_refused_by_name():
    with refused("--set DAY: found 2026-13-45"):
        parse_value("DAY", "2026-13-45", None)


def test_no_path_of_this_machine_is_written(checkout, tmp_path_factory):
    elsewhere = toy.checkpoint(tmp_path_factory.mktemp("secret") / "checkpoint-500")
    inside = toy.checkpoint(checkout / "data" / "tiny")
    (elsewhere.parent / "prompt.txt").write_text("Hello.")
    values = {"PROMPT": str(elsewhere.parent / "prompt.txt"), "RUNTIME": "auto"}
    source = Source("checkpoint-500", "1234567890")
    for given_path, written in [
        (elsewhere, "checkpoint-500-12345678"),
        (inside, "data/tiny"),
        ("data/tiny", "data/tiny"),
        ("org/Model", "org/Model"),
    ]:
        given_values = values | {"CHECKPOINT": str(given_path)}
        result = portable_values(Parameters(given_values), source)
        assert result["CHECKPOINT"] == written and result["RUNTIME"] == "auto"
        assert result["PROMPT"].startswith("prompt.txt-")
    values = {"PROMPT": "/no path, but a text", "CHECKPOINT": "/nowhere/a"}
    result = portable_values(Parameters(values), Source("a"))
    assert result == {"PROMPT": "/no path, but a text", "CHECKPOINT": "a"}
