"""Packages of five styles, each made once per session, and the folders that adopt them."""

import io
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import styles

SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
GEMMA = dict(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=8,
    num_key_value_heads=2,
)
STYLES = {
    "recipe": ("llama", styles.recipe, {"int4": True}),
    "chunks": ("llama", styles.chunks, {"lut": True}),
    "rotating": ("gemma", styles.chunks, {"window": 8, "batch": 4}),
    "monolith": ("gemma", styles.monolith, {"int4": True}),
    "host": ("qwen3", styles.host, {"lut": True}),
    "shards": ("qwen3", styles.shards, {}),
    "theta": ("llama", styles.recipe, {"fault": "theta"}),
    "future": ("gemma", styles.chunks, {"window": 8, "batch": 4, "fault": "future"}),
    "one_mask": ("gemma", styles.monolith, {"fault": "one_mask"}),
    "norm_order": ("qwen3", styles.shards, {"fault": "norm_order"}),
}
SOUND = [name for name in STYLES if name not in styles.FAULTS]


class Adoptions:
    """Checkpoints, packages and adopted folders on demand, each made once."""

    def __init__(self, root: Path, exports):
        self.root, self.exports = root, exports

    def checkpoint(self, style: str) -> Path:
        family = STYLES[style][0]
        if family == "llama":
            return self.exports.checkpoint("llama", rope_parameters=SCALING)
        if family == "gemma":
            return self.exports.checkpoint("gemma3_text", **GEMMA)
        return self.exports.checkpoint("qwen3")

    def packages(self, style: str) -> Path:
        folder = self.root / "packages" / style
        if not folder.exists():
            _, make, options = STYLES[style]
            if style == "future":
                options = options | {"sound": self.packages("rotating")}
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # the converter's own
                warnings.simplefilter("ignore")
                make(folder, self.checkpoint(style), **options)
        return folder

    def folder(self, style: str) -> Path:
        """The folder that `workbench adopt` makes, nothing in it changed."""
        from workbench.adopt import propose
        from workbench.models.checkpoint import Checkpoint

        folder = self.root / "adopted" / style
        if not folder.exists():
            source = Checkpoint(self.checkpoint(style))
            foreign, notes = propose.propose([self.packages(style)], source, folder)
            propose.write(foreign, notes, propose.target(folder))
        return folder

    def adapter(self, style: str, runtime="portable", precision="exact"):
        from workbench.adopt.adapter import Adapter, Adopted

        adopted = Adopted.open(self.folder(style))
        return Adapter(adopted, adopted.checkpoint(), runtime, precision)


@pytest.fixture(scope="session")
def adoptions(tmp_path_factory, exports) -> Adoptions:
    return Adoptions(tmp_path_factory.mktemp("adopt"), exports)
