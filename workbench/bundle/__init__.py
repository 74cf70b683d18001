"""The bundle: all that passes between an export and everything after it. Knows files and shapes, computes nothing."""

from .contract import Dims, Embedding, FileEntry, Layer, Manifest, Options, Rope, Shard, State, Tokens
from .store import Bundle, Writer, file_entries, sha256

__all__ = ["Bundle", "Dims", "Embedding", "FileEntry", "Layer", "Manifest", "Options", "Rope", "Shard", "State", "Tokens",
           "Writer", "file_entries", "sha256"]  # fmt: skip
