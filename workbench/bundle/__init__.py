"""The bundle: all that passes between an export and everything after it. Knows files and shapes, computes nothing."""

from workbench.bundle.bundle import Bundle, Writer, file_entries, sha256
from workbench.bundle.manifest import Dims, Embedding, FileEntry, Layer, Manifest, Options, Rope, Shard, StateEntry, Tokens

__all__ = ["Bundle", "Dims", "Embedding", "FileEntry", "Layer", "Manifest", "Options", "Rope", "Shard", "StateEntry", "Tokens",
           "Writer", "file_entries", "sha256"]  # fmt: skip
