"""Bundles: written as a whole or not at all (`new_bundle`), and opened (`Bundle`). Every
file is compared with its size in the manifest before anything reads it, and with its
SHA-256 when the bundle is validated."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from workbench import paths
from workbench.bundle.manifest import MANIFEST_VERSION, FileEntry, Manifest, Shard
from workbench.bundle.names import PER_LAYER
from workbench.errors import InputError, field_error
from workbench.files import (
    is_lfs_pointer,
    locked,
    note_verified,
    read_bytes,
    sha256,
    was_verified,
)

NOTES = "contents"  # the folder of this checkout's notes on bundles that were verified
MIN_NOTED_BYTES = 1 << 24  # a smaller bundle is verified whenever a decoder opens it
MAPPED_BYTES = 1 << 26  # of a table at a time: mapped memory counts as resident
RESTORE = "restore the file, or make the bundle again with workbench export or adopt"
FINDER = ".DS_Store"  # macOS leaves it in every folder that its Finder shows


def file_entries(root: Path, *paths: Path) -> list[FileEntry]:
    """Entries of the files at `paths` (folders: everything below), relative to `root`,
    in a stable order."""
    below = sorted(file for path in paths for file in (path, *path.rglob("*")))
    files = [file for file in below if file.is_file()]
    entries = []
    with ThreadPoolExecutor() as pool:
        for file, digest in zip(files, pool.map(sha256, files), strict=True):
            path, size = file.relative_to(root).as_posix(), file.stat().st_size
            entries.append(FileEntry(path=path, bytes=size, sha256=digest))
    return entries


class Bundle:
    """An opened bundle: its manifest, its folder, its embedding table.

    Four methods compare the files with the manifest:

        open            every listed file is inside the folder and has its size
        verify          every SHA-256 is right, and packages have no other file
        check_hashes    `verify`, unless a note of this checkout says that these files
                        were verified
        check_contents  before anything runs: `check_hashes`, and the dimensions of the
                        embedding table"""

    def __init__(self, root: Path, manifest: Manifest):
        # Files beside the bundle are named after its folder, and `.` has no name; links
        # within the bundle are compared with the resolved folder (see `_check_size`).
        self.root = root.resolve()
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> "Bundle":
        """Opens the bundle at `path`.

        Raises:
            InputError: no bundle there, another version, a file missing, of another
                size, or outside the folder.
        """
        root = paths.check_bundle(path)
        try:
            bundle = cls(root, read_manifest(root / paths.BUNDLE))
            for entry in bundle.files:
                _check_size(bundle.root, entry)
        except OSError as problem:
            reason = f"{problem.strerror or problem} ({problem.filename})"
            step = "correct this, or copy the bundle again"
            raise InputError(
                f"bundle {path}", reason, "files that can be read", step
            ) from problem
        return bundle

    @property
    def files(self) -> list[FileEntry]:
        """Every file that the manifest lists."""
        m = self.manifest
        files = [file for shard in m.shards for file in shard.files]
        if m.calibration:
            files.append(m.calibration.file)
        if m.selection:
            files += [m.selection.file, m.selection.allocation]
        return [*files, m.embedding.file, *m.tokens.files]

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(f.bytes for f in self.files)

    @property
    def identity(self) -> str:
        """SHA-256 over the manifest and, through it, every file's hash.

        Equal for bundles that compute the same: versions of Python packages and the
        name of the checkpoint's folder are left out."""
        left_out = {"packages": True, "checkpoint": {"name"}}
        fields = self.manifest.model_dump(mode="json", exclude=left_out)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer, if the bundle has one."""
        return self.root / "tokenizer"

    def shards(self, kind: str) -> list[Shard]:
        """The shards of a kind, such as `head`."""
        return [s for s in self.manifest.shards if s.kind == kind]

    def package(self, shard: Shard) -> Path:
        """The package of a shard, or the folder of another exporter's packages."""
        return self.root / shard.path

    def packages(self, shard: Shard) -> dict[str, Path]:
        """The packages of a shard by name: one, or several of another exporter."""
        if not shard.foreign:
            return {shard.name: self.package(shard)}
        names = [part.package for part in shard.foreign.parts]
        return {Path(name).stem: self.package(shard) / name for name in names}

    def check_contents(self) -> None:
        """Refuses files whose SHA-256 is not the manifest's, and an embedding table of
        other dimensions, before they are run.

        Raises:
            InputError: see `verify`.
        """
        self.check_hashes()
        self._check_embedding()

    def check_hashes(self) -> None:
        """Refuses files whose SHA-256 is not the manifest's.

        Hashes of large bundles are not computed again while size, times and inode of
        every file are as this checkout noted them when the hashes were right. One of
        the times is that of the last change of status, which no program can set.

        Raises:
            InputError: see `verify`.
        """
        if self.bytes < MIN_NOTED_BYTES or not was_verified(NOTES, self._stamp()):
            self.verify()

    def _stamp(self) -> dict[str, str]:
        """Hashes that change with the manifest and with the size, times or inode of a file.
        The contents of files are not read."""
        stamps = []
        for entry in self.files:
            _check_size(self.root, entry)
            status = (self.root / entry.path).stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            stamps.append((entry.path, status.st_size, *times, status.st_ino))
        digest = hashlib.sha256(json.dumps(sorted(stamps)).encode()).hexdigest()
        return {"bundle": self.identity, "files": digest}

    def verify(self) -> None:
        """Raises an InputError for a file whose SHA-256 is not the manifest's, and for a
        file in a package or in the tokenizer's folder that the manifest does not
        list."""
        stamp = self._stamp()
        listed = {entry.path: entry for entry in self.files}
        folders = [self.package(shard) for shard in self.manifest.shards]
        scanned = file_entries(self.root, self.tokenizer, *folders)
        # the embedding table, and the texts and choices behind the weights
        others = listed.keys() - {entry.path for entry in scanned}
        scanned += file_entries(self.root, *(self.root / path for path in others))
        for entry in scanned:
            path = self.root / entry.path
            if entry == listed.get(entry.path) or path.name == FINDER:
                continue
            if entry.path in listed:
                raise _damaged(path, "bytes that differ from the manifest's SHA-256")
            raise _damaged(path, f"a file that {paths.BUNDLE} does not list")
        if self.bytes >= MIN_NOTED_BYTES and stamp == self._stamp():
            note_verified(NOTES, stamp)

    def _check_embedding(self) -> None:
        """Refuses tables that do not have the manifest's dimensions."""
        from safetensors import SafetensorError, safe_open

        dims = self.manifest.dims
        tables = {"weight": ("F16", [dims.V, dims.C])}
        vectors = dict.fromkeys(("bias", "scale"), ("F32", [dims.C]))
        second_table = {PER_LAYER: ("F16", [dims.V, dims.L * dims.P])}
        path = self.root / self.manifest.embedding.file.path
        try:
            with safe_open(path, "np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}
                stored = {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}
        except SafetensorError as problem:
            raise _damaged(path, f"no whole safetensors file ({problem})") from None
        expected = tables | (second_table if dims.P else {})
        # a family has both vectors or none of them
        if stored not in (expected, expected | vectors):
            needed = f"tables of {tables | vectors | second_table}"
            step = "export again, or copy the bundle again"
            raise InputError(str(path), str(stored), needed, step)

    @cached_property
    def embedding(self) -> dict[str, np.ndarray]:
        """The tables that the host reads, in their file: `weight` [V, C] fp16 and, where
        the family has them, `bias` and `scale` [C] fp32, `per_layer` [V, L·P] fp16."""
        from safetensors import safe_open

        path = self.root / self.manifest.embedding.file.path
        # torch's tensors stay in the file; NumPy's would be read whole, and reading
        # slices takes longer
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).numpy() for name in file.keys()}

    def table_rows(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """A table of `embedding` in order, some rows at a time, and which these are.

        Every part is mapped by itself: what was read through the mapping of `embedding`
        would stay in memory as long as the bundle."""
        from safetensors import safe_open

        path = self.root / self.manifest.embedding.file.path
        with safe_open(path, "pt") as file:
            count, *others = file.get_slice(name).get_shape()
        step = max(1, MAPPED_BYTES // (2 * math.prod(others)))
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            with safe_open(path, "pt") as file:
                yield rows, file.get_slice(name)[rows].numpy()

    @cached_property
    def calibration_ids(self) -> np.ndarray | None:
        """The token ids [windows, window] of the text with which the weights were
        calibrated; None: with no text."""
        calibration = self.manifest.calibration
        if calibration is None:
            return None
        return np.load(self.root / calibration.file.path, allow_pickle=False)

    @cached_property
    def selection_ids(self) -> np.ndarray | None:
        """The token ids [windows, window] of the text on which the formats of matrices
        were chosen; None: on no text."""
        selection = self.manifest.selection
        if selection is None:
            return None
        return np.load(self.root / selection.file.path, allow_pickle=False)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [B, T] → hidden [B, T, C] float32, the input of the first shard.

        Raises:
            InputError: the file of the table no longer has the size that it had when
                it was opened. (Reading the lost part would end the process.)
        """
        _check_size(self.root, self.manifest.embedding.file)
        table = self.embedding
        hidden = table["weight"][ids].astype(np.float32)
        if "bias" in table:
            hidden = (hidden + table["bias"]) * table["scale"]
        return hidden * np.float32(self.manifest.embedding.scale)

    def embed_per_layer(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [B, T] → the second embedding of every layer [B, T, L·P] float32, √P
        times the table's rows.

        Raises:
            InputError: see `embed`.
        """
        _check_size(self.root, self.manifest.embedding.file)
        rows = self.embedding[PER_LAYER][ids].astype(np.float32)
        return rows * np.float32(self.manifest.dims.P**0.5)


@contextmanager
def new_bundle(target: Path) -> Iterator[Path]:
    """Context manager in which one bundle is written: gives an empty folder beside
    `target`, which is renamed to `target` at the end.

    The folder is locked while a process writes to it; the lock ends with the process.
    Files that a killed export has left there are removed first, and an exception
    removes the folder.

    Raises:
        InputError: something is at `target`, or another process is exporting to it.
    """
    second_export = InputError(
        f"bundle {target}",
        "another export writing to it",
        "one export to one target",
        "wait for that one, or choose another target",
    )
    folder = paths.unfinished_folder(target)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, second_export):
        try:
            paths.check_new_bundle(target)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield folder
            folder.rename(target)
        except BaseException as problem:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(problem, KeyboardInterrupt):
                problem.add_note("nothing was kept; the same command starts again")
            raise


def read_manifest(path: Path) -> Manifest:
    """Parses a manifest.

    Raises:
        InputError: no JSON, another version, or a key or a value that no manifest has.
    """
    try:
        return Manifest.model_validate_json(read_bytes(path))
    except ValidationError as problem:
        fault = problem.errors(include_url=False)[0]
        raise _manifest_error(str(path), fault) from None


def _manifest_error(subject: str, fault: Mapping[str, Any]) -> InputError:
    """The error for the first fault, one of pydantic's `errors()`, in a bundle.json."""
    if fault["type"] == "json_invalid":
        needed = "JSON, as workbench export writes it"
        return InputError(subject, _json_fault(fault["ctx"]["error"]), needed, RESTORE)
    if fault["loc"] == ("version",):
        actual = f"version {fault['input']}"
        needed = f"version {MANIFEST_VERSION}"
        return InputError(subject, actual, needed, "export again with this workbench")
    return field_error(fault, Manifest, subject, RESTORE)


def _json_fault(text: str) -> str:
    """Where and why a text is no JSON, from the words of pydantic's parser: `expected value
    at line 1 column 1`."""
    place = re.fullmatch(r"(.*) at line (\d+) column (\d+)", text, re.DOTALL)
    if not place:
        return f"no JSON: {text}"
    reason, line, column = place.groups()
    if reason.startswith("EOF"):
        reason = "the file ends too early"
    return f"no JSON in line {line}, column {column}: {reason}"


def _check_size(root: Path, entry: FileEntry) -> None:
    """Raises an InputError for a file that is missing, outside the bundle, or not as
    large as the manifest says."""
    path = root / entry.path
    if not path.resolve().is_relative_to(root):
        raise _damaged(path, f"a link to {path.resolve()}, outside the bundle")
    if not path.is_file():
        raise _damaged(path, "no file")
    if (size := path.stat().st_size) != entry.bytes:
        sizes = f"{size} of {entry.bytes} bytes"
        raise _damaged(path, "a Git LFS pointer" if is_lfs_pointer(path) else sizes)


def _damaged(path: Path, actual: str) -> InputError:
    return InputError(
        str(path),
        actual,
        "the file the export wrote",
        "export again, or copy the bundle again",
    )
