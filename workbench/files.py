"""Files that are whole or absent, locks between processes, and digests. A leaf: imports
only the errors."""

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from workbench.errors import InputError

# the first bytes of what Git LFS puts in place of a file
LFS_POINTER = b"version https://git-lfs"


def project_root(start: Path) -> Path | None:
    """The nearest folder at or above `start` that is a checkout of this project, or
    None."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            if 'name = "workbench"' in lines:
                return folder
    return None


def write_whole(path: Path, write: bytes | Callable[[BinaryIO], None]) -> None:
    """Writes a file that is there as a whole or not at all, whatever interrupts the
    process.

    The contents go to a dot-file beside `path`, which is synced to the disk and
    renamed. `write` is the contents, or a function that writes them to an open binary
    file. (A library that writes to a path may be given `file.name`.)

    Raises:
        OSError: no room or no permission; an earlier file at `path` stays, no dot-file
            does.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            if callable(write):
                write(file)
            else:
                file.write(write)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: dict, metadata: dict[str, str]) -> None:
    """Writes one safetensors file, whole or not at all."""
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(path, lambda file: save_file(arrays, file.name, metadata))


def load_arrays(path: Path) -> tuple[dict, dict[str, str]]:
    """(arrays by name, metadata) of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        return arrays, file.metadata()


@contextmanager
def locked(path: Path, refusal: InputError | None = None) -> Iterator[None]:
    """Holds an exclusive lock on the file or folder `path` (an empty file is made where
    nothing is).

    The lock ends with the process, however that ends. Another holder is waited for, or
    with `refusal` answered by raising it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags, operation = os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX
    if path.is_dir():
        flags = os.O_RDONLY
    if refusal:
        operation |= fcntl.LOCK_NB
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            raise refusal from None
        yield
    finally:
        os.close(descriptor)


def check_room(folder: Path, needed: int, subject: str) -> None:
    """Refuses work that will write `needed` bytes below `folder` (there, or to be made)
    onto a disk with fewer free.

    Raises:
        InputError: says both numbers, and what lists files that can be removed.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if (free := shutil.disk_usage(existing).free) < needed:
        raise InputError(
            subject,
            f"{free:,} bytes free on the disk of {folder}",
            f"{needed:,} bytes there",
            "remove data/bundles and data/golden, which are made again; or choose another disk",
        )


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a pointer in place of the file."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def link(source: str, target: str) -> None:
    """A hard link to a file, or to the one that a symbolic link names; or a copy: on
    another disk, or one without hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
