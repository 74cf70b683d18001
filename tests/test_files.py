"""A file is whole or absent, a lock has one holder, and a layer is read out of every kind of
name."""

import errno
import os

import pytest

from workbench import InputError
from workbench.bundle.names import split_layer
from workbench.files import is_lfs_pointer, locked, write_whole


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch, step):
    write_whole(tmp_path / "a", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("folder", [True, False])
def test_a_lock_has_one_holder_and_ends_with_it(tmp_path, folder):
    path = tmp_path if folder else tmp_path / "below" / "lock"
    refusal = InputError("folder", "another process", "one", "wait")
    with (
        locked(path),
        pytest.raises(InputError, match="another process"),
        locked(path, refusal),
    ):
        pass
    with locked(path, refusal):
        pass


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "a").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    (tmp_path / "b").write_bytes(b"")
    assert is_lfs_pointer(tmp_path / "a") and not is_lfs_pointer(tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj.weight", (3, "mlp.up_proj.weight")),
        ("layers.12.k_state", (12, "k_state")),
        ("layers.0", (0, "")),
        ("model.norm.weight", (None, "model.norm.weight")),
        ("layers.x.k_state", (None, "layers.x.k_state")),
    ],
)
def test_the_layer_of_a_name(name, expected):
    assert split_layer(name) == expected
