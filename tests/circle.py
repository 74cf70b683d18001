"""Marks cases that `make test` leaves to `make test-all`."""

import pytest


def wide(*values):
    """A case of `parametrize` that runs only in `make test-all` and beyond."""
    return pytest.param(*values, marks=pytest.mark.wide)
