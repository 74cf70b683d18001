import pytest
from tiny import Exports


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> Exports:
    """Checkpoints, bundles and Hugging Face models, each made once per session."""
    return Exports(tmp_path_factory.mktemp("exports"))
