"""The files of the log's tables, each with the rows of one run."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.files import write_whole
from workbench.log.schema import SCHEMAS, VERSION

VERSION_KEY = b"workbench.log.version"
# next steps of a refused file
MOVE_OUT = "move it out of the log"
UPDATE = "update the workbench"


@dataclass(frozen=True)
class TableFile:
    """A file of a table and its status. Two are equal only if the file was not written in
    between."""

    path: str
    modified_ns: int
    size: int
    inode: int


def list_files(folder: Path) -> dict[str, TableFile]:
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
        name: TableFile(path, status.st_mtime_ns, status.st_size, status.st_ino)
        for name, path, status in files
    }


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


def read_file(table: str, file: TableFile) -> tuple[pa.Table, str]:
    """The rows of one file, with all columns of the table, and the SHA-256 of its bytes.

    Raises:
        InputError: a file that is torn, of another version, with unknown columns or
            with rows of another run.
    """
    path = Path(file.path)
    try:
        # the reader of `pq.read_table` takes twice as long for a file of one row
        contents = path.read_bytes()
        reader = pq.ParquetFile(pa.BufferReader(contents)).reader
        rows = reader.read_all(use_threads=False)
        _check_rows(table, path, rows)
        if not rows.schema.equals(SCHEMAS[table]):
            rows = with_all_columns(table, rows)
    except (OSError, KeyError, pa.ArrowException) as error:
        fault = " ".join(str(error).split())
        raise _refusal(table, path, fault, MOVE_OUT) from None
    return rows.replace_schema_metadata(None), digest(contents)


def _check_rows(table: str, path: Path, rows: pa.Table) -> None:
    """Refuses rows of another version, with unknown columns or of another run than the
    name of their file says.

    Raises:
        InputError: such rows.
    """
    version = int((rows.schema.metadata or {}).get(VERSION_KEY, 0))
    if version != VERSION:
        step = UPDATE
        if version < VERSION:
            step = f"run: python tools/rewrite_log.py {path.parents[1]}"
        raise _refusal(table, path, f"schema version {version}", step)
    unknown = set(rows.schema.names) - set(SCHEMAS[table].names)
    if unknown:
        raise _refusal(table, path, f"columns {sorted(unknown)}", UPDATE)
    if set(rows["run_id"].unique().to_pylist()) != {path.stem}:
        fault = "rows of another run than the file's name says"
        raise _refusal(table, path, fault, MOVE_OUT)


def _refusal(table: str, path: Path, fault: str, step: str) -> InputError:
    needed = f"a whole Parquet file of table {table}, version {VERSION}"
    return InputError(f"log file {path}", fault, needed, step)


def digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
