"""Where a ring buffer holds which position. Imports nothing of the workbench.

In a ring of n rows position p is in row p mod n. A cache with a row for every position is
a ring that never wraps."""

import numpy as np


def ring_positions(last: int | np.ndarray, rows: int) -> np.ndarray:
    """The position [.., rows] that each row holds once `last` [..] is written: the last
    one up to `last` that is r modulo `rows` in row r. A negative one: the row is empty."""
    last = np.asarray(last)[..., None]
    return last - (last - np.arange(rows)) % rows
