"""Which row holds which position, and the masks and write addresses that follow from it."""

import numpy as np
import pytest

from workbench.adopt import arrays
from workbench.adopt.schema import Input

HELD = {
    ("absolute", 3): [0, 1, 2, -1],
    ("ring", 3): [0, 1, 2, -1],
    ("ring", 6): [4, 5, 2, 3],
    ("shift", 3): [0, 1, 2, -1],
    ("shift", 6): [2, 3, 4, 5],
    ("right", 3): [-1, 0, 1, 2],
    ("right", 6): [2, 3, 4, 5],
}


@pytest.mark.parametrize("rule, end", HELD)
def test_rows_hold_positions(rule, end):
    assert arrays.row_positions(rule, 4, end).tolist() == HELD[rule, end]


def test_a_mask_hides_the_future_the_empty_and_what_is_past_the_window():
    entry = Input(kind="mask", blocked=float("-inf"), window=2)
    mask = arrays.mask(entry, 2, 2, 5)
    assert (mask == 0).tolist() == [
        [False, True, True, False, False],
        [False, False, True, True, False],
    ]
    assert np.isneginf(mask[mask != 0]).all()


def test_write_columns_are_one_hot_rows_of_the_tokens():
    columns = arrays.write_columns(Input(kind="write", rows="ring"), 3, 2, 4)
    assert columns.argmax(0).tolist() == [3, 0] and columns.sum() == 2


def test_axes_are_arranged_and_named_again():
    value = np.arange(6).reshape(2, 3)
    there = arrays.arrange(value, "TC", [1, "C", "T", 1])
    assert there.shape == (1, 3, 2, 1) and there[0, 2, 1, 0] == 5
    assert (arrays.named(there, [1, "C", "T", 1], "TC") == value).all()
    assert arrays.named(np.zeros((5, 2, 3)), ["H", "S", "D"], "LHSD").shape == (
        1,
        5,
        2,
        3,
    )
