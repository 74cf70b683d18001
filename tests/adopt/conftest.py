"""Packages of five styles, each made once per session, and the bundles that adopt makes
of them."""

from pathlib import Path

import exporter_styles as styles
import pytest
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
    """Checkpoints, packages and adopted folders on demand, each made once."""

    def __init__(self, root: Path):
        self.root = root
        self.assumed: dict[str, list[dict]] = {}

    def checkpoint(self, style: str) -> Path:
        return tiny_checkpoint(STYLES[style][0], self.root)

    def packages(self, style: str) -> Path:
        folder = self.root / "packages" / style
        if not folder.exists():
            _, make, options = STYLES[style]
            if style == "future":
                options = options | {"sound": self.packages("rotating")}
            make(folder, self.checkpoint(style), **options)
        return folder

    def folder(self, style: str) -> Path:
        """The bundle that `workbench adopt` makes, nothing in it changed."""
        from workbench.adopt import propose
        from workbench.models.checkpoint import Checkpoint

        folder = self.root / "adopted" / style
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            source = Checkpoint(self.checkpoint(style))
            _, self.assumed[style] = propose([self.packages(style)], source, folder)
        return folder

    def decoder(self, style: str, precision="exact", **how):
        from workbench import Decoder

        return Decoder(self.folder(style), "portable", precision, **how)


@pytest.fixture(scope="session")
def adoptions(tmp_path_factory) -> Adoptions:
    return Adoptions(tmp_path_factory.mktemp("adopt"))
