"""Bundles on disk: written whole or not at all, opened only when every byte is what the manifest says."""

import fcntl
import hashlib
import json
import os
import shutil
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
from pydantic import ValidationError

from workbench import paths
from workbench.bundle.manifest import FileEntry, Manifest, Shard
from workbench.errors import InputError

MANIFEST, IDENTITY = paths.BUNDLE, "identity.json"
MAX_MANIFEST_BYTES = 64 << 20
FINDER = ".DS_Store"  # macOS leaves it in every folder that its Finder shows


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entries(root: Path, *paths: Path) -> list[FileEntry]:
    """Entries of the files at `paths` (folders: everything below), relative to `root`, in a stable order."""
    files = sorted(f for p in paths for f in ([p] if p.is_file() else p.rglob("*")) if f.is_file())
    return [FileEntry(path=f.relative_to(root).as_posix(), bytes=f.stat().st_size, sha256=sha256(f)) for f in files]


class Bundle:
    """An opened bundle: its manifest, its folder, its embedding table.

    Opening checks the size of every file always, and its SHA-256 once per (size, mtime).
    """

    def __init__(self, root: Path, manifest: Manifest):
        self.root, self.manifest = root, manifest
        self._embedding = None

    @classmethod
    def open(cls, path: str | Path) -> "Bundle":
        """Opens and verifies the bundle at `path`.

        Raises:
            InputError: no bundle there, an unknown version, a file missing, truncated, changed,
                outside it, or in a shard's package without being listed.
        """
        root = paths.bundle(path).resolve()  # `.` has no name to call the files beside it after
        if (root / MANIFEST).is_symlink():
            raise _damaged(root / MANIFEST, "a symlink")
        try:
            bundle = cls(root, read_manifest(root / MANIFEST))
            bundle.verify()
        except OSError as problem:
            found = f"{problem.strerror or problem} ({problem.filename})"
            step = "mend that, or copy the bundle again"
            raise InputError(f"bundle {path}", found, "files that can be read", step) from problem
        return bundle

    @property
    def files(self) -> list[FileEntry]:
        m = self.manifest
        return [f for s in m.shards for f in s.files] + [m.embedding.file, *m.tokens.files]

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(f.bytes for f in self.files)

    @property
    def identity(self) -> str:
        """SHA-256 over the manifest and, through it, every file's hash.

        Equal for bundles that compute the same: versions of packages, the name of the checkpoint's
        folder and how each shard was made are left out.
        """
        aside = {"packages": True, "checkpoint": {"name"}, "shards": {"__all__": {"how"}}}
        parts = self.manifest.model_dump(mode="json", exclude=aside)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def shards(self, kind: str) -> list[Shard]:
        return [s for s in self.manifest.shards if s.kind == kind]

    def package(self, shard: Shard) -> Path:
        return self.root / shard.path

    def verify(self) -> None:
        """Checks every file against the manifest; hashes those whose size or mtime changed since the last check."""
        seen = _read_seen(self.root)
        now = {}
        for entry in self.files:
            path = self.root / entry.path
            self._check_plain(path, entry)
            mark = self.mark(entry)
            if seen.get(entry.path) != mark and sha256(path) != entry.sha256:
                raise _damaged(path, "bytes that differ from the manifest's SHA-256")
            now[entry.path] = mark
        self._check_unlisted()
        self._check_embedding()
        if now != seen:
            _write_seen(self.root, now)

    def _check_unlisted(self) -> None:
        """Refuses a file in a package or beside the tokenizer's that the manifest does not list."""
        listed = {PurePosixPath(entry.path) for entry in self.files}
        folders = {PurePosixPath(shard.path) for shard in self.manifest.shards}
        tokenizer = {PurePosixPath(entry.path).parent for entry in self.manifest.tokens.files}
        folders |= tokenizer - {PurePosixPath(".")}
        for folder in sorted(folders):
            for around, below, names in os.walk(self.root / folder, onerror=_raise):
                for path in (Path(around, name) for name in sorted([*below, *names])):
                    if path.is_symlink():
                        raise _damaged(path, "a symlink")
                    unlisted = PurePosixPath(path.relative_to(self.root)) not in listed
                    if unlisted and path.name != FINDER and not path.is_dir():
                        raise InputError(str(path), f"a file that {MANIFEST} does not list",
                                         "the files that the export wrote and no others",
                                         "remove it, or export again")

    def _check_embedding(self) -> None:
        """Refuses an embedding whose header does not fit the model; reads the header alone."""
        from safetensors import SafetensorError, safe_open

        path, dims = self.root / self.manifest.embedding.file.path, self.manifest.dims
        try:
            with safe_open(path, "numpy") as table:
                slices = {name: table.get_slice(name) for name in table.keys()}
                parts = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
        except (SafetensorError, ValueError):
            raise _damaged(path, "no safetensors file") from None
        if "weight" not in parts:
            raise _damaged(path, "no weight")
        if ("bias" in parts) != ("scale" in parts):
            raise _damaged(path, "bias without scale" if "bias" in parts else "scale without bias")
        for name, (dtype, shape) in parts.items():
            expected = [dims.V, dims.C] if name == "weight" else [dims.C]
            if dtype not in ("F16", "F32") or shape != expected:
                raise _damaged(path, f"{name} {dtype} {shape} for V = {dims.V}, C = {dims.C}")

    def mark(self, entry: FileEntry) -> str:
        """What a file was when it was hashed; with another size or mtime it must be hashed again."""
        return f"{entry.bytes}:{(self.root / entry.path).stat().st_mtime_ns}:{entry.sha256}"

    def _check_plain(self, path: Path, entry: FileEntry) -> None:
        below = [path, *path.parents][: len(Path(entry.path).parts)]
        if any(p.is_symlink() for p in below):
            raise _damaged(path, "a symlink")
        if not path.is_file():
            raise _damaged(path, "no file")
        if path.stat().st_size != entry.bytes:
            with path.open("rb") as file:
                pointer = file.read(24).startswith(b"version https://git-lfs")
            raise _damaged(path, "a Git LFS pointer" if pointer else f"{path.stat().st_size} of {entry.bytes} bytes")

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [B, T] → hidden [B, T, C] float32, as the first shard wants it."""
        if self._embedding is None:
            from safetensors import safe_open

            self._embedding = safe_open(self.root / self.manifest.embedding.file.path, "numpy")
        table = self._embedding
        rows = table.get_slice("weight")  # read row by row: the table stays in its file
        hidden = np.concatenate([rows[i : i + 1] for i in np.ravel(ids).tolist()]).reshape(*np.shape(ids), -1).astype(np.float32)
        if "bias" in table.keys():  # a file, not a dict
            hidden = (hidden + table.get_tensor("bias")) * table.get_tensor("scale")
        return hidden * np.float32(self.manifest.embedding.scale)


def read_manifest(path: Path) -> Manifest:
    """Parses a manifest; unknown versions and unknown keys are refused by name."""
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise InputError(str(path), f"{path.stat().st_size} bytes", "a manifest under 64 MiB", "export again")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its contents"
        raise InputError(str(path), f"{where}: {first['msg'].removeprefix('Value error, ')}",
                         f"a bundle of version {Manifest.model_fields['version'].default}",
                         "export again with this workbench") from None


def _raise(problem: OSError) -> None:
    raise problem


def _damaged(path: Path, found: str) -> InputError:
    return InputError(str(path), found, "the file the export wrote", "export again, or copy the bundle again")


def _seen_file(root: Path) -> Path:
    """Where checks are remembered: beside the bundle, so that the bundle itself may be read-only."""
    return root.parent / f".{root.name}.checked"


def _read_seen(root: Path) -> dict[str, str]:
    try:
        seen = json.loads(_seen_file(root).read_text())
    except (OSError, ValueError):
        return {}
    return seen if isinstance(seen, dict) else {}


def _write_seen(root: Path, seen: dict[str, str]) -> None:
    temporary = _seen_file(root).with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(seen))
        os.replace(temporary, _seen_file(root))
    except OSError:  # a read-only folder only costs hashing again next time
        with suppress(OSError):
            temporary.unlink()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class Writer:
    """Builds a bundle in a sibling folder and renames it into place when it is whole.

    A finished shard leaves `<name>.json` (its manifest entry) behind, so that an interrupted export resumes at the
    first missing shard; entries made from another checkpoint, other options or other versions are thrown away. The
    folder is locked while a process writes to it: the lock goes with the process, however that ends.

    Args:
        target: where the bundle shall be.
        identity: what decides the bundle's bytes, or will once it is known. Work goes on without it; until then nothing
            that is finished can be resumed.

    Raises:
        InputError: something is at `target`, or another process is exporting to it.
    """

    def __init__(self, target: Path, identity: Future[dict]):
        self.target, self.root = target, paths.partial(target)
        self.identity, self.signed = identity, False
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise InputError(f"bundle {target}", "another export writing to it", "one export to one target",
                             "wait for that one, or choose another target") from None  # fmt: skip
        try:
            paths.new(target)
            self._resume()
        except BaseException:
            self.close()
            raise
        self.resumes = self.signed

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Of an export that was refused nothing is left, unless an earlier one had begun the work."""
        if kind and issubclass(kind, InputError) and not self.resumes:
            shutil.rmtree(self.root, ignore_errors=True)
        self.close()

    def _resume(self) -> None:
        """Keeps what an export of the same identity left behind; throws away anything else."""
        kept, left = self.root / IDENTITY, list(self.root.iterdir())
        if left and kept.is_file() and kept.read_text() == self._identity():
            self.signed = True
            return
        for path in left:
            _remove(path)

    def _identity(self) -> str:
        return json.dumps(self.identity.result(), sort_keys=True)

    def close(self) -> None:
        """Lets go of the folder, and removes it when nothing was kept in it."""
        try:
            self.root.rmdir()
        except OSError:  # there is something to resume, or it is the bundle by now
            pass
        os.close(self.lock)

    def finished(self, name: str) -> Shard | None:
        """The entry of a shard that an earlier, interrupted export finished, if its files still hash right."""
        try:
            shard = Shard.model_validate_json((self.root / f"{name}.json").read_bytes())
            whole = all(sha256(self.root / f.path) == f.sha256 for f in shard.files)
        except (OSError, ValueError):
            return None
        return shard if whole else None

    def record(self, shard: Shard) -> Shard:
        """Notes a shard as finished; its files are as hashed in its entry."""
        if not self.signed and self.identity.done():
            (self.root / IDENTITY).write_text(self._identity())
            self.signed = True
        temporary = self.root / f"{shard.name}.json.tmp"
        temporary.write_text(shard.model_dump_json())
        os.replace(temporary, self.root / f"{shard.name}.json")
        return shard

    def discard(self, name: str) -> None:
        """Forgets that a shard was finished."""
        (self.root / f"{name}.json").unlink()

    def finish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest, drops notes and whatever an interrupted run left, renames the folder into place."""
        bundle = Bundle(self.target, manifest)
        parts = {Path(entry.path).parts[0] for entry in bundle.files}
        for path in self.root.iterdir():
            if path.name not in parts:
                _remove(path)
        with (self.root / MANIFEST).open("w") as file:
            file.write(manifest.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.rename(self.root, self.target)
        _write_seen(self.target, {entry.path: bundle.mark(entry) for entry in bundle.files})  # hashed as they were made
        return Bundle.open(self.target)
