"""The packages and adopted bundles of `adoptions`, for every test."""

import pytest
from adoptions import Adoptions


@pytest.fixture(scope="session")
def adoptions(shared_folder) -> Adoptions:
    (shared_folder / "adopt").mkdir(exist_ok=True)
    return Adoptions(shared_folder / "adopt")
