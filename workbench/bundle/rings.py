"""Where a ring buffer holds which position. Imports nothing of the workbench.

In a ring of n rows position p is in row p mod n. A cache with a row for every position is
a ring that never wraps."""

import numpy as np


def ring_positions(last: int | np.ndarray, rows: int) -> np.ndarray:
    """The position [.., rows] that each row holds once `last` [..] is written. Row r holds
    the largest position up to `last` that leaves the remainder r when divided by `rows`.
    A negative number: the row is empty."""
    last = np.asarray(last)[..., None]
    return last - (last - np.arange(rows)) % rows
