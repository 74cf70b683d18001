"""Snapshots kept for later: warm on disk, hot in memory, by name and by the tokens they begin with.

A file is one snapshot, whole or not there: written beside its place, synced, renamed. Nothing is locked, so several
processes may share a folder; the last one to save a name wins. Knows a decoder's identity and shapes, runs nothing.
"""

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
from workbench.decode.snapshot import Snapshot, foreign, layout, trimmable
from workbench.errors import InputError
from workbench.prompt_cache import formats
from workbench.prompt_cache.formats import IDS, Encoded

SUFFIX = ".safetensors"
HEADER_BYTES = 1 << 20
STALE_SECONDS = 3600  # a file half written that long ago was left by a process that died
Stamp = tuple[int, int, int]  # inode, size, mtime in ns: another one means another save


@dataclass(frozen=True)
class Saved:
    """What a save wrote: its file and size, the size of the arrays as they were, the largest relative error of what was
    quantized (0 when exact), and the names of the cache tensors that q4 left as they were."""

    path: Path
    bytes: int
    full_bytes: int
    error: float
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Hit:
    """A snapshot that a prompt begins with, the tokens behind it (at least one), its name, and where it came from."""

    snapshot: Snapshot
    rest: list[int]
    name: str
    temperature: str  # hot or warm


class Store:
    """The snapshots of one decoder's bundle in a folder.

    Args:
        folder: made if missing; snapshots of other bundles may lie there too, they are never found.
        decoder: whose snapshots these are; decoders of bundles that differ only in their batch may share them.
        block: tokens per hashed block (default: 256, fewer when max_seq_len is below 1024).
        hot_bytes: memory for hot snapshots; the least recently used leave first.
    """

    def __init__(self, folder: str | Path, decoder: Decoder, *, block: int | None = None, hot_bytes: int = 1 << 28):
        self.folder, self.identity, self.manifest = Path(folder), decoder.identity, decoder.manifest
        S = self.manifest.options.max_seq_len
        self.block, self.hot_bytes = block or min(256, max(4, 1 << (S // 4).bit_length() - 1)), hot_bytes
        self.dtype = "float32" if decoder.runtime == "portable" and decoder.precision == "exact" else "float16"
        self.hot: OrderedDict[str, tuple[Stamp, Encoded]] = OrderedDict()
        self.seen: dict[str, tuple[Stamp, np.ndarray, list[bytes]]] = {}  # name → stamp, ids, chained hashes
        self.refused: dict[str, str] = {}  # name → why `find` passed it by
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"store {folder}", problem.strerror, "a folder that can be written", "choose another") from problem
        for left in self.folder.glob(".tmp*"):
            with contextlib.suppress(FileNotFoundError):  # another process has just finished it
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()

    def save(self, name: str, snapshot: Snapshot, format: str = "fp16") -> Saved:
        """Keeps a snapshot under a name, hot and warm, in place of what had the name before.

        Raises:
            InputError: an unusable name or snapshot, no room on the disk; what was there before stays.
        """
        path = self._path(name)
        if snapshot.identity != self.identity or not snapshot.offset:
            raise InputError(f"snapshot {name!r}", f"{snapshot.offset} tokens, identity {snapshot.identity[:12]}",
                             f"at least one token, identity {self.identity[:12]}", "save it where it was made")  # fmt: skip
        encoded = formats.encode_rows(snapshot, format)
        encoded.header["save_id"] = uuid.uuid4().hex
        stamp = _write_snapshot(path, encoded)
        self._heat(name, stamp, encoded)
        kept = tuple(n for n in encoded.errors if n in encoded.tensors)
        error = max((e for n, e in encoded.errors.items() if n not in kept), default=0.0)
        return Saved(path, stamp[1], snapshot.nbytes, error, kept)

    def load(self, name: str) -> Snapshot:
        """The snapshot of a name, detached, from memory or disk.

        Raises:
            InputError: nothing under the name; a file that is damaged, of another bundle, or of an unknown version.
        """
        return self._fetch(name)[0]

    def find(self, ids: Sequence[int]) -> Hit | None:
        """The snapshot that shares the longest beginning with a prompt: all of its tokens, or whole blocks of them.

        At least one token is left to run, so that there are logits to go on from: a prompt that is stored whole runs
        its last token again, in its own place. What cannot be trimmed (side states, wrapped rings) is used whole or not.
        """
        wanted, chain = np.array(ids, np.int32), self._chain(np.array(ids, np.int32))
        lengths = {name: self._usable(held, keys, wanted, chain) for name, (_, held, keys) in self._scan().items()}
        for name in sorted(lengths, key=lambda n: (-lengths[n], n)):
            if not lengths[name]:
                break
            try:
                snapshot, temperature = self._fetch(name)
            except InputError as problem:
                self.refused[name] = str(problem)
                continue
            snapshot = snapshot.trim(snapshot.offset - lengths[name])
            if snapshot.ids == tuple(ids[: lengths[name]]):  # else another process has saved the name meanwhile
                return Hit(snapshot, list(ids[lengths[name] :]), name, temperature)
        return None

    def names(self) -> list[str]:
        """Names on the disk."""
        return sorted(p.name.removesuffix(SUFFIX) for p in self.folder.glob(f"[!.]*{SUFFIX}"))

    def cool(self, name: str | None = None) -> None:
        """Drops one snapshot, or all, from memory; they stay on the disk."""
        for each in [name] if name else list(self.hot):
            self.hot.pop(each, None)

    def delete(self, name: str) -> None:
        """Drops a snapshot from memory and disk."""
        self._path(name).unlink(missing_ok=True)
        self.cool(name)

    def _fetch(self, name: str) -> tuple[Snapshot, str]:
        path = self._path(name)
        stamp = _stamp(path)
        held = self.hot.get(name)
        if held and held[0] == stamp:
            self.hot.move_to_end(name)
            return formats.decode_rows(held[1]), "hot"
        encoded = self._read(path)
        self._heat(name, stamp, encoded)
        return formats.decode_rows(encoded), "warm"

    def _heat(self, name: str, stamp: Stamp, encoded: Encoded) -> None:
        self.hot[name] = (stamp, encoded)
        self.hot.move_to_end(name)
        while sum(e.nbytes for _, e in self.hot.values()) > self.hot_bytes:
            self.hot.popitem(last=False)

    def _path(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            raise InputError("snapshot name", repr(name), "up to 100 letters, digits, '.', '_', '-', no leading '.'",
                             "choose another name")  # fmt: skip
        return self.folder / f"{name}{SUFFIX}"

    def _chain(self, ids: np.ndarray) -> list[bytes]:
        """Hash of each whole block and all before it, the bundle's identity first."""
        keys, last = [], hashlib.sha256(f"{self.identity}:{self.block}".encode()).digest()
        for start in range(0, len(ids) - self.block + 1, self.block):
            last = hashlib.sha256(last + ids[start : start + self.block].tobytes()).digest()
            keys.append(last)
        return keys

    def _scan(self) -> dict[str, tuple[Stamp, np.ndarray, list[bytes]]]:
        """Ids and hashes of every snapshot on the disk that is this bundle's; reads only the headers of new files."""
        now = {}
        for name in self.names():
            try:
                stamp = _stamp(self._path(name))
                known = self.seen.get(name)
                now[name] = known if known and known[0] == stamp else self._index(name, stamp)
                self.refused.pop(name, None)
            except InputError as problem:
                self.refused[name] = str(problem)
        self.seen = now
        return now

    def _index(self, name: str, stamp: Stamp) -> tuple[Stamp, np.ndarray, list[bytes]]:
        held = self.hot.get(name)
        encoded = held[1] if held and held[0] == stamp else self._read(self._path(name), only_ids=True)
        return stamp, encoded.tensors[IDS], self._chain(encoded.tensors[IDS])

    def _usable(self, held: np.ndarray, keys: list[bytes], wanted: np.ndarray, chain: list[bytes]) -> int:
        """How many of `held` tokens a prompt can use."""
        blocks = next((i for i, (a, b) in enumerate(zip(keys, chain)) if a != b), min(len(keys), len(chain)))
        tail = slice(blocks * self.block, len(held))
        whole = len(held) <= len(wanted) and np.array_equal(held[tail], wanted[tail])
        length = min(len(held) if whole else blocks * self.block, len(wanted) - 1)
        return length if length == len(held) or trimmable(self.manifest, len(held)) else 0

    def _read(self, path: Path, only_ids: bool = False) -> Encoded:
        """A file's contents, every claim in it checked against this bundle before anything of its size is allocated."""
        from safetensors import SafetensorError, safe_open

        if path.is_symlink() or not path.is_file():
            raise _damaged_snapshot(path, "a symlink or no file")
        most = sum(4 * math.prod(s) for s in layout(self.manifest, self.manifest.options.max_seq_len).values())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if path.stat().st_size > most + 2 * HEADER_BYTES or length > HEADER_BYTES:
            raise _damaged_snapshot(path, f"{path.stat().st_size} bytes, {length} of them a header")
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                wanted = self._claims(path, header, set(file.keys()))
                for name, (dtype, shape) in wanted.items():
                    view = file.get_slice(name)
                    if tuple(view.get_shape()) != shape or _DTYPES.get(view.get_dtype()) != dtype:
                        raise _damaged_snapshot(path, f"{name} as {view.get_dtype()} {view.get_shape()}")
                tensors = {name: file.get_tensor(name) for name in ([IDS] if only_ids else wanted)}
        except InputError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError) as problem:
            raise _damaged_snapshot(path, str(problem) or type(problem).__name__) from problem
        encoded = Encoded(tensors, header, {})
        if not only_ids and header.get("digest") != _digest(encoded):
            raise _damaged_snapshot(path, "bytes that differ from its digest")
        return encoded

    def _claims(self, path: Path, header: dict[str, str], names: set[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors a file must hold, after its header was found to be one of this bundle's."""
        if header.get("format") != "workbench-snapshot" or header.get("version") != formats.FORMAT_VERSION:
            raise _damaged_snapshot(path, f"format {header.get('format')!r}, version {header.get('version')!r}")
        if header.get("identity") != self.identity:
            raise foreign(f"snapshot {path}", str(header.get("identity")), self.identity)
        S, text = self.manifest.options.max_seq_len, header.get("offset", "")
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= S and header.get("dtype") == self.dtype):
            raise _damaged_snapshot(path, f"offset {text[:20]!r}, dtype {header.get('dtype')!r}")
        wanted = {IDS: ("int32", (int(text),))}
        for ways in formats.shapes(layout(self.manifest, int(text)), self.dtype).values():
            wanted |= next((way for way in ways.values() if way.keys() <= names), ways["fp16"])
        if names != wanted.keys():
            raise _damaged_snapshot(path, f"tensors {', '.join(sorted(names ^ wanted.keys())[:3])} missing or unknown")
        return wanted


_DTYPES = {"F16": "float16", "F32": "float32", "U8": "uint8", "I32": "int32"}


def _write_snapshot(path: Path, encoded: Encoded) -> Stamp:
    """Writes a snapshot beside its place, syncs it, renames it; leaves nothing behind when that fails."""
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
        raise InputError(f"snapshot {path}", f"{problem}", "a folder that can be written, with room for it",
                         "free some room, or choose another folder") from problem  # fmt: skip


def _digest(encoded: Encoded) -> str:
    """SHA-256 over the header (the digest apart) and every tensor: names, dtypes, shapes, bytes."""
    found = hashlib.sha256(repr(sorted((k, v) for k, v in encoded.header.items() if k != "digest")).encode())
    for name, value in sorted(encoded.tensors.items()):
        found.update(f"{name}{value.dtype.name}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).data)
    return found.hexdigest()


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        raise InputError(f"snapshot {path}", "no such file", "a snapshot that was saved", "save it first") from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _damaged_snapshot(path: Path, found: str) -> InputError:
    return InputError(f"snapshot {path}", found, f"a whole snapshot of version {formats.FORMAT_VERSION}, as `save` wrote it",
                      "delete the file and prefill again")  # fmt: skip
