"""Opened bundles: every file is compared with the manifest's size of it before anything
reads it, and with its SHA-256 when the bundle is validated."""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from pydantic import ValidationError

from workbench import paths
from workbench.bundle.manifest import (
    MANIFEST_VERSION,
    FileEntry,
    Manifest,
    Shard,
    first_fault,
)
from workbench.errors import InputError
from workbench.files import is_lfs_pointer, sha256

MANIFEST_NAME = paths.BUNDLE
MAX_MANIFEST_BYTES = 64 << 20
FINDER = ".DS_Store"  # macOS leaves it in every folder that its Finder shows


def file_entries(root: Path, *paths: Path) -> list[FileEntry]:
    """Entries of the files at `paths` (folders: everything below), relative to `root`,
    in a stable order."""
    entries = []
    files = list(paths)
    for path in paths:
        files += path.rglob("*")
    for file in sorted(files):
        if file.is_file():
            name = file.relative_to(root).as_posix()
            size = file.stat().st_size
            entries.append(FileEntry(path=name, bytes=size, sha256=sha256(file)))
    return entries


class Bundle:
    """An opened bundle: its manifest, its folder, its embedding table.

    Opening checks that every file is there with its size, `verify` also its SHA-256."""

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> "Bundle":
        """Opens the bundle at `path`.

        Raises:
            InputError: no bundle there, another version, a file missing, of another
                size, outside it, or in a shard's package without being listed.
        """
        # `.` has no name to call the files beside it after
        root = paths.bundle(path).resolve()
        try:
            bundle = cls(root, read_manifest(root / MANIFEST_NAME))
            for entry in bundle.files:
                bundle._check_plain(root / entry.path, entry)
            bundle._check_unlisted()
            bundle._check_embedding()
        except OSError as problem:
            reason = f"{problem.strerror or problem} ({problem.filename})"
            step = "correct this, or copy the bundle again"
            raise InputError(
                f"bundle {path}", reason, "files that can be read", step
            ) from problem
        return bundle

    @classmethod
    def unchecked(cls, path: str | Path) -> "Bundle":
        """The bundle at `path`, of which only the manifest is read."""
        return cls(Path(path), read_manifest(paths.bundle(path) / MANIFEST_NAME))

    @property
    def files(self) -> list[FileEntry]:
        files = []
        for shard in self.manifest.shards:
            files += shard.files
        return [*files, self.manifest.embedding.file, *self.manifest.tokens.files]

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(f.bytes for f in self.files)

    @property
    def identity(self) -> str:
        """SHA-256 over the manifest and, through it, every file's hash.

        Equal for bundles that compute the same: versions of packages and the name of
        the checkpoint's folder are left out."""
        aside = {"packages": True, "checkpoint": {"name"}}
        fields = self.manifest.model_dump(mode="json", exclude=aside)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer(self) -> Path:
        """The folder that the tokenizer is in, if the bundle has one."""
        return self.root / "tokenizer"

    def shards(self, kind: str) -> list[Shard]:
        return [s for s in self.manifest.shards if s.kind == kind]

    def package(self, shard: Shard) -> Path:
        return self.root / shard.path

    def packages(self, shard: Shard) -> dict[str, Path]:
        """The packages that a shard consists of, by name: one, or those of another
        exporter."""
        if not shard.foreign:
            return {shard.name: self.package(shard)}
        names = [part.package for part in shard.foreign.parts]
        return {Path(name).stem: self.package(shard) / name for name in names}

    def verify(self) -> None:
        """Raises an InputError for a file whose SHA-256 is not the manifest's."""
        for entry in self.files:
            path = self.root / entry.path
            if sha256(path) != entry.sha256:
                raise _damaged(path, "bytes that differ from the manifest's SHA-256")

    def _check_unlisted(self) -> None:
        """Raises an InputError for a file in a package, or beside the tokenizer's, that
        the manifest does not list."""
        listed = {self.root / entry.path for entry in self.files}
        folders = {PurePosixPath(shard.path) for shard in self.manifest.shards}
        tokenizer = {
            PurePosixPath(entry.path).parent for entry in self.manifest.tokens.files
        }
        for folder in sorted(folders | tokenizer - {PurePosixPath(".")}):
            for parent, below, names in os.walk(self.root / folder, onerror=_raise):
                for name in sorted([*below, *names]):
                    path = Path(parent, name)
                    if path.is_symlink():
                        raise _damaged(path, "a symlink")
                    if path not in listed and path.name != FINDER and not path.is_dir():
                        raise InputError(
                            str(path),
                            f"a file that {MANIFEST_NAME} does not list",
                            "the files that the export wrote and no others",
                            "remove it, or export again",
                        )

    def _check_embedding(self) -> None:
        """Reads the header of the embedding file and raises an InputError if it does
        not fit the model."""
        from safetensors import SafetensorError, safe_open

        path = self.root / self.manifest.embedding.file.path
        dims = self.manifest.dims
        try:
            with safe_open(path, "numpy") as table:
                tensors = {name: table.get_slice(name) for name in table.keys()}
        except (SafetensorError, ValueError):
            raise _damaged(path, "no safetensors file") from None
        if "weight" not in tensors:
            raise _damaged(path, "no weight")
        for one, other in (("bias", "scale"), ("scale", "bias")):
            if one in tensors and other not in tensors:
                raise _damaged(path, f"{one} without {other}")
        for name, tensor in tensors.items():
            dtype = tensor.get_dtype()
            shape = tensor.get_shape()
            expected = [dims.V, dims.C] if name == "weight" else [dims.C]
            if dtype not in ("F16", "F32") or shape != expected:
                raise _damaged(
                    path, f"{name} {dtype} {shape} for V = {dims.V}, C = {dims.C}"
                )

    def _check_plain(self, path: Path, entry: FileEntry) -> None:
        below_root = [path, *path.parents][: len(Path(entry.path).parts)]
        if any(part.is_symlink() for part in below_root):
            raise _damaged(path, "a symlink")
        if not path.is_file():
            raise _damaged(path, "no file")
        size = path.stat().st_size
        if size != entry.bytes:
            sizes = f"{size} of {entry.bytes} bytes"
            raise _damaged(path, "a Git LFS pointer" if is_lfs_pointer(path) else sizes)

    @cached_property
    def embedding(self) -> dict[str, np.ndarray]:
        """The tables that the host reads, in their file: `weight` [V, C] fp16 and, where
        the family has them, `bias` and `scale` [C] fp32."""
        from safetensors import safe_open

        path = self.root / self.manifest.embedding.file.path
        # as torch's tensors, which stay in the file; reading slices takes longer
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).numpy() for name in file.keys()}

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [B, T] → hidden [B, T, C] float32, the input of the first shard."""
        table = self.embedding
        hidden = table["weight"][ids].astype(np.float32)
        if "bias" in table:
            hidden = (hidden + table["bias"]) * table["scale"]
        return hidden * np.float32(self.manifest.embedding.scale)


def read_manifest(path: Path) -> Manifest:
    """Parses a manifest. Raises an InputError that names an unknown version or key."""
    if path.is_symlink():
        raise _damaged(path, "a symlink")
    if (size := path.stat().st_size) > MAX_MANIFEST_BYTES:
        raise InputError(
            str(path), f"{size} bytes", "a manifest under 64 MiB", "export again"
        )
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        field, error = first_fault(problem, "its contents")
        raise InputError(
            str(path),
            f"{field}: {error['msg']}",
            f"a bundle of version {MANIFEST_VERSION}",
            "export again with this workbench",
        ) from None


def _raise(problem: OSError) -> None:
    raise problem


def _damaged(path: Path, actual: str) -> InputError:
    return InputError(
        str(path),
        actual,
        "the file the export wrote",
        "export again, or copy the bundle again",
    )
