import pytest
from experiment import toy


@pytest.fixture
def project(checkout):
    """A checkout with one notebook and an empty log."""
    toy.write_notebook(checkout)
    return checkout
