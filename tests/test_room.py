"""Before an export, and before Core ML compiles, the room on the disk is compared with what will be
written."""

import shutil
from types import SimpleNamespace

import pytest

from miltorch import shim
from workbench import InputError
from workbench.export import export
from workbench.files import check_room
from workbench.runtime import coreml, load_shard


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that a disk seems to have free: `free(bytes)`, or by a function of the
    path."""

    def set_free(count):
        def usage(path):
            return SimpleNamespace(free=count(str(path)) if callable(count) else count)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return set_free


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_the_next_one_above(
    tmp_path, free
):
    seen = []
    free(lambda path: seen.append(path) or 99)
    check_room(tmp_path / "a" / "b", 99, "it")
    assert seen == [str(tmp_path)]
    with pytest.raises(
        InputError, match="it: found 99 bytes free.*needs 1,000 bytes.*data/bundles"
    ):
        check_room(tmp_path / "a" / "b", 1000, "it")


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
        patched.setattr("workbench.export.Template", None)
        with pytest.raises(
            InputError, match=rf"bundle .*found {weights:,} bytes free.*data/bundles"
        ) as e:
            export(tiny_llama.path, tmp_path / "b", max_seq_len=16)
    needed = int(e.value.needed.split()[0].replace(",", ""))
    assert weights < needed < 3 * (weights + whole.manifest.embedding.file.bytes)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "whole"
    ]
    free(needed)
    assert export(tiny_llama.path, tmp_path / "b", max_seq_len=16)


@pytest.mark.shim
def test_a_shard_is_not_compiled_where_its_copies_have_no_room(
    llama_bundle, free, tmp_path
):
    from workbench import Bundle

    shutil.copytree(llama_bundle.root, tmp_path / "b")
    bundle = Bundle.open(tmp_path / "b")
    shard = bundle.shards("layers")[0]
    shim.install()
    try:
        free(2 * shard.bytes - 1)
        with pytest.raises(
            InputError, match=f"compiled copy of shard {shard.name}.*data/bundles"
        ):
            load_shard(bundle, shard, "coreml")
        assert not coreml.compiled_path(bundle, shard).parent.exists()
        free(2 * shard.bytes)
        load_shard(bundle, shard, "coreml")
        free(0)
        load_shard(bundle, shard, "coreml")  # it is compiled already
    finally:
        shim.uninstall()
