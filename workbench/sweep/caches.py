"""Files and folders that the workbench makes again by itself, with their sizes: what `workbench
clean` may remove."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from workbench import paths
from workbench.errors import InputError
from workbench.files import locked

BUNDLES, GOLDENS = Path("data/bundles"), Path("data/golden")
EVALUATIONS = Path("data/evaluations")
KINDS = {
    "compiled": "Core ML's compiled copies of shards, beside their bundle",
    "unfinished": "work folders of interrupted exports, beside their bundle",
    "goldens": f"goldens of notebooks and sweeps, in {GOLDENS}",
    "evaluations": f"windows that workbench evaluate has scored, in {EVALUATIONS}",
    "bundles": f"bundles of notebooks and sweeps, in {BUNDLES}",
}
HIDDEN = {
    "compiled": ".*.compiled",
    "unfinished": ".*.partial",
}  # kind → pattern of the folder's name


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder, its kind (a key of `KINDS`), and the bytes of its files."""

    kind: str
    path: Path
    bytes: int


def cache_entries(project: Path, folders: tuple[Path, ...] = ()) -> list[CacheEntry]:
    """What can be removed, largest first: everything of `KINDS` in `project`, and compiled copies
    and unfinished exports in further `folders`, whose finished bundles are the user's own and are
    left out."""
    beside = (project / BUNDLES, *folders)
    paths_by_kind = {
        kind: [path for folder in beside for path in folder.glob(pattern) if path.is_dir()]
        for kind, pattern in HIDDEN.items()
    }
    paths_by_kind["goldens"] = [*(project / GOLDENS).glob("*.safetensors")]
    paths_by_kind["evaluations"] = [*(project / EVALUATIONS).glob("*.rows")]
    manifests = (project / BUNDLES).glob(f"[!.]*/{paths.BUNDLE}")
    paths_by_kind["bundles"] = [manifest.parent for manifest in manifests]
    entries = [
        CacheEntry(kind, path, _size(path))
        for kind, kind_paths in paths_by_kind.items()
        for path in kind_paths
    ]
    return sorted(entries, key=lambda entry: (-entry.bytes, entry.path))


def remove(entry: CacheEntry) -> None:
    """Removes an entry.

    Raises:
        InputError: an export is writing to it; it stays as it is.
    """
    if entry.path.is_file():
        entry.path.unlink()
        return
    busy = InputError(
        f"{entry.path}",
        "an export is writing to it",
        "a folder that no export uses",
        "wait for that export to end",
    )
    with locked(entry.path, busy):
        shutil.rmtree(entry.path)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())
