"""Bundles of `data/bundles`, which are exported once and opened again."""

import os
import shutil
import warnings
from pathlib import Path

from workbench.bundle import Bundle
from workbench.errors import InputError
from workbench.files import locked


def is_cached(path: Path) -> bool:
    """Whether the cache holds something at `path`; `cell.measure` refuses an unreadable
    bundle."""
    with locked(lock(path)):
        try:
            return opened(path) is not None
        except InputError:
            return True


def opened(path: Path) -> Bundle | None:
    """The bundle at `path` of the cache, None if there is none. A damaged bundle is
    removed."""
    if not os.path.lexists(path):
        return None
    try:
        return Bundle.open(path)
    except InputError as problem:
        if isinstance(problem.__cause__, OSError):  # it may be whole
            raise
        warnings.warn(
            f"the cached bundle {path.name} is exported again: {problem}", stacklevel=3
        )
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
    return None


def lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
