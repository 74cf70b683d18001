"""Writes a bundle beside its target and renames it into place."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from workbench import paths
from workbench.bundle.bundle import MANIFEST_NAME, Bundle
from workbench.bundle.manifest import Manifest
from workbench.errors import InputError
from workbench.files import locked, write_whole


class Writer:
    """Context manager around the making of one bundle: its files go to the folder
    `root`, a sibling of the target, which `finish` renames.

    The folder is locked while a process writes to it: the lock ends with the process.
    What a killed export has left there is removed first, and an exception removes the
    folder.

    Args:
        target: the path of the bundle.

    Raises:
        InputError: something is at `target`, or another process is exporting to it.
    """

    def __init__(self, target: Path):
        self.target = target
        self.root = paths.partial(target)

    def __enter__(self) -> "Writer":
        another = InputError(
            f"bundle {self.target}",
            "another export writing to it",
            "one export to one target",
            "wait for that one, or choose another target",
        )
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(self.root, another))
            # once renamed, nothing is there to remove
            stack.callback(shutil.rmtree, self.root, ignore_errors=True)
            paths.new(self.target)
            for path in self.root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.close = stack.pop_all().close
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def finish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest and renames the folder into place."""
        text = manifest.model_dump_json(indent=1).encode()
        write_whole(self.root / MANIFEST_NAME, text)
        os.rename(self.root, self.target)
        return Bundle.open(self.target)
