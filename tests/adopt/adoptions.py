"""Packages of five styles, each made once per run, and the bundles that adopt makes of
them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import exporter_styles as styles
import tiny
from exporter_model import Model

from workbench import Bundle, Decoder
from workbench.adopt import adopt_packages
from workbench.check import golden
from workbench.models.checkpoint import Checkpoint

SIZES = tiny.dims(vocab=97)
SCALING = {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0}
SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 16}
CHECKPOINTS = {
    "llama": {"rope_parameters": SCALING, "tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
    },
}
LUT, ROTATING = {"stored": styles.LUT4}, {"window": 8, "batch": 4}


class Style(NamedTuple):
    """Packages of one style.

    Attributes:
        family: of the checkpoint, a key of `CHECKPOINTS`.
        save: writes the packages of a `Model` into a folder.
        options: of `save`.
    """

    family: str
    save: Callable[..., None]
    options: dict


SOUND = {
    "recipe": Style("llama", styles.recipe, {"stored": styles.INT4}),
    "chunks": Style("llama", styles.chunks, LUT),
    "rotating": Style("gemma3_text", styles.chunks, ROTATING),
    "monolith": Style("gemma3_text", styles.monolith, LUT),
    "host": Style("qwen3", styles.host, {"stored": styles.LUT8}),
    "shards": Style("qwen3", styles.shards, {}),
    "newest": Style("qwen3", styles.host, {"moves": True}),
}
FAULTS = {
    # a rotated prefill is not causal
    "future": Style("gemma3_text", styles.chunks, ROTATING),
    # rope scaling is replaced by theta times factor
    "theta": Style("llama", styles.recipe, {}),
    # sliding layers see as far back as full ones
    "one_mask": Style("gemma3_text", styles.monolith, {}),
    # q and k are normed after rope, not before it
    "norm_order": Style("qwen3", styles.shards, {}),
}
STYLES = SOUND | FAULTS
NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
"""The names by which Hunyuan, which is Qwen 3 with norms after rope, calls them."""
MISREAD = {
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 4e4}}, {}),
    "one_mask": ({"sliding_window": 64}, {}),
    "norm_order": ({"model_type": "hunyuan_v1_dense", "architectures": None}, NORMS),
}
"""Fault → what its exporter reads in the configuration, and the names of tensors."""


def relabelled(source: Path, target: Path, config: dict, names: dict[str, str]) -> Path:
    """A checkpoint with another configuration and other names of its tensors."""
    shutil.copytree(source, target)
    (target / "config.json").write_text(json.dumps(config))
    with tiny.edited_weights(target) as weights:
        for name in list(weights):
            other = name
            for old, new in names.items():
                other = other.replace(old, new)
            weights[other] = weights.pop(name)
    return target


def config_of(source: Path) -> dict:
    return json.loads((source / "config.json").read_text())


class Adoptions:
    """Checkpoints, packages and adopted folders on demand, each made once for all
    processes."""

    def __init__(self, root: Path):
        self.root = root

    def checkpoint(self, style: str) -> Path:
        family = STYLES[style].family
        dims, target = SIZES | CHECKPOINTS[family], self.root / family
        return tiny.once(
            target, lambda path: tiny.random_checkpoint(path, family, **dims)
        )

    def packages(self, style: str) -> Path:
        checkpoint = source = self.checkpoint(style)
        if style in MISREAD:
            edits, names = MISREAD[style]
            config = config_of(checkpoint) | edits
            source = tiny.once(
                self.root / f"read-{style}",
                lambda path: relabelled(checkpoint, path, config, names),
            )

        options = STYLES[style].options
        if style == "future":
            options = options | {"sound": self.packages("rotating")}

        def save(folder: Path) -> None:
            folder.mkdir()
            STYLES[style].save(folder, Model(source), **options)

        return tiny.once(self.root / f"packages-{style}", save)

    def folder(self, style: str) -> Path:
        """The bundle that `workbench adopt` makes, nothing in it changed."""
        sources, checkpoint = [self.packages(style)], Checkpoint(self.checkpoint(style))
        return tiny.once(
            self.root / "adopted" / style,
            lambda path: adopt_packages(sources, checkpoint, path),
        )

    def stored_logits(self, style: str, ids: list[int]):
        """Those [T, V] of Hugging Face's model on the weights that the packages hold."""
        source = Checkpoint(self.checkpoint(style))
        weights = golden.stored_weights(source, Bundle.open(self.folder(style)))
        return golden.make_golden(source, ids, weights, "stored")["logits"]

    def decoder(self, style: str):
        return Decoder(self.folder(style), "portable", "exact")
