"""The counter of tokens."""

import pytest
import size

LONG = "x = 1; " * 40


@pytest.mark.parametrize(
    ("source", "tokens", "lines"),
    [
        ('"""A module."""\n\n\ndef f():\n    """Doc."""\n    return 1  # why\n', 7, 2),
        ("x = (\n    1\n)\n", 5, 3),
        (f'x = "{LONG}"\n', 2 + 2 + 4 * 40, 1),  # counted as the code that it holds
        (f'"""{LONG}"""\n', 0, 0),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(source, tokens, lines):
    assert size.measure_python(source) == (tokens, lines)


def test_a_notebook_counts_its_code_cells_alone():
    text = """{"cells": [{"cell_type": "markdown", "source": ["# words"]},
    {"cell_type": "code", "source": ["%matplotlib inline\\n", "x = 1"]}]}"""
    assert size.measure_notebook(text) == (4, 2)
