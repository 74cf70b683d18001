"""Cases of tests that `make test` leaves to the wider circle."""

import pytest


def wide(*values):
    """A case of `parametrize` that runs in `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.wide)
