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
from workbench.log.parquet import TableFile
from workbench.log.schema import SCHEMAS
from workbench.log.verdicts import with_both_verdicts

FILE_NAME = ".rows.arrow"
FILES_KEY = b"workbench.log.files"
"""The key of the cache file's metadata under which it lists the Parquet files of its
rows."""
MIN_UNSAVED = 256
"""The cache file is written again once it lacks this many files."""
MAX_CHUNKS = 64
"""Chunks of a table in memory; with more, every selection takes longer."""


@dataclass(frozen=True)
class CachedFile:
    """A Parquet file whose rows are cached."""

    file: TableFile
    digest: str
    """The SHA-256 of its bytes."""

    def has_bytes_of(self, file: TableFile) -> bool:
        """Whether the rows were read from the bytes that `file` has."""
        if file.size != self.file.size:
            return False
        try:
            contents = Path(file.path).read_bytes()
        except OSError:  # the reader of its rows says why
            return False
        return parquet.digest(contents) == self.digest


@dataclass(frozen=True)
class CachedRows:
    """The rows of Parquet files of a folder of the table `runs`."""

    files: dict[str, CachedFile]
    """Run id → file."""
    rows: pa.Table
    unsaved: int = 0
    """The number of `files` whose entry in the cache file is absent or outdated. Removed
    files are not counted: a process that loads the cache file drops their rows without
    reading a Parquet file."""

    def with_new(
        self, files: dict[str, CachedFile], rows: list[pa.Table]
    ) -> "CachedRows":
        """These rows and those of further files."""
        table = pa.concat_tables([self.rows, *rows])
        if table["run_id"].num_chunks > MAX_CHUNKS:
            table = table.combine_chunks()
        return CachedRows(self.files | files, table, self.unsaved + len(files))

    def without_changed(self, files: dict[str, TableFile]) -> "CachedRows":
        """These rows without those of files that were removed or replaced since.

        A file that has another time or inode but the same bytes, as in a copy of the
        folder, keeps its rows: to hash it takes a fortieth of the time of reading it.

        Args:
            files: the files of the folder now.
        """
        if all(files.get(name) == cached.file for name, cached in self.files.items()):
            return self
        valid: dict[str, CachedFile] = {}
        copied = (
            0  # files with the same bytes and a new status, which the cache file lacks
        )
        for name, cached in self.files.items():
            file = files.get(name)
            if file == cached.file:
                valid[name] = cached
            elif file is not None and cached.has_bytes_of(file):
                valid[name] = CachedFile(file, cached.digest)
                copied += 1
        rows = self.rows
        if stale := self.files.keys() - valid.keys():
            is_stale = pc.is_in(rows["run_id"], pa.array(sorted(stale), pa.string()))
            rows = rows.filter(pc.invert(is_stale))
        return CachedRows(valid, rows, self.unsaved + copied)


_caches: dict[Path, CachedRows] = {}
"""Folder → the rows that this process has read of it. Log files never change, so that only
new ones are read."""


def read_rows(folder: Path, files: dict[str, TableFile]) -> pa.Table:
    """The rows of `files`, which are those of a folder of the table `runs`. Rows that
    were read before are taken from the cache. Older rows have both verdicts (see
    `verdicts.with_both_verdicts`), in the cache as well.

    Raises:
        InputError: see `parquet.read_file`.
    """
    cached = _valid_cache(folder, files)
    unread = files.keys() - cached.files.keys()
    if unread:
        new: dict[str, CachedFile] = {}
        parts = []
        for name in unread:
            rows, digest = parquet.read_file("runs", files[name])
            new[name] = CachedFile(files[name], digest)
            # older rows have one verdict, which is split once, before they are cached
            parts.append(with_both_verdicts(rows))
        cached = cached.with_new(new, parts)
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
    new = {
        name: CachedFile(
            files[name], parquet.digest(Path(files[name].path).read_bytes())
        )
        for name in names
    }
    _caches[folder] = cached.with_new(new, [rows])
    _save_if_behind(folder)


def _valid_cache(folder: Path, files: dict[str, TableFile]) -> CachedRows:
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
        files = {}
        for name, modified_ns, size, inode, digest in saved:
            path = str(folder / f"{name}.parquet")
            files[name] = CachedFile(TableFile(path, modified_ns, size, inode), digest)
        rows = rows.replace_schema_metadata(None)
        if rows.schema.equals(SCHEMAS["runs"]):
            return CachedRows(files, rows)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        pass
    return CachedRows({}, SCHEMAS["runs"].empty_table())


def _save_if_behind(folder: Path) -> None:
    """Saves what was read of a folder once its cache file lacks many files."""
    cached = _caches[folder]
    if cached.unsaved >= MIN_UNSAVED:
        with suppress(OSError):  # a log that cannot be written is read all the same
            _save(folder, cached)
        _caches[folder] = replace(cached, unsaved=0)


def _save(folder: Path, cached: CachedRows) -> None:
    """Writes the rows into the cache file, and the list of the files that they come from
    into the metadata of their schema."""
    saved = []
    for name, entry in cached.files.items():
        file = entry.file
        saved.append((name, file.modified_ns, file.size, file.inode, entry.digest))
    rows = cached.rows.replace_schema_metadata({FILES_KEY: json.dumps(saved)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")

    def write(file) -> None:
        with pa.ipc.new_file(file, rows.schema, options=options) as writer:
            writer.write_table(rows)

    write_whole(folder / FILE_NAME, write)
