"""The bundle, which passes from an export to everything after it: files, shapes and the
manifest. Nothing here computes."""

from workbench.bundle.bundle import Bundle, file_entries
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
from workbench.bundle.writer import Writer
from workbench.files import sha256

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
    "Writer",
    "file_entries",
    "sha256",
]
