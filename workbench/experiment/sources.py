"""The checkpoint of a run, by the name of its folder and the hash of its content."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench import checkpoint_checks, paths

HASH_DIGITS = 8
"""The number of digits of a checkpoint's SHA-256 in the name of a folder."""
NO_CHECKPOINT = "run"
"""The name of the `Source` of a notebook without a checkpoint, which names the folder of
its run."""


@dataclass(frozen=True)
class Source:
    """The checkpoint of a run."""

    name: str
    """The name of its folder, or `NO_CHECKPOINT`."""
    sha256: str | None = None
    """The hash of its content; None where the folder is not a checkpoint's."""

    @property
    def label(self) -> str:
        """The name of a run's folder, and of the checkpoint in a report: the checkpoint's
        name with the hash, which tells two checkpoints of one name apart."""
        if self.sha256:
            return f"{self.name}-{self.sha256[:HASH_DIGITS]}"
        return self.name


def recorded_checkpoint(run: Mapping) -> dict:
    """The name and the hash of the checkpoint in the contents of run.json. Older runs
    have none, as a notebook without a checkpoint."""
    return run.get("checkpoint") or {"name": NO_CHECKPOINT, "sha256": None}


def source_of(parameters: Mapping) -> Source:
    """The checkpoint that the parameter `CHECKPOINT` of a notebook names.

    Without that parameter, or with a path that ends in no name, such as `.` or `..`, the
    name is `NO_CHECKPOINT`.

    Raises:
        InputError: a checkpoint whose files cannot be read.
    """
    given = str(parameters.get("CHECKPOINT", ""))
    folder = paths.find(given) if given else Path()
    if given and (folder / checkpoint_checks.CONFIG).is_file():
        from workbench.models.checkpoint import Checkpoint

        folder = folder.absolute()
        return Source(paths.model_name(folder), Checkpoint(folder).sha256)
    return Source(Path(given).name.strip(".") or NO_CHECKPOINT)
