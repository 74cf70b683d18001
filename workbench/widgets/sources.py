"""The bundles of an Explorer: exports of one checkpoint, or existing folders."""

from pathlib import Path

from workbench.adopt.decoder import folder_identity, folder_unverified
from workbench.models.checkpoint import Checkpoint
from workbench.sweep.cell import find
from workbench.sweep.grid import Cell, Grid


def bundles_of(grid: Grid, root: Path) -> "Exports | Folders":
    """The bundles of a grid; a relative path starts in the project of the log at
    `root`."""
    if grid.bundle:
        return Folders(grid, root)
    return Exports(grid, root)


class Exports:
    """Bundles of a grid's checkpoint and export options."""

    def __init__(self, grid: Grid, root: Path):
        self.grid = grid
        self.checkpoint = Checkpoint(find(grid.checkpoint, root))
        self.name = self.checkpoint.name
        self.tokenizer = self.checkpoint.path

    def label(self, cell: Cell) -> str:
        """The values in which bundles of the grid differ, without max_seq_len."""
        words = [cell.options.compress]
        for name, values in self.grid.export.items():
            if len(values) > 1 and name not in ("max_seq_len", "compress"):
                words.append(str(getattr(cell.options, name)))
        return ", ".join(words)

    def contents(self, cell: Cell) -> str:
        """The hash in a cell's key."""
        return self.checkpoint.sha256

    def part(self, cell: Cell) -> dict:
        """The grid's fields with the cell's bundle alone."""
        return {
            "export": {name: [getattr(cell.options, name)] for name in self.grid.export}
        }


class Folders:
    """Finished bundles and adopted packages; their errors are not split, which needs an
    export."""

    checkpoint = None

    def __init__(self, grid: Grid, root: Path):
        self.root = root
        opened = folder_unverified(find(grid.bundle[0], root))
        self.name = opened.manifest.checkpoint["name"]
        self.tokenizer = opened.tokenizer

    def label(self, cell: Cell) -> str:
        """The name of the folder."""
        return Path(cell.bundle).name

    def contents(self, cell: Cell) -> str:
        return folder_identity(find(cell.bundle, self.root))

    def part(self, cell: Cell) -> dict:
        return {"bundle": [cell.bundle]}
