"""The bundle, which passes from an export to everything after it: files, shapes and the
manifest. Nothing here computes."""

from workbench.bundle.bundle import Bundle, file_entries, new_bundle
from workbench.bundle.manifest import (
    Dims,
    Embedding,
    FileEntry,
    Layer,
    Manifest,
    Options,
    Rope,
    Shard,
    StateEntry,
    Tokens,
)
from workbench.bundle.presets import PRESETS

__all__ = [
    "PRESETS",
    "Bundle",
    "Dims",
    "Embedding",
    "FileEntry",
    "Layer",
    "Manifest",
    "Options",
    "Rope",
    "Shard",
    "StateEntry",
    "Tokens",
    "file_entries",
    "new_bundle",
]
