"""Which row holds which position, and the masks that follow from it."""

import numpy as np
import pytest

from workbench.bundle.foreign import INPUTS, Foreign, Function, Part, Tensor

HELD = {
    ("ring", 3): [0, 1, 2, None],
    ("ring", 6): [4, 5, 2, 3],
    ("shift", 3): [0, 1, 2, None],
    ("shift", 6): [2, 3, 4, 5],
    ("right", 3): [None, 0, 1, 2],
    ("right", 6): [2, 3, 4, 5],
}


def foreign(rule: str) -> Foreign:
    return Foreign(
        parts=[Part(package="p")],
        tensors={},
        functions=[Function()],
        moves={} if rule == "ring" else {4: rule},
    )


@pytest.mark.parametrize("rule, end", HELD)
def test_rows_hold_positions(rule, end):
    positions = foreign(rule).positions(4, end).tolist()
    assert [None if p == end else p for p in positions] == HELD[rule, end]
    up = foreign(rule).moved(4, end)
    held = [(row, p) for row, p in enumerate(positions) if p < end]
    assert all((row + up) % 4 == p % 4 for row, p in held)


def test_a_mask_hides_the_future_the_empty_and_what_is_past_the_window():
    entry = Tensor(role="mask", axes="TS", blocked=float("-inf"), window=2)
    at = np.array([2, 3])
    away = at[:, None] - foreign("ring").positions(5, 4)
    mask = INPUTS["mask"].value(entry, at, away)
    assert (mask == 0).tolist() == [
        [False, True, True, False, False],
        [False, False, True, True, False],
    ]
    assert np.isneginf(mask[mask != 0]).all()
