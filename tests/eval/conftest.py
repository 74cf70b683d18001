from pathlib import Path

import pytest

from workbench.check import golden
from workbench.models.checkpoint import Checkpoint

DATA = Path(__file__).parents[2] / "data"
IDS = 20


@pytest.fixture(scope="session")
def tiny_llama() -> Checkpoint:
    return Checkpoint(DATA / "tiny-llama")


@pytest.fixture(scope="session")
def llama_bundle(exports, tiny_llama):
    return exports.bundle(tiny_llama.path, max_seq_len=32)


@pytest.fixture(scope="session")
def llama_golden(tiny_llama):
    """The first tokens of a held-out prompt: real text, so that attention has something to find."""
    from workbench.check import tasks

    prompt = tasks.load_tasks(DATA / "tasks" / "heldout.jsonl")[0]["prompt"]
    return golden.make_golden(
        tiny_llama, tasks.load_tokenizer(tiny_llama.path).encode(prompt)[:IDS]
    )
