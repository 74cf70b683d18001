"""Files, in this order: those of the checkout and its notes of verified hashes; writing
whole or not at all; limits of what is read; locks between processes and free disk space;
digests and links; folders that are replaced whole.

Imports only `workbench.errors` of this package."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from workbench.errors import InputError

# the first bytes of the file that Git LFS puts in the place of a large one
LFS_POINTER = b"version https://git-lfs"
TEXT_SUFFIXES = ".json", ".jinja", ".txt", ".model"
OUT_VARIABLE = "WORKBENCH_OUT"
# largest size of a file that is read into memory whole: JSON, YAML, a prompt
MAX_TEXT_BYTES = 1 << 26


def project_root(start: Path) -> Path | None:
    """The checkout of this project that `start` lies in, or None: the nearest folder above
    whose pyproject.toml has the line `name = "workbench"`."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            if 'name = "workbench"' in lines:
                return folder
    return None


def note_verified(kind: str, facts: dict[str, str]) -> None:
    """Records in this checkout that `facts`, a combination of hashes, was verified, so that
    a later process need not verify it again (see `was_verified`):

        note_verified("verdicts", {"bundle": identity, "verdict": sha256_of_the_file})

    Does nothing where no file can be written.

    Args:
        kind: the folder of the notes, one for each kind of facts.
    """
    path = _note_path(kind, facts)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(facts, sort_keys=True).encode())


def was_verified(kind: str, facts: dict[str, str]) -> bool:
    """Whether `note_verified` recorded `facts` in this checkout. Files beside a bundle or
    below the working directory are not read: a stranger can have written them."""
    try:
        return json.loads(read_bytes(_note_path(kind, facts))) == facts
    except (OSError, ValueError):
        return False


def _note_path(kind: str, facts: dict[str, str]) -> Path:
    """The file of a note: in the checkout that this code lies in, else in the user's
    cache."""
    if root := project_root(Path(__file__).resolve().parent):
        folder = root / "build"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~/.cache"))
        folder = Path(cache) / "workbench"
    # the file has all facts, so that a name of half a digest is enough
    key = json.dumps(facts, sort_keys=True).encode()
    return folder / kind / f"{hashlib.sha256(key).hexdigest()[:32]}.json"


def checkout() -> Path:
    """The checkout that the working directory lies in, else the working directory."""
    return project_root(Path.cwd()) or Path.cwd()


def output_root() -> Path:
    """The folder that runs write to, with the folders of a checkout below it. It is the
    folder in the variable ``WORKBENCH_OUT``, for a checkout that cannot be written, else
    the checkout."""
    folder = os.environ.get(OUT_VARIABLE)
    return Path(folder).absolute() if folder else checkout()


def write_whole(path: Path, write: bytes | Callable[[BinaryIO], None]) -> None:
    """Writes a file whole or not at all, whatever interrupts the process.

    The contents go to a dot-file beside `path`, which is synced to the disk and
    renamed. `write` is the contents, or a function that writes them to an open binary
    file. (A library that writes to a path may be given `file.name`, and may put another
    file there.)

    Raises:
        OSError: the disk is full or permission is missing. An earlier file at `path` stays,
            and the dot-file is removed.
    """
    # a random name, because two processes may write the same file
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if callable(write):
                write(file)
            else:
                file.write(write)
        # safetensors renames a file of its own to the path, readable by its owner alone
        with temporary.open("rb+") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: dict, metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all."""
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(path, lambda file: save_file(arrays, file.name, metadata))


def load_arrays(path: Path) -> tuple[dict, dict[str, str]]:
    """Reads a safetensors file: (its arrays by name, its metadata).

    Raises:
        InputError: `path` is no regular file.
    """
    from safetensors import safe_open

    check_regular(path)
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        return arrays, file.metadata()


def check_regular(path: Path, max_bytes: int | None = None) -> int:
    """Returns the size in bytes of the file that `path` resolves to.

    Raises:
        InputError: it is a pipe, a device or a folder, which may have no end or never
            answer, or it has more than `max_bytes` bytes.
        OSError: there is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(path, _kind(status.st_mode))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _unreadable(path, f"{status.st_size:,} bytes", max_bytes)
    return status.st_size


def check_folder(folder: Path, limits: dict[str, int]) -> None:
    """Checks a folder whose files a library will open by name: every file of text has to be
    a regular file, and no larger than `limits` allows for its name.

    Raises:
        InputError: see `check_regular`.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in TEXT_SUFFIXES and path.exists() and not path.is_dir():
            check_regular(path, limits.get(path.name))


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Reads a regular file of at most `max_bytes` bytes.

    Raises:
        InputError: see `check_regular`.
        OSError: there is no such file, or permission is missing.
    """
    check_regular(path, max_bytes)
    with path.open("rb") as file:
        return read_at_most(file, max_bytes, path)


def read_at_most(file: BinaryIO, max_bytes: int, subject: object) -> bytes:
    """Reads the rest of an open file, such as a member of an archive, of at most `max_bytes`
    bytes. It reads no more than that, whatever size an archive declares.

    Raises:
        InputError: there are more bytes.
    """
    contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise _unreadable(subject, f"over {max_bytes:,} bytes", max_bytes)
    return contents


def _kind(mode: int) -> str:
    kinds = {
        "a folder": stat.S_ISDIR,
        "a pipe": stat.S_ISFIFO,
        "a socket": stat.S_ISSOCK,
    }
    for kind, applies in kinds.items():
        if applies(mode):
            return kind
    return "a device"


def _unreadable(
    subject: object, actual: str, max_bytes: int = MAX_TEXT_BYTES
) -> InputError:
    needed = f"a regular file of at most {max_bytes:,} bytes"
    return InputError(str(subject), actual, needed, "give the file itself, whole")


@contextmanager
def locked(path: Path, refusal: InputError | None = None) -> Iterator[None]:
    """Holds an exclusive lock on the file or folder `path`. Creates an empty file where
    nothing is there.

    The lock ends with the process, however the process ends. While another process holds
    the lock, this one waits, or raises `refusal` if it is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags, operation = os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX
    if path.is_dir():
        flags = os.O_RDONLY  # a folder can be locked, but not opened for writing
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
        # the file stays: removing it would let a third process lock another file
        os.close(descriptor)


def check_free_space(folder: Path, needed: int, subject: str) -> None:
    """Checks that `needed` bytes are free on the disk of `folder`, which may not exist yet.

    Raises:
        InputError: fewer bytes are free. The message has both numbers, and names the
            folders on this disk that may be removed because the project makes them again.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if (free := shutil.disk_usage(existing).free) < needed:
        actual = f"{free:,} bytes free on the disk of {folder}"
        caches = [output_root() / "data" / name for name in ("bundles", "golden")]
        device = existing.stat().st_dev
        removable = [
            str(path)
            for path in caches
            if path.exists() and path.stat().st_dev == device
        ]
        step = "free some there; or choose another disk"
        if removable:
            names = " or ".join(removable)
            step = f"remove {names}, made again when needed; or choose another disk"
        refusal = InputError(subject, actual, f"{needed:,} bytes there", step)
        raise refusal from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer of Git LFS, whose content was not downloaded."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def link(source: str, target: str) -> None:
    """Makes a hard link to a file, or to the file that a symbolic link leads to. Makes a
    copy where that is impossible: on another disk, or on one without hard links."""
    try:
        # the Hub's cache has relative symbolic links, which would be broken elsewhere
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


AT_FDCWD = -100  # of <fcntl.h>, Linux
RENAME_EXCHANGE = 2  # of <linux/fs.h>; RENAME_SWAP of macOS' <sys/stdio.h> is 2, too


def replace_folder(new: Path, target: Path) -> None:
    """Renames the folder `new` to `target`, and removes an earlier folder of this name.

    At every moment `target` is the earlier folder or the new one, whole: on Linux and
    macOS both exchange their names in one step. On other systems the earlier folder is
    `.NAME.earlier` beside `target` for an instant; if the process is killed then,
    `restore_folder` renames it back.
    """
    earlier = _earlier(target)
    restore_folder(target)
    if not target.exists():
        os.rename(new, target)
    elif _exchange(new, target):
        shutil.rmtree(new)
    else:
        os.rename(target, earlier)
        os.rename(new, target)
        shutil.rmtree(earlier)


def restore_folder(target: Path) -> None:
    """Completes a `replace_folder` that was killed: renames the earlier folder back, or
    removes it where the new one is in its place."""
    earlier = _earlier(target)
    if earlier.is_dir():
        if target.exists():
            shutil.rmtree(earlier)
        else:
            os.rename(earlier, target)


def _earlier(target: Path) -> Path:
    return target.with_name(f".{target.name}.earlier")


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two folders in one step. Returns False where the system
    cannot."""
    # Python's os has neither function; the C library of the process does
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(second)
    if hasattr(library, "renameat2"):
        names = AT_FDCWD, paths[0], AT_FDCWD, paths[1]
        return library.renameat2(*names, RENAME_EXCHANGE) == 0
    if hasattr(library, "renamex_np"):
        return library.renamex_np(*paths, RENAME_EXCHANGE) == 0
    return False
