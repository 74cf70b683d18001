"""The name of a model on the Hub is a checkpoint where the local cache has it; nothing is
downloaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusal import refused
from tiny import DATA

from workbench import paths
from workbench.log import project
from workbench.models.checkpoint import Checkpoint
from workbench.sweep.grid import locate

TINY = DATA / "tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """HF_HOME as `hf download org/Tiny-Llama` leaves it: blobs, links to them, the main branch."""
    model = tmp_path / "home" / "hub" / "models--org--Tiny-Llama"
    snapshot = model / "snapshots" / COMMIT
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    for file in TINY.iterdir():
        shutil.copy(file, model / "blobs")
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub")
    )
    return tmp_path / "home"


def test_the_cached_model_is_the_checkpoint_and_keeps_its_name(hub):
    checkpoint = Checkpoint("org/Tiny-Llama")
    assert checkpoint.sha256 == Checkpoint(TINY).sha256
    assert checkpoint.path == paths.locate_checkpoint(
        "https://huggingface.co/org/Tiny-Llama"
    )
    assert (
        locate("org/Tiny-Llama", project() / "experiments" / "log") == checkpoint.path
    )
    assert checkpoint.name == Checkpoint(checkpoint.path).name == "Tiny-Llama"


def test_a_folder_of_that_name_goes_first(hub, tmp_path):
    shutil.copytree(TINY, tmp_path / "org" / "Tiny-Llama")
    assert Checkpoint("org/Tiny-Llama").path == Path("org/Tiny-Llama")


@pytest.mark.parametrize("missing", ["*", "config.json", "model.safetensors"])
def test_what_the_cache_lacks_is_one_message_with_the_download(hub, missing):
    for file in hub.rglob(f"snapshots/*/{missing}"):
        file.unlink()
    with refused(r"Next: run: hf download org/Tiny-Llama\.$"):
        Checkpoint("org/Tiny-Llama")


@pytest.mark.slow("two processes import the command line and its packages")
@pytest.mark.wide
def test_commands_take_the_name_and_honour_hf_home(hub, tmp_path):
    def run(home: Path):
        return subprocess.run(
            [sys.executable, "-m", "workbench.cli", "plan", "org/Tiny-Llama"],
            env=os.environ | {"HF_HOME": str(home)},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    assert run(hub).returncode == 0
    other = run(tmp_path / "empty")
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1
    assert "hf download org/Tiny-Llama" in other.stderr
