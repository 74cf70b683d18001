"""What the bundle of a case is exported from, and how."""

from typing import NamedTuple


class Recipe(NamedTuple):
    source: str
    """Which checkpoint: `data/NAME`, a folder of the project; a key of `cases.MAKERS`, a checkpoint
    with edited weights; or a family, whose random checkpoint it is."""
    changes: dict
    """Of the family's tiny dimensions; for a family alone."""
    options: dict
    """Of the export."""
