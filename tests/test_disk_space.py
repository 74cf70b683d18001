"""Before an export, and before Core ML compiles, the room on the disk is compared with what will be
written."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusal import refused

from workbench import Bundle
from workbench.errors import InputError, is_full_disk
from workbench.exporter import export
from workbench.files import check_free_space
from workbench.runtime import Settings, coreml, load_shard


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that a disk seems to have free."""

    def set_free(count):
        disk = SimpleNamespace(free=count)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)

    return set_free


def test_an_export_that_will_not_fit_is_refused_before_anything_is_converted(
    tiny_llama, tmp_path, free, monkeypatch
):
    whole = export(tiny_llama.path, tmp_path / "whole", max_seq_len=16, tokens="2")
    weights = sum(f.bytes for f in whole.files if f.path.endswith(".bin"))
    # twice the embedding, once as the head
    assert weights + whole.manifest.embedding.file.bytes > 2**18
    free(weights)
    with monkeypatch.context() as patched:
        # would raise another error
        patched.setattr("workbench.exporter.writing.convert_shard", None)
        message = f"bundle .*found {weights:,} bytes free.*choose another disk"
        with refused(message) as refusal:
            export(tiny_llama.path, tmp_path / "b", max_seq_len=16)
    needed = int(refusal.value.needed.split()[0].replace(",", ""))
    assert weights < needed < 3 * (weights + whole.manifest.embedding.file.bytes)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["whole"]
    free(needed)
    assert export(tiny_llama.path, tmp_path / "b", max_seq_len=16)


def test_a_shard_is_not_compiled_where_its_copies_have_no_room(
    llama_bundle, free, tmp_path, shimmed
):
    shutil.copytree(llama_bundle.root, tmp_path / "b")
    bundle = Bundle.open(tmp_path / "b")
    shard = bundle.shards("layers")[0]
    free(2 * shard.bytes - 1)
    with refused(f"copy of shard {shard.name}.*another disk"):
        load_shard(bundle, shard, Settings("coreml"))
    assert not coreml.compiled_path(bundle, shard).parent.exists()
    free(2 * shard.bytes)
    load_shard(bundle, shard, Settings("coreml"))
    free(0)
    load_shard(bundle, shard, Settings("coreml"))  # it is compiled already


def test_folders_are_named_only_on_the_disk_that_is_full(
    checkout, tmp_path, free, monkeypatch
):
    free(9)
    bundles = tmp_path / "data" / "bundles"
    bundles.mkdir(parents=True)
    with pytest.raises(InputError) as same_disk:
        check_free_space(tmp_path / "new", 10, "x")
    assert f"remove {bundles}, made again" in str(same_disk.value)
    assert "golden" not in str(same_disk.value)  # it is not there
    assert is_full_disk(same_disk.value)
    stat = Path.stat
    other = os.stat_result(range(10))  # of device 2

    def another_disk(path, **options):
        return other if "data" in path.parts else stat(path, **options)

    monkeypatch.setattr(Path, "stat", another_disk)
    with pytest.raises(InputError) as other_disk:
        check_free_space(tmp_path / "new", 10, "x")
    assert "bundles" not in str(other_disk.value)
