"""Tokens are cut into calls that the shards of a bundle take."""

import pytest

from workbench.bundle.tiling import Tiling

CALLS = [  # option tokens, whether calls have dummies, count, tokens of each call, its columns
    ("1-4", True, 10, [4, 4, 2], [4, 4, 2]),
    ("4", True, 10, [4, 4, 2], [4, 4, 4]),
    ("1,8", True, 10, [8, 2], [8, 8]),
    ("1,8", False, 10, [8, 1, 1], [8, 1, 1]),
    ("1,2,4", False, 7, [4, 2, 1], [4, 2, 1]),
]


@pytest.mark.parametrize("tokens, takes_dummies, count, sizes, widths", CALLS)
def test_calls_follow_one_another_and_fill_fixed_shapes(
    tokens, takes_dummies, count, sizes, widths
):
    tiling = Tiling.parse(tokens, takes_dummies)
    calls = list(tiling.calls(count))
    assert [end - start for start, end in calls] == sizes
    assert [start for start, _ in calls] == [0, *(end for _, end in calls[:-1])]
    assert [tiling.width(size) for size in sizes] == widths


def test_a_tile_bounds_the_tokens_of_a_call():
    assert list(Tiling.parse("1-4", True).calls(5, tile=2)) == [(0, 2), (2, 4), (4, 5)]
