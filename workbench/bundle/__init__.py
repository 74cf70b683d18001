"""The bundle, which passes from an export to everything after it: files, shapes and the
manifest. Nothing here runs a shard; the one computation on values is the lookup of
embeddings.

A file imports only files above it in this list:

- `names.py`: names and shapes of the tensors that cross the Core ML boundary;
- `rings.py`: which row of a ring buffer holds which position;
- `tiling.py`: how tokens are cut into calls;
- `presets.py`: how weights are stored, by the names of `--compress`;
- `fields.py`: the base class and the field types of the manifest's parts;
- `foreign.py`: the part of the manifest that describes another exporter's packages;
- `manifest.py`: the pydantic models of `bundle.json`, from the export options down to
  single files. An export fills them in, everything later reads them;
- `options.py`: the export options from keywords, or one refusal of them;
- `bundle.py`: writes a bundle's folder as a whole, opens one, compares its files with the
  manifest, and looks embeddings up."""

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
