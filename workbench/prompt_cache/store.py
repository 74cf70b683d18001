"""A store of snapshots, warm on disk and hot in memory, found by name or by a prompt's
prefix.

A file is one snapshot. It is written under a temporary name, synced and renamed, so
that it is complete or absent. Several processes may share a folder without a lock; the
last save of a name replaces the earlier file."""

import contextlib
import hashlib
import math
import os
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.decode.decoder import Decoder
from workbench.decode.snapshot import Snapshot, UndoDepth, foreign, layout
from workbench.errors import InputError
from workbench.prompt_cache import formats
from workbench.prompt_cache.formats import IDS, Encoded

SUFFIX = ".safetensors"
HEADER_BYTES = 1 << 20
STALE_SECONDS = 3600  # age at which a temporary file is removed: its process has died
Stamp = tuple[int, int, int]  # inode, size, mtime in ns; changes with every save


@dataclass(frozen=True)
class Saved:
    """The result of a save: the file, its bytes, the bytes of the arrays without
    quantization, and the largest relative error of a quantized tensor (0 if there is
    none)."""

    path: Path
    bytes: int
    full_bytes: int
    error: float


@dataclass(frozen=True)
class Hit:
    """A snapshot of a prompt's prefix, the remaining tokens of the prompt (at least
    one), the snapshot's name, and whether it came from memory (hot) or disk (warm)."""

    snapshot: Snapshot
    rest: list[int]
    name: str
    temperature: str  # hot or warm


class Store:
    """The snapshots of one decoder's bundle in a folder.

    Args:
        folder: made if missing; snapshots of other bundles in it are skipped.
        decoder: the decoder of the snapshots; bundles that differ only in their batch
            may share a folder.
        block: tokens per block; `find` trims a snapshot to whole blocks (default: 256,
            fewer when max_seq_len is below 1024).
        hot_bytes: memory for hot snapshots; the least recently used are dropped first.
    """

    def __init__(
        self,
        folder: str | Path,
        decoder: Decoder,
        *,
        block: int | None = None,
        hot_bytes: int = 1 << 28,
    ):
        self.folder = Path(folder)
        self.identity = decoder.identity
        self.manifest = decoder.manifest
        S = self.manifest.options.max_seq_len
        quarter = 1 << (S // 4).bit_length() - 1
        self.block = block or min(256, max(4, quarter))
        self.hot_bytes = hot_bytes
        exact = decoder.arithmetic == "exact"
        self.dtype = "float32" if exact else "float16"
        self.hot: OrderedDict[str, tuple[Stamp, Encoded]] = OrderedDict()
        self.seen: dict[str, tuple[Stamp, Encoded]] = {}  # name → stamp, ids and header
        self.refused: dict[str, str] = {}  # name → why `find` skipped it
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            needed = "a folder that can be written"
            reason = problem.strerror
            subject = f"store {folder}"
            raise InputError(subject, reason, needed, "choose another") from problem
        for temporary in self.folder.glob(".tmp*"):
            # another process may have just renamed it
            with contextlib.suppress(FileNotFoundError):
                if time.time() - temporary.stat().st_mtime > STALE_SECONDS:
                    temporary.unlink()

    def save(self, name: str, snapshot: Snapshot, format: str = "fp16") -> Saved:
        """Saves a snapshot under a name, in memory and on disk; replaces an earlier
        one.

        Raises:
            InputError: an unusable name or snapshot, or no room on the disk; the
                earlier snapshot of the name stays.
        """
        path = self._path(name)
        if snapshot.identity != self.identity or not snapshot.offset:
            raise InputError(
                f"snapshot {name!r}",
                f"{snapshot.offset} tokens, identity {snapshot.identity[:12]}",
                f"at least one token, identity {self.identity[:12]}",
                "save it with the store of its own decoder",
            )
        encoded = formats.encode_rows(snapshot, format)
        encoded.header["save_id"] = uuid.uuid4().hex
        stamp = _write_snapshot(path, encoded)
        self._heat(name, stamp, encoded)
        quantized = encoded.errors.keys() - encoded.tensors
        error = max((encoded.errors[name] for name in quantized), default=0.0)
        return Saved(path, stamp[1], snapshot.nbytes, error)

    def load(self, name: str) -> Snapshot:
        """A copy of the snapshot of a name, from memory or disk.

        Raises:
            InputError: no such name; a file that is damaged, of another bundle, or of
                an unknown version.
        """
        return self._fetch(name)[0]

    def find(self, ids: Sequence[int]) -> Hit | None:
        """The snapshot with the longest usable prefix of a prompt, trimmed to it; None
        if no snapshot has one.

        The prefix is the whole snapshot or whole blocks of it. At least one token of
        the prompt remains, since its logits are needed: of a prompt that is stored
        whole the last token is run again at its own position. A snapshot that cannot be
        trimmed far enough is skipped."""
        prompt = np.array(ids, np.int32)
        lengths = {}
        for name, stored in self._scan().items():
            lengths[name] = self._usable(stored, prompt)
        for name in sorted(lengths, key=lengths.get, reverse=True):
            length = lengths[name]
            if not length:
                break
            try:
                snapshot, temperature = self._fetch(name)
            except InputError as problem:
                self.refused[name] = str(problem)
                continue
            snapshot = snapshot.trim(snapshot.offset - length)
            # the ids differ if another process has saved the name meanwhile
            if snapshot.ids == tuple(ids[:length]):
                return Hit(snapshot, list(ids[length:]), name, temperature)
        return None

    def names(self) -> list[str]:
        """Names of the snapshots on the disk, sorted."""
        files = self.folder.glob(f"[!.]*{SUFFIX}")
        return sorted(file.name.removesuffix(SUFFIX) for file in files)

    def cool(self, name: str | None = None) -> None:
        """Drops one snapshot, or all of them, from memory and leaves them on the
        disk."""
        for each in [name] if name else list(self.hot):
            self.hot.pop(each, None)

    def delete(self, name: str) -> None:
        """Drops a snapshot from memory and disk."""
        self._path(name).unlink(missing_ok=True)
        self.cool(name)

    def _fetch(self, name: str) -> tuple[Snapshot, str]:
        path = self._path(name)
        stamp = _stamp(path)
        encoded = self._in_memory(name, stamp)
        temperature = "hot"
        if encoded is None:
            encoded = self._read(path)
            temperature = "warm"
        self._heat(name, stamp, encoded)
        return formats.decode_rows(encoded), temperature

    def _in_memory(self, name: str, stamp: Stamp) -> Encoded | None:
        hot_stamp, encoded = self.hot.get(name, (None, None))
        return encoded if hot_stamp == stamp else None

    def _heat(self, name: str, stamp: Stamp, encoded: Encoded) -> None:
        self.hot[name] = (stamp, encoded)
        self.hot.move_to_end(name)
        while sum(e.nbytes for _, e in self.hot.values()) > self.hot_bytes:
            self.hot.popitem(last=False)

    def _path(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            needed = "up to 100 letters, digits, '.', '_', '-', no leading '.'"
            raise InputError("snapshot name", repr(name), needed, "choose another name")
        return self.folder / f"{name}{SUFFIX}"

    def _scan(self) -> dict[str, Encoded]:
        """Ids and header of every snapshot of this bundle on the disk; reads new files
        only."""
        seen = {}
        for name in self.names():
            try:
                path = self._path(name)
                stamp = _stamp(path)
                if self.seen.get(name, (None,))[0] == stamp:
                    seen[name] = self.seen[name]
                else:
                    encoded = self._in_memory(name, stamp)
                    encoded = encoded or self._read(path, only_ids=True)
                    ids = {IDS: encoded.tensors[IDS]}
                    seen[name] = stamp, Encoded(ids, encoded.header, {})
                self.refused.pop(name, None)
            except InputError as problem:
                self.refused[name] = str(problem)
        self.seen = seen
        return {name: encoded for name, (_, encoded) in seen.items()}

    def _usable(self, encoded: Encoded, prompt: np.ndarray) -> int:
        """The number of a snapshot's tokens that a prompt can use: all of them, whole
        blocks, or 0."""
        stored = encoded.tensors[IDS]
        end = len(stored)
        shorter = min(end, len(prompt))
        equal = stored[:shorter] == prompt[:shorter]
        shared = int(np.logical_and.accumulate(equal).sum())
        if shared < end:
            shared -= shared % self.block
        length = min(shared, len(prompt) - 1)
        if length < int(encoded.header["floor"]):
            return 0
        return length

    def _read(self, path: Path, only_ids: bool = False) -> Encoded:
        """A file's contents; its header, dtypes and shapes are checked against this
        bundle before any tensor is read."""
        from safetensors import SafetensorError, safe_open

        if path.is_symlink() or not path.is_file():
            raise _damaged_snapshot(path, "a symlink or no file")
        S = self.manifest.options.max_seq_len
        size = path.stat().st_size
        longest = layout(self.manifest, S, S - self.manifest.options.t_max)
        most = sum(4 * math.prod(shape) for shape in longest.values())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if size > most + 2 * HEADER_BYTES or length > HEADER_BYTES:
            raise _damaged_snapshot(path, f"{size} bytes, {length} of them a header")
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                expected = self._tensors(path, header, set(file.keys()))
                for name, (dtype, shape) in expected.items():
                    view = file.get_slice(name)
                    kind = view.get_dtype()
                    sizes = view.get_shape()
                    if (kind, sizes) != (_DTYPES[dtype], list(shape)):
                        raise _damaged_snapshot(path, f"{name} as {kind} {sizes}")
                names = [IDS] if only_ids else expected
                tensors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError, ValueError, KeyError) as problem:
            if isinstance(problem, InputError):
                raise
            reason = str(problem) or type(problem).__name__
            raise _damaged_snapshot(path, reason) from problem
        encoded = Encoded(tensors, header, {})
        if not only_ids and header.get("digest") != _digest(encoded):
            raise _damaged_snapshot(path, "bytes that differ from its digest")
        return encoded

    def _tensors(
        self, path: Path, header: dict[str, str], names: set[str]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor that a file with this header must have;
        refuses a header of another bundle."""
        keys = "format", "version", "identity", "dtype"
        kind, version, identity, dtype = map(header.get, keys)
        if (kind, version) != ("workbench-snapshot", formats.FORMAT_VERSION):
            raise _damaged_snapshot(path, f"format {kind!r}, version {version!r}")
        if identity != self.identity:
            raise foreign(f"snapshot {path}", str(identity), self.identity)
        numbers = header.get("offset", ""), header.get("floor", "")
        offset, floor = map(_number, numbers)
        deepest = UndoDepth(self.manifest).floor(floor, offset)
        fits = 1 <= offset <= self.manifest.options.max_seq_len
        if not fits or not deepest <= floor <= offset or dtype != self.dtype:
            shown = "offset {!r:.20}, floor {!r:.20}".format(*numbers)
            raise _damaged_snapshot(path, f"{shown}, dtype {dtype!r}")
        states = formats.shapes(layout(self.manifest, offset, floor), self.dtype, names)
        expected = {IDS: ("int32", (offset,))} | states
        if wrong := sorted(names ^ expected.keys()):
            some = ", ".join(wrong[:3])
            raise _damaged_snapshot(path, f"tensors {some} missing or unknown")
        return expected


_DTYPES = {"float16": "F16", "float32": "F32", "uint8": "U8", "int32": "I32"}


def _write_snapshot(path: Path, encoded: Encoded) -> Stamp:
    """Writes a snapshot under a temporary name, syncs it and renames it; removes the
    file if that fails."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    encoded.header["digest"] = _digest(encoded)
    temporary = path.with_name(f".tmp{uuid.uuid4().hex}")
    try:
        save_file(encoded.tensors, temporary, metadata=encoded.header)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        stamp = _stamp(temporary)
        os.replace(temporary, path)
        return stamp
    except (OSError, SafetensorError) as problem:
        temporary.unlink(missing_ok=True)
        needed = "a folder that can be written, with room for it"
        step = "free some room, or choose another folder"
        raise InputError(f"snapshot {path}", str(problem), needed, step) from problem


def _digest(encoded: Encoded) -> str:
    """SHA-256 over the header (the digest apart) and every tensor: names, dtypes,
    shapes, bytes."""
    header = dict(encoded.header)
    header.pop("digest", None)
    digest = hashlib.sha256(repr(sorted(header.items())).encode())
    for name, value in sorted(encoded.tensors.items()):
        digest.update(f"{name}{value.dtype.name}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _number(text: str) -> int:
    """A number of up to nine digits; -1 for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        needed = "a snapshot that was saved"
        subject = f"snapshot {path}"
        raise InputError(subject, "no such file", needed, "save it first") from None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _damaged_snapshot(path: Path, problem: str) -> InputError:
    return InputError(
        f"snapshot {path}",
        problem,
        f"a whole snapshot of version {formats.FORMAT_VERSION}, as `save` wrote it",
        "delete the file and prefill again",
    )
