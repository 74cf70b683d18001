"""Files and folders that the workbench can rebuild, with their sizes, for `workbench
clean`."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workbench import paths
from workbench.errors import InputError
from workbench.files import locked

BUNDLES = Path("data/bundles")
GOLDENS = Path("data/golden")
EVALUATIONS = Path("data/evaluations")
KINDS = {
    "compiled": "Core ML's compiled copies of shards, beside their bundle",
    "unfinished": "work folders of interrupted exports, beside their bundle",
    "goldens": f"goldens of notebooks and sweeps, in {GOLDENS}",
    "evaluations": f"windows that workbench evaluate has scored, in {EVALUATIONS}",
    "bundles": f"bundles of notebooks and sweeps, in {BUNDLES}",
}
# kind → pattern of the folder's name
HIDDEN = {"compiled": ".*.compiled", "unfinished": ".*.partial"}


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder, its kind (a key of `KINDS`), and the bytes of its files."""

    kind: str
    path: Path
    bytes: int


def cache_entries(project: Path, folders: tuple[Path, ...] = ()) -> list[CacheEntry]:
    """Files and folders that can be removed, largest first.

    These are all of `KINDS` in `project`, and compiled copies and unfinished exports in
    further `folders`, whose finished bundles are the user's own."""
    entries = []

    def add(kind: str, places: Iterable[Path]) -> None:
        for path in places:
            entries.append(CacheEntry(kind, path, _size(path)))

    for kind, pattern in HIDDEN.items():
        for folder in (project / BUNDLES, *folders):
            add(kind, filter(Path.is_dir, folder.glob(pattern)))
    add("goldens", (project / GOLDENS).glob("*.safetensors"))
    add("evaluations", (project / EVALUATIONS).glob("*.rows"))
    for manifest in (project / BUNDLES).glob(f"[!.]*/{paths.BUNDLE}"):
        add("bundles", [manifest.parent])
    return sorted(entries, key=lambda entry: (-entry.bytes, entry.path))


def remove(entry: CacheEntry) -> None:
    """Removes an entry.

    Raises:
        InputError: an export is writing to it; nothing is removed.
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
    files = filter(Path.is_file, (path, *path.rglob("*")))
    return sum(file.lstat().st_size for file in files)
