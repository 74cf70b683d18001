"""A file is whole or absent, it is read within a limit, and a lock has one holder."""

import errno
import io
import os
import stat

import numpy as np
import pytest
from refusal import refused

from workbench import InputError
from workbench.files import (
    check_regular,
    load_arrays,
    locked,
    read_at_most,
    read_bytes,
    save_arrays,
    write_whole,
)


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


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_stored_arrays_are_synced_and_readable_as_other_files(
    tmp_path, monkeypatch, umask, mode
):
    """safetensors puts a file of its own at the path that it is given."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: sync(f) or synced.append(os.fstat(f)))
    before = os.umask(umask)
    try:
        save_arrays(tmp_path / "a", {"x": np.arange(3)}, {"note": "1"})
    finally:
        os.umask(before)
    status = (tmp_path / "a").stat()
    assert [one.st_ino for one in synced] == [status.st_ino]
    assert stat.S_IMODE(status.st_mode) == mode
    arrays, metadata = load_arrays(tmp_path / "a")
    assert arrays["x"].tolist() == [0, 1, 2] and metadata == {"note": "1"}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("read", [read_bytes, check_regular, load_arrays])
def test_what_has_no_end_is_refused_before_it_is_read(tmp_path, kind, read):
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with refused(f"found a {kind}; needs a regular file"):
        read(path)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    assert read_bytes(tmp_path / "a", 3) == b"123"
    assert check_regular(tmp_path / "a", 3) == 3
    with refused("3 bytes; needs"):
        read_bytes(tmp_path / "a", 2)
    with refused("3 bytes; needs .* at most 2"):
        check_regular(tmp_path / "a", 2)
    source = io.BytesIO(b"12345")
    with refused("member"):
        read_at_most(source, 2, "member")
    assert source.tell() == 3
