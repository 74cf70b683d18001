"""Which row holds which position, and the masks, write addresses and axes that follow from it."""

import numpy as np
import pytest

from workbench.bundle import foreign
from workbench.bundle.foreign import Input

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
    positions = foreign.row_positions(rule, 4, end)
    assert positions.tolist() == HELD[rule, end]
    rows = foreign.logical_rows(rule, 4, end)
    assert sorted(rows) == [0, 1, 2, 3]  # no content is lost, in empty rows either
    held = positions >= 0
    assert (rows[held] == positions[held] % 4).all()


def test_a_mask_hides_the_future_the_empty_and_what_is_past_the_window():
    entry = Input(kind="mask", axes=["T", "S"], blocked=float("-inf"), window=2)
    mask = foreign.visible(entry, 2, 2, 5)
    assert (mask == 0).tolist() == [
        [False, True, True, False, False],
        [False, False, True, True, False],
    ]
    assert np.isneginf(mask[mask != 0]).all()


def test_write_columns_are_one_hot_rows_of_the_tokens():
    entry = Input(kind="write", axes=["S", "T"], rows="ring")
    columns = foreign.written(entry, 3, 2, 4)
    assert columns.argmax(0).tolist() == [3, 0] and columns.sum() == 2


def test_axes_are_arranged_and_named_again():
    value = np.arange(6).reshape(2, 3)
    there = foreign.arrange(value, "TC", [1, "C", "T", 1])
    assert there.shape == (1, 3, 2, 1) and there[0, 2, 1, 0] == 5
    assert (foreign.named(there, [1, "C", "T", 1], "TC") == value).all()
    one_plane = foreign.named(np.zeros((5, 2, 3)), ["H", "S", "D"], "LHSD")
    assert one_plane.shape == (1, 5, 2, 3)
