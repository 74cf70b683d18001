"""Writes a bundle into a locked sibling folder, which is renamed into place when the
bundle is complete."""

import json
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from workbench import paths
from workbench.bundle.bundle import MANIFEST_NAME, Bundle
from workbench.bundle.manifest import Manifest, Shard
from workbench.errors import InputError
from workbench.files import locked, sha256, write_whole

IDENTITY = "identity.json"


class Writer:
    """Builds a bundle in a sibling folder and renames it into place when it is whole.

    A finished shard leaves `<name>.json` (its manifest entry) behind, so that an
    interrupted export resumes at the first missing shard. `identity.json` holds what
    decides the bundle's bytes (`sign`); an export of another checkpoint, other options
    or other versions removes what it finds (`resume`). The folder is locked while a
    process writes to it: the lock ends with the process.

    Args:
        target: the path of the bundle.

    Raises:
        InputError: something is at `target`, or another process is exporting to it.
    """

    def __init__(self, target: Path):
        self.target = target
        self.root = paths.partial(target)
        self.root.mkdir(parents=True, exist_ok=True)
        another = InputError(
            f"bundle {target}",
            "another export writing to it",
            "one export to one target",
            "wait for that one, or choose another target",
        )
        with ExitStack() as stack:
            stack.enter_context(locked(self.root, another))
            stack.callback(self._remove_if_empty)
            paths.new(target)
            self.resumes = any(self.root.iterdir())
            self.close = stack.pop_all().close

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Removes the folder if the export was refused, unless it resumes an earlier
        one; unlocks it."""
        if kind and issubclass(kind, InputError) and not self.resumes:
            shutil.rmtree(self.root, ignore_errors=True)
        self.close()

    def _remove_if_empty(self) -> None:
        # an error: there is something to resume, or it is the bundle by now
        with suppress(OSError):
            self.root.rmdir()

    def resume(self, identity: dict) -> None:
        """Keeps the files of an interrupted export of the same identity, and removes
        those of any other."""
        signature = self.root / IDENTITY
        self.resumes = signature.is_file() and signature.read_text() == _text(identity)
        if not self.resumes:
            self._remove_all_but(set())

    def sign(self, identity: dict) -> None:
        """Writes `identity.json`; from then on an interrupted export can be resumed."""
        write_whole(self.root / IDENTITY, _text(identity).encode())

    def finished(self, name: str) -> Shard | None:
        """The entry of a shard that an earlier, interrupted export finished, if its
        files still have its hashes."""
        try:
            shard = Shard.model_validate_json((self.root / f"{name}.json").read_bytes())
            if all(sha256(self.root / f.path) == f.sha256 for f in shard.files):
                return shard
        except (OSError, ValueError):
            pass

    def record(self, shard: Shard) -> Shard:
        """Records a finished shard, whose files have the hashes of its entry. A record
        that was written in part counts as none."""
        (self.root / f"{shard.name}.json").write_text(shard.model_dump_json())
        return shard

    def discard(self, name: str) -> None:
        """Removes the record of a finished shard."""
        (self.root / f"{name}.json").unlink()

    def finish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest, removes records and leftovers of interrupted runs, and
        renames the folder into place."""
        bundle = Bundle(self.target, manifest)
        self._remove_all_but({Path(entry.path).parts[0] for entry in bundle.files})
        write_whole(
            self.root / MANIFEST_NAME, manifest.model_dump_json(indent=1).encode()
        )
        os.rename(self.root, self.target)
        bundle.remember_hashes()
        return Bundle.open(self.target)

    def _remove_all_but(self, names: set[str]) -> None:
        for path in self.root.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _text(identity: dict) -> str:
    return json.dumps(identity, sort_keys=True)
