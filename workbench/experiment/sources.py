"""The checkpoint that a run is of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench import checkpoint_checks, paths

HASH_DIGITS = 8
"""The number of digits of a checkpoint's SHA-256 in the name of a folder."""
NO_CHECKPOINT = "run"  # the name of the source of a notebook without a checkpoint


@dataclass(frozen=True)
class Source:
    """The checkpoint of a run: its folder's name, and the hash of its content where it
    is a checkpoint's folder."""

    name: str
    sha256: str | None = None

    @property
    def label(self) -> str:
        """The checkpoint's name in a run's folder and in a report. Two checkpoints whose
        folders have one name have two labels."""
        if self.sha256:
            return f"{self.name}-{self.sha256[:HASH_DIGITS]}"
        return self.name


def source_of(parameters: Mapping) -> Source:
    """The checkpoint that a notebook's `CHECKPOINT` names. A notebook without a checkpoint
    has the source `NO_CHECKPOINT`, and so has a checkpoint without a name, such as `.` and `..`.

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
