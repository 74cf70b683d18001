"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is the log of the runs that came with the project. Loading a log
includes them; only publishing writes there. Every value is checked against the table's
schema before anything is written.

Opening thousands of files takes half a minute, so rows of the table `runs` are cached in
memory and in one file, `.rows.arrow`, which a copy of the folder carries. Deleting that
file loses nothing."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workbench.errors import InputError, check_choice
from workbench.files import write_whole
from workbench.log import definitions
from workbench.log.condition import rows_that_fit
from workbench.log.places import Root, default_root, new_run_id, shipped_root
from workbench.log.schema import ALLOWED, JSON_COLUMNS, SCHEMAS, VERSION

VERSION_KEY = b"workbench.log.version"
Rows = pd.DataFrame | Mapping | Sequence[Mapping]
_MAX_CHUNKS = 64
"""Chunks of a table in memory; with more, every selection takes longer."""
_CACHE_FILE = ".rows.arrow"
"""The file, beside those of the table `runs`, with the rows of many of them."""
_CACHED_FILES_KEY = b"workbench.log.files"
_MIN_UNSAVED = 256
"""The cache file is written again once it lacks this many files."""
RUN_ID = re.compile(r"\w[\w-]*", re.ASCII)
_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def append(
    table: str, rows: Rows, root: Root = None, run_id: str | None = None
) -> Path:
    """Writes one run's rows of one table and returns the new file, whose stem is the
    run id.

    Args:
        rows: a DataFrame, one mapping or several. Missing columns are null, and so is
            NaN: a measured value that is not finite has ``fidelity.finite`` false. JSON
            columns take mappings or their text.
        root: default: `default_root()`.
        run_id: is filled into every row; default: a new one.

    Raises:
        InputError: an unknown table or column, a value that does not fit its column, no
            rows, or a run that this table already has. No file is left behind.
        OSError: the file cannot be written. No file is left behind.
    """
    run_id = new_run_id() if run_id is None else run_id
    folders = _folders(table, root)
    path = folders[-1] / f"{run_id}.parquet"
    try:
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"run id {run_id!r}")
        if any((folder / path.name).exists() for folder in folders):
            raise ValueError(f"run {run_id} written already")
        frame = pd.DataFrame([rows] if isinstance(rows, Mapping) else rows)
        if set(frame.get("run_id", [run_id])) != {run_id}:
            raise ValueError(f"rows of another run than {run_id}")
        data = to_arrow(table, frame.assign(run_id=run_id))
    # UnicodeEncodeError, a kind of ValueError: text that UTF-8 cannot hold
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        needed = f"rows of a new run that fit workbench.log.SCHEMAS[{table!r}]"
        step = "correct the value"
        raise InputError(f"log table {table}", str(error), needed, step) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, data)
    return path


def write_rows(path: Path, data: pa.Table) -> None:
    """Writes a file of the log, whole or not at all."""
    options = {}
    if len(data) == 1:
        # opening the file takes half as long without what serves large tables
        options = {"use_dictionary": False, "write_statistics": False}
        options["compression"] = "none"
    write_whole(path, lambda file: pq.write_table(data, file, **options))


def with_all_columns(table: str, data: pa.Table) -> pa.Table:
    """The rows with every column of the table in the schema's order; absent ones are
    null."""
    schema = SCHEMAS[table]
    columns = [
        data[field.name].cast(field.type)
        if field.name in data.schema.names
        else pa.nulls(len(data), field.type)
        for field in schema
    ]
    version = {VERSION_KEY: str(VERSION)}
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(version))


def load(
    table: str, root: Root = None, where: Mapping | str | None = None
) -> pd.DataFrame:
    """The rows of a table, sorted by run, as Int64, boolean, str, float64 and UTC time
    columns. A null was not measured.

    Rows of the runs shipped under `root` are included. An absent log has no rows.

    Args:
        where: columns with the value or list of values to select (None selects nulls);
            or a condition such as ``"T == 4 and cosine < 0.97"`` (see `condition`).

    Raises:
        InputError: an unknown table, column or value; a file that is torn, of another
            version, or with columns that the table lacks.
    """
    condition = where if isinstance(where, str) else None
    columns = {}
    if where and not condition:
        columns = {name: np.atleast_1d(values) for name, values in where.items()}
    shipped_folder, folder = _folders(table, root)
    files = _files(folder)
    # a run in both folders is read once, from the log's folder
    shipped = {n: file for n, file in _files(shipped_folder).items() if n not in files}
    if table == "runs":
        parts = [_run_rows(shipped_folder, shipped), _run_rows(folder, files)]
        rows = _sorted_by_run(pa.concat_tables(parts))
    else:
        files |= shipped
        # a file is named after its run
        names = sorted(files.keys() & set(columns.pop("run_id", files)))
        rows = _read(table, tuple(files[name] for name in names))
    try:
        for name, values in columns.items():
            # Python's values: the type of an empty array would not fit the column's
            selected = pa.array(values.tolist(), SCHEMAS[table].field(name).type)
            rows = rows.filter(pc.is_in(rows[name], selected))
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        actual = f"{where!r} ({error})"
        needed = f"values of the columns {', '.join(SCHEMAS[table].names)}"
        step = "write for example: {'T': 4, 'compress': ['fp16', 'int8-channel']}"
        raise InputError("log filter", actual, needed, step) from error
    frame = to_frame(rows)
    return rows_that_fit(frame, condition) if condition else frame


@dataclass(frozen=True)
class _File:
    """A file of a table. Two are equal only if the file was not written in between."""

    path: str
    modified_ns: int
    size: int
    inode: int


@dataclass(frozen=True)
class _CachedRows:
    """The rows of files of a folder of the table `runs`."""

    files: dict[str, _File]
    digests: dict[str, str]
    """The SHA-256 of each file's bytes."""
    rows: pa.Table
    unsaved: int = 0
    """How many of the files `_CACHE_FILE` lacks, or has with another status."""


_caches: dict[Path, _CachedRows] = {}
"""What this process has read of each folder. A file never changes, so that only new
files are read."""


def _files(folder: Path) -> dict[str, _File]:
    """The files of a table's folder by run id; none of an absent folder."""
    try:
        with os.scandir(folder) as entries:
            files = [
                (entry.name.removesuffix(".parquet"), entry.path, entry.stat())
                for entry in entries
                if entry.name.endswith(".parquet") and not entry.name.startswith(".")
            ]
    except FileNotFoundError:
        return {}
    return {
        name: _File(path, status.st_mtime_ns, status.st_size, status.st_ino)
        for name, path, status in files
    }


def _run_rows(folder: Path, files: dict[str, _File]) -> pa.Table:
    """The rows of `files` of a folder of the table `runs`. Those that were read before
    are taken from memory."""
    cached = _valid_cache(folder, files)
    unread = files.keys() - cached.files.keys()
    if unread:
        contents = [_read_file("runs", files[name]) for name in unread]
        digests = {name: digest for name, (_, digest) in zip(unread, contents)}
        new = {name: files[name] for name in unread}
        cached = _with_files(cached, new, digests, [rows for rows, _ in contents])
    _caches[folder] = cached
    _save_cache_if_behind(folder)
    return cached.rows


def cache_written_rows(folder: Path, rows: pa.Table) -> None:
    """Adds the rows of `runs` files that were just written to `folder` to the cache, since
    reading thousands of files takes long."""
    files = _files(folder)
    cached = _valid_cache(folder, files)
    names = set(rows["run_id"].to_pylist()) & (files.keys() - cached.files.keys())
    rows = rows.filter(pc.is_in(rows["run_id"], pa.array(sorted(names), pa.string())))
    rows = rows.replace_schema_metadata(None)
    new = {name: files[name] for name in names}
    digests = {
        name: _digest(Path(file.path).read_bytes()) for name, file in new.items()
    }
    _caches[folder] = _with_files(cached, new, digests, [rows])
    _save_cache_if_behind(folder)


def _valid_cache(folder: Path, files: dict[str, _File]) -> _CachedRows:
    """What is known of a folder, without the rows of files that were removed or
    replaced since. A file with another time or inode and the same bytes, as in a copy of
    the folder, keeps its rows: hashing it takes a fortieth of the time of reading it."""
    cached = _caches.get(folder) or _load_cache(folder)
    changed = {name for name, file in cached.files.items() if files.get(name) != file}
    if not changed:
        return cached
    copied = {name for name in changed & files.keys() if _is_copy(name, files, cached)}
    stale = changed - copied
    rows = cached.rows
    if stale:
        is_stale = pc.is_in(rows["run_id"], pa.array(sorted(stale), pa.string()))
        rows = rows.filter(pc.invert(is_stale))
    names = cached.files.keys() - stale
    return _CachedRows(
        {name: files[name] for name in names},
        {name: cached.digests[name] for name in names},
        rows,
        cached.unsaved + len(copied),
    )


def _is_copy(name: str, files: dict[str, _File], cached: _CachedRows) -> bool:
    """Whether a file has the bytes that the cached rows were read from."""
    if files[name].size != cached.files[name].size:
        return False
    try:
        contents = Path(files[name].path).read_bytes()
    except OSError:  # the reader of its rows says why
        return False
    return _digest(contents) == cached.digests[name]


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def _with_files(
    cached: _CachedRows,
    files: dict[str, _File],
    digests: dict[str, str],
    rows: list[pa.Table],
) -> _CachedRows:
    rows = [definitions.with_both_verdicts(part) for part in rows]
    table = pa.concat_tables([cached.rows, *rows])
    if table["run_id"].num_chunks > _MAX_CHUNKS:
        table = table.combine_chunks()
    return _CachedRows(
        cached.files | files,
        cached.digests | digests,
        table,
        cached.unsaved + len(files),
    )


def _save_cache_if_behind(folder: Path) -> None:
    """Saves what was read of a folder once `_CACHE_FILE` lacks many files."""
    if _caches[folder].unsaved >= _MIN_UNSAVED:
        with suppress(OSError):  # a log that cannot be written is read all the same
            _save_cache(folder)
        cached = _caches[folder]
        _caches[folder] = replace(cached, unsaved=0)


def _load_cache(folder: Path) -> _CachedRows:
    """What a process saved of the folder (see `_save_cache`); nothing where it is
    absent, damaged or of other columns."""
    try:
        with pa.ipc.open_file((folder / _CACHE_FILE).read_bytes()) as reader:
            rows = reader.read_all()
        saved = json.loads(rows.schema.metadata[_CACHED_FILES_KEY])
        files, digests = {}, {}
        for name, modified_ns, size, inode, digest in saved:
            path = str(folder / f"{name}.parquet")
            files[name] = _File(path, modified_ns, size, inode)
            digests[name] = digest
        rows = rows.replace_schema_metadata(None)
        if rows.schema.equals(SCHEMAS["runs"]):
            return _CachedRows(files, digests, rows)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        pass
    return _CachedRows({}, {}, SCHEMAS["runs"].empty_table())


def _save_cache(folder: Path) -> None:
    """Saves the rows of a folder in one file beside theirs, since opening thousands of
    files takes half a minute. The file is no part of the log: deleting or
    replacing it changes no row that is loaded."""
    cached = _caches[folder]
    saved = [
        (name, file.modified_ns, file.size, file.inode, cached.digests[name])
        for name, file in cached.files.items()
    ]
    rows = cached.rows.replace_schema_metadata({_CACHED_FILES_KEY: json.dumps(saved)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")

    def write(file) -> None:
        with pa.ipc.new_file(file, rows.schema, options=options) as writer:
            writer.write_table(rows)

    write_whole(folder / _CACHE_FILE, write)


def _sorted_by_run(rows: pa.Table) -> pa.Table:
    """The rows sorted by run id. Rows of one run stay in their order."""
    order = np.argsort(rows["run_id"].to_numpy(), kind="stable")
    return rows.take(pa.array(order))


@lru_cache(maxsize=64)
def _read(table: str, files: tuple[_File, ...]) -> pa.Table:
    """The rows of some files, one after the other."""
    parts = [_read_file(table, file)[0] for file in files]
    return pa.concat_tables([SCHEMAS[table].empty_table(), *parts]).combine_chunks()


def _read_file(table: str, file: _File) -> tuple[pa.Table, str]:
    """The rows of one file, with all columns of the table, and the SHA-256 of its bytes.

    Raises:
        InputError: a file that is torn, of another version, with unknown columns or
            with rows of another run.
    """
    path, names = Path(file.path), SCHEMAS[table].names
    step = "move it out of the log"
    try:
        # the reader of `pq.read_table` takes twice as long for a file of one row
        contents = path.read_bytes()
        reader = pq.ParquetFile(pa.BufferReader(contents)).reader
        data = reader.read_all(use_threads=False)
        version = int((data.schema.metadata or {}).get(VERSION_KEY, 0))
        unknown = set(data.schema.names) - set(names)
        if version != VERSION:
            fault, step = f"schema version {version}", "update the workbench"
            if version < VERSION:
                step = f"run: python tools/rewrite_log.py {path.parents[1]}"
        elif unknown:
            fault, step = f"columns {sorted(unknown)}", "update the workbench"
        elif set(data["run_id"].unique().to_pylist()) != {path.stem}:
            fault = "rows of another run than the file's name says"
        else:
            if not data.schema.equals(SCHEMAS[table]):
                data = with_all_columns(table, data)
            return data.replace_schema_metadata(None), _digest(contents)
    except (OSError, KeyError, pa.ArrowException) as error:
        fault = " ".join(str(error).split())
    needed = f"a whole Parquet file of table {table}, version {VERSION}"
    raise InputError(f"log file {path}", fault, needed, step)


def to_frame(rows: pa.Table) -> pd.DataFrame:
    """The rows as Int64, boolean, str, float64 and UTC time columns."""
    return rows.to_pandas(types_mapper=_PANDAS_TYPES.get)


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with columns of Python objects, null as None."""
    return frame.astype(object).where(frame.notna(), None)


def _folders(table: str, root: Root) -> tuple[Path, Path]:
    """The folders of a table in the log at `root`: that of shipped runs first."""
    check_choice("log table", table, SCHEMAS, "correct the name")
    root = Path(root or default_root()).absolute()
    return shipped_root(root) / table, root / table


def to_arrow(table: str, frame: pd.DataFrame) -> pa.Table:
    """The rows with all columns of the table, each of its type: a reader that takes the
    schema of one file finds every column. Rows that do not fit raise errors of Python
    or Arrow."""
    schema = SCHEMAS[table]
    if frame.empty:
        raise ValueError("no rows")
    if unknown := [name for name in frame if name not in schema.names]:
        raise ValueError(f"unknown columns {unknown}")
    for name in JSON_COLUMNS & set(frame):
        frame[name] = frame[name].map(_json_text, na_action="ignore")
    # a column without a value has no type of its own
    frame = frame.dropna(axis="columns", how="all")
    if missing := {f.name for f in schema if not f.nullable} - set(frame):
        raise ValueError(f"no value in column {min(missing)}")
    fields = [field for field in schema if field.name in frame]
    data = pa.Table.from_pandas(frame, pa.schema(fields), preserve_index=False)
    for name in ALLOWED.keys() & set(frame):
        if wrong := set(data[name].drop_null().to_pylist()) - ALLOWED[name]:
            raise ValueError(f"{name} {sorted(wrong)}, none of {sorted(ALLOWED[name])}")
    return with_all_columns(table, data)


def _json_text(value: Mapping | str) -> str:
    """The text of a JSON object, which may be text already."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise TypeError(f"{value} is not a JSON object")
    return json.dumps(value, sort_keys=True, allow_nan=False)
