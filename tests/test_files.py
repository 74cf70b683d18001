"""A file is whole or absent, and a lock has one holder."""

import errno
import os

import pytest
from refusal import refused

from workbench import InputError
from workbench.files import locked, write_whole


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
    with locked(path), refused("another process"), locked(path, refusal):
        pass
    with locked(path, refusal):
        pass
