"""The rows of the table `runs` that were read before, in memory and in one file.

Opening thousands of Parquet files takes half a minute. The cache file `.rows.arrow`, beside
them, has their rows; a copy of the folder carries it. It is no part of the log: deleting
or replacing it changes no row that is loaded."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from workbench.files import write_whole
from workbench.log import parquet
from workbench.log.definitions import with_both_verdicts
from workbench.log.parquet import File
from workbench.log.schema import SCHEMAS

FILE_NAME = ".rows.arrow"
FILES_KEY = b"workbench.log.files"
"""The key of the cache file's metadata under which it lists the Parquet files of its
rows."""
MIN_UNSAVED = 256
"""The cache file is written again once it lacks this many files."""
MAX_CHUNKS = 64
"""Chunks of a table in memory; with more, every selection takes longer."""


@dataclass(frozen=True)
class CachedRows:
    """The rows of Parquet files of a folder of the table `runs`."""

    files: dict[str, File]
    """Run id → file."""
    digests: dict[str, str]
    """The SHA-256 of each file's bytes."""
    rows: pa.Table
    unsaved: int = 0
    """The number of files that the cache file lacks, or has with another status."""

    def with_new(
        self, files: dict[str, File], digests: dict[str, str], rows: list[pa.Table]
    ) -> "CachedRows":
        """These rows and those of further files."""
        table = pa.concat_tables([self.rows, *rows])
        if table["run_id"].num_chunks > MAX_CHUNKS:
            table = table.combine_chunks()
        return CachedRows(
            self.files | files, self.digests | digests, table, self.unsaved + len(files)
        )

    def without_changed(self, files: dict[str, File]) -> "CachedRows":
        """These rows without those of files that were removed or replaced since. A file
        with another time or inode and the same bytes, as in a copy of the folder, keeps
        its rows: hashing it takes a fortieth of the time of reading it.

        Args:
            files: the files of the folder now.
        """
        changed = {name for name, file in self.files.items() if files.get(name) != file}
        if not changed:
            return self
        copied = {
            name
            for name in changed & files.keys()
            if self.has_bytes_of(name, files[name])
        }
        stale = changed - copied
        rows = self.rows
        if stale:
            is_stale = pc.is_in(rows["run_id"], pa.array(sorted(stale), pa.string()))
            rows = rows.filter(pc.invert(is_stale))
        names = self.files.keys() - stale
        return CachedRows(
            {name: files[name] for name in names},
            {name: self.digests[name] for name in names},
            rows,
            self.unsaved + len(copied),
        )

    def has_bytes_of(self, name: str, file: File) -> bool:
        """Whether the rows of run `name` were read from the bytes that `file` has."""
        if file.size != self.files[name].size:
            return False
        try:
            contents = Path(file.path).read_bytes()
        except OSError:  # the reader of its rows says why
            return False
        return parquet.digest(contents) == self.digests[name]


_caches: dict[Path, CachedRows] = {}
"""Folder → the rows that this process has read of it. A file never changes, so that only new
files are read."""


def read_rows(folder: Path, files: dict[str, File]) -> pa.Table:
    """The rows of `files`, which are those of a folder of the table `runs`. Rows that
    were read before are taken from the cache. Older rows have both verdicts (see
    `definitions.with_both_verdicts`), in the cache as well.

    Raises:
        InputError: see `parquet.read_file`.
    """
    cached = _valid_cache(folder, files)
    unread = files.keys() - cached.files.keys()
    if unread:
        new, digests, parts = {}, {}, []
        for name in unread:
            rows, digests[name] = parquet.read_file("runs", files[name])
            new[name] = files[name]
            # older rows have one verdict, which is split once, before they are cached
            parts.append(with_both_verdicts(rows))
        cached = cached.with_new(new, digests, parts)
    _caches[folder] = cached
    _save_if_behind(folder)
    return cached.rows


def add_written_rows(folder: Path, rows: pa.Table) -> None:
    """Adds the rows of Parquet files that were just written to `folder`, a folder of the
    table `runs`, which saves reading them."""
    files = parquet.list_files(folder)
    cached = _valid_cache(folder, files)
    names = set(rows["run_id"].to_pylist()) & (files.keys() - cached.files.keys())
    rows = rows.filter(pc.is_in(rows["run_id"], pa.array(sorted(names), pa.string())))
    rows = with_both_verdicts(rows.replace_schema_metadata(None))
    new = {name: files[name] for name in names}
    digests = {
        name: parquet.digest(Path(file.path).read_bytes()) for name, file in new.items()
    }
    _caches[folder] = cached.with_new(new, digests, [rows])
    _save_if_behind(folder)


def _valid_cache(folder: Path, files: dict[str, File]) -> CachedRows:
    """The cached rows of a folder that are still those of its files."""
    cached = _caches.get(folder) or _load(folder)
    return cached.without_changed(files)


def _load(folder: Path) -> CachedRows:
    """The rows that a process saved in the folder's cache file; none where the file is
    absent, damaged or of other columns, as after a change of the schema."""
    try:
        with pa.ipc.open_file((folder / FILE_NAME).read_bytes()) as reader:
            rows = reader.read_all()
        saved = json.loads(rows.schema.metadata[FILES_KEY])
        files, digests = {}, {}
        for name, modified_ns, size, inode, digest in saved:
            path = str(folder / f"{name}.parquet")
            files[name] = File(path, modified_ns, size, inode)
            digests[name] = digest
        rows = rows.replace_schema_metadata(None)
        if rows.schema.equals(SCHEMAS["runs"]):
            return CachedRows(files, digests, rows)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        pass
    return CachedRows({}, {}, SCHEMAS["runs"].empty_table())


def _save_if_behind(folder: Path) -> None:
    """Saves what was read of a folder once its cache file lacks many files."""
    cached = _caches[folder]
    if cached.unsaved >= MIN_UNSAVED:
        with suppress(OSError):  # a log that cannot be written is read all the same
            _save(folder, cached)
        _caches[folder] = replace(cached, unsaved=0)


def _save(folder: Path, cached: CachedRows) -> None:
    saved = [
        (name, file.modified_ns, file.size, file.inode, cached.digests[name])
        for name, file in cached.files.items()
    ]
    rows = cached.rows.replace_schema_metadata({FILES_KEY: json.dumps(saved)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")

    def write(file) -> None:
        with pa.ipc.new_file(file, rows.schema, options=options) as writer:
            writer.write_table(rows)

    write_whole(folder / FILE_NAME, write)
