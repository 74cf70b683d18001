"""Packages of five styles, each made once per run, and the bundles that adopt makes of
them."""

from pathlib import Path

import exporter_styles as styles
import pytest
import tiny
from exporter_model import tiny_checkpoint

STYLES = {
    "recipe": ("llama", styles.recipe, {"int4": True}),
    "chunks": ("llama", styles.chunks, {"lut": True}),
    "rotating": ("gemma3_text", styles.chunks, {"window": 8, "batch": 4}),
    "monolith": ("gemma3_text", styles.monolith, {"int4": True}),
    "host": ("qwen3", styles.host, {"lut": True}),
    "shards": ("qwen3", styles.shards, {}),
    "newest": ("qwen3", styles.host, {"moves": True}),
    "theta": ("llama", styles.recipe, {"fault": "theta"}),
    "future": (
        "gemma3_text",
        styles.chunks,
        {"window": 8, "batch": 4, "fault": "future"},
    ),
    "one_mask": ("gemma3_text", styles.monolith, {"fault": "one_mask"}),
    "norm_order": ("qwen3", styles.shards, {"fault": "norm_order"}),
}
SOUND = [name for name in STYLES if name not in styles.FAULTS]


class Adoptions:
    """Checkpoints, packages and adopted folders on demand, each made once for all
    processes."""

    def __init__(self, root: Path):
        self.root = root

    def checkpoint(self, style: str) -> Path:
        family = STYLES[style][0]
        made = tiny.once(
            self.root / f"of-{family}", lambda path: tiny_checkpoint(family, path)
        )
        return made / family

    def packages(self, style: str) -> Path:
        source, (_, make, options) = self.checkpoint(style), STYLES[style]
        if style == "future":
            options = options | {"sound": self.packages("rotating")}
        return tiny.once(
            self.root / "packages" / style, lambda path: make(path, source, **options)
        )

    def folder(self, style: str) -> Path:
        """The bundle that `workbench adopt` makes, nothing in it changed."""
        from workbench.adopt import propose
        from workbench.models.checkpoint import Checkpoint

        packages, source = [self.packages(style)], Checkpoint(self.checkpoint(style))
        return tiny.once(
            self.root / "adopted" / style, lambda path: propose(packages, source, path)
        )

    def decoder(self, style: str, precision="exact", **how):
        from workbench import Decoder

        return Decoder(self.folder(style), "portable", precision, **how)


@pytest.fixture(scope="session")
def adoptions(shared) -> Adoptions:
    return Adoptions(shared / "adopt")
