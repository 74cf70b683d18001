import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: idle threads spin, and tiny tensors gain nothing from a second

import pytest  # noqa: E402
from tiny import Exports  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a minute; leave out with -m 'not slow'")


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> Exports:
    """Checkpoints, bundles and Hugging Face models, each made once per session."""
    import torch

    torch.set_num_threads(1)  # tiny tensors: a second thread only costs
    return Exports(tmp_path_factory.mktemp("exports"))
