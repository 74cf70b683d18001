"""The bundle, which passes from an export to everything after it: files, shapes and the
manifest. Nothing here runs a shard; the one computation on values is the lookup of
embeddings."""

from workbench.bundle.bundle import Bundle, file_entries, new_bundle
from workbench.bundle.manifest import (
    Calibration,
    Dims,
    Embedding,
    FileEntry,
    Layer,
    Manifest,
    Options,
    Rope,
    Selection,
    Shard,
    StateEntry,
    Tokens,
)
from workbench.bundle.presets import PRESETS, find_preset

__all__ = [
    "PRESETS",
    "Bundle",
    "Calibration",
    "Dims",
    "Embedding",
    "FileEntry",
    "Layer",
    "Manifest",
    "Options",
    "Rope",
    "Selection",
    "Shard",
    "StateEntry",
    "Tokens",
    "file_entries",
    "find_preset",
    "new_bundle",
]
