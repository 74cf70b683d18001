"""What the plug-in's tests share with the workbench's: random checkpoints of every family."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests")]

import pytest  # noqa: E402
import tiny  # noqa: E402

from workbench import Bundle  # noqa: E402
from workbench.models.checkpoint import Checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> tiny.Exports:
    return tiny.Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def tiny_llama() -> Checkpoint:
    return Checkpoint(ROOT / "data" / "tiny-llama")


@pytest.fixture(scope="session")
def llama_bundle(exports, tiny_llama) -> Bundle:
    return exports.bundle(tiny_llama.path)


@pytest.fixture(scope="session")
def small(exports) -> Checkpoint:
    """Two layers of random weights."""
    return Checkpoint(exports.checkpoint("llama"))


@pytest.fixture(scope="session")
def apple(exports, small) -> Bundle:
    """Them in fp32 programs."""
    return exports.bundle(small.path, target="coreai-fp32")
