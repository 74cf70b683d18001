"""What the plug-in's tests share with the workbench's: random checkpoints of every family."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests")]

import pytest  # noqa: E402
import tiny  # noqa: E402


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> tiny.Exports:
    return tiny.Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def small(exports) -> Path:
    """Two layers of random weights."""
    return exports.checkpoint("llama")


@pytest.fixture(scope="session")
def apple(exports, small):
    """Them in fp32 programs."""
    return exports.bundle(small, target="coreai-fp32")
