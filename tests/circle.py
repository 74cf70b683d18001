"""Cases of tests that `make test` leaves to the wider circle."""

import pytest


def wide(*values):
    """A case of `parametrize` that runs in `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.wide)


def all_wide(*values) -> list:
    return [wide(value) for value in values]
