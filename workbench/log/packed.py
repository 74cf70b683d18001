"""Logs as one file. A packed log may come from a stranger: all of it is checked before
anything is written, and its size before anything is read into memory."""

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.files import check_regular, read_at_most, write_whole
from workbench.log.anonymous import anonymize, identifiers
from workbench.log.cache import add_written_rows
from workbench.log.parquet import VERSION_KEY, with_all_columns, write_rows
from workbench.log.places import Root, default_root, shipped_root
from workbench.log.schema import JSON_COLUMNS, SCHEMAS, VERSION
from workbench.log.store import RUN_ID, load, to_arrow, to_frame

MOST_BYTES = 1 << 30
"""Bytes in memory of all rows of a packed log; a million samples take about 100 MiB."""
MOST_FILE_BYTES = 1 << 28
"""Bytes of one table's file in a packed log."""
CODEC = "SNAPPY"
"""The compression of a packed table. What it decompresses is at most about 20 times as
large as its input."""
TABLES = tuple(reversed(SCHEMAS))
"""The tables in the order in which they are written: `runs` last, so that a listed run
is whole."""


def pack(out: Path, root: Root = None) -> int:
    """Writes the log at `root` as one zip, without the runs that came with the project,
    and without paths, UUIDs and the names of user, host and home folder. Returns the
    number of runs.

    Raises:
        InputError: more rows than `unpack` takes in.
    """
    root = Path(root or default_root())
    tables = _anonymous_tables(root)
    decoded_bytes = sum(data.nbytes for data in tables.values())
    if decoded_bytes > MOST_BYTES:
        actual = f"{decoded_bytes:,} bytes of rows"
        needed = f"at most {MOST_BYTES:,} in one packed log"
        step = "move some runs to another folder, and pack it with --log"
        raise InputError(f"log {root}", actual, needed, step)
    out.parent.mkdir(parents=True, exist_ok=True)
    contents = BytesIO()
    with zipfile.ZipFile(contents, "w", zipfile.ZIP_DEFLATED) as archive:
        for table, data in tables.items():
            with archive.open(_member(table), "w") as file:
                pq.write_table(data, file, compression=CODEC)
    write_whole(out, contents.getvalue())
    return len(tables.get("runs", ()))


def _anonymous_tables(root: Path) -> dict[str, pa.Table]:
    """The rows of the log at `root` that did not come with the project, in the order of
    `TABLES`, without what identifies a machine or its user; without empty tables."""
    hidden_words = identifiers()
    shipped = load("runs", shipped_root(root))["run_id"]
    tables = {}
    for table in TABLES:
        rows = _anonymous_rows(load(table, root), shipped, hidden_words)
        if len(rows):
            tables[table] = to_arrow(table, rows)
    return tables


def _anonymous_rows(
    rows: pd.DataFrame, shipped: pd.Series, hidden_words: set[str]
) -> pd.DataFrame:
    """The rows without those of shipped runs, and with nothing that names a user."""
    rows = rows[~rows["run_id"].isin(shipped)]
    for column in rows.select_dtypes("str"):
        parse = json.loads if column in JSON_COLUMNS else str
        texts = rows[column].dropna().unique()
        clean = {text: anonymize(parse(text), hidden_words) for text in texts}
        rows[column] = rows[column].map(clean)
    return rows


def unpack(path: Path, root: Root = None) -> list[str]:
    """Adds the runs that the log at `root` lacks from a packed log, and returns their
    ids. A run that the log has is not changed: the packed log's rows of it are left
    out, in all tables.

    Raises:
        InputError: the file is of another kind or version, damaged or too large, or has
            rows that the log would refuse; or the log cannot be written. The log is not
            changed.
    """
    root = Path(root or default_root()).absolute()
    try:
        tables = _read(path)
    # damaged files raise errors of many types; a bomb may raise MemoryError
    except Exception as problem:
        fault = getattr(problem, "actual", None) or str(problem)
        fault = " ".join(fault.split()) or type(problem).__name__
        if isinstance(problem, zipfile.BadZipFile):
            fault = f"no readable zip ({fault})"
        needed = "a file of `workbench log pack`"
        step = "pack the log again, or get the file again; no run was added here"
        raise InputError(f"packed log {path.name}", fault, needed, step) from None
    runs_there = load("runs", root, {"run_id": tables["runs"]["run_id"].to_pylist()})
    new_run_ids = set(tables["runs"]["run_id"].to_pylist()) - set(runs_there["run_id"])
    try:
        _add(tables, new_run_ids, root)
    except OSError as problem:
        fault = problem.strerror or str(problem)
        step = f"correct that and repeat the command; no run of {path.name} was added"
        needed = "a folder that can be written, with room"
        raise InputError(f"log {root}", fault, needed, step) from None
    return sorted(new_run_ids)


def _member(table: str) -> str:
    """The name of a table's file in a packed log."""
    return f"{table}/log.parquet"


def _check_size(table: str, size: int, most: int) -> None:
    if size > most:
        raise ValueError(
            f"{table}: {size:,} bytes in memory, of {most:,} that are left"
        )


def _read(path: Path) -> dict[str, pa.Table]:
    """The tables of a packed log, in the order of `TABLES`, with every row checked.
    Raises errors of many types."""
    check_regular(path, MOST_BYTES)
    tables, decoded_bytes = {}, 0
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        _check_members(names)
        for table in TABLES:
            name = _member(table)
            if name in names:
                with archive.open(name) as file:
                    contents = read_at_most(file, MOST_FILE_BYTES, name)
                tables[table] = _decode_table(
                    table, contents, MOST_BYTES - decoded_bytes
                )
                decoded_bytes += tables[table].nbytes
            else:
                tables[table] = SCHEMAS[table].empty_table()
    _check_run_ids(tables)
    return tables


def _check_members(names: list[str]) -> None:
    """Refuses an archive with files other than one of each table."""
    members = {_member(table) for table in TABLES}
    if foreign := [name for name in names if name not in members]:
        raise ValueError(f"a foreign file {foreign[0]!r}")
    if len(set(names)) < len(names):
        raise ValueError("a table occurs twice")


def _check_run_ids(tables: dict[str, pa.Table]) -> None:
    """Refuses a log without runs, with a run twice or of an unfit id, and rows of a run
    that it does not contain."""
    run_ids = tables["runs"]["run_id"].to_pylist()
    if not run_ids:
        raise ValueError("no run in it")
    if len(set(run_ids)) < len(run_ids):
        raise ValueError("a run id occurs twice")
    if wrong := [run_id for run_id in run_ids if not RUN_ID.fullmatch(run_id)]:
        raise ValueError(f"run id {wrong[0]!r}")
    for table, rows in tables.items():
        if foreign := set(rows["run_id"].unique().to_pylist()) - set(run_ids):
            run_id = min(foreign)
            raise ValueError(
                f"{table} has rows of {run_id!r}, a run that the file does not contain"
            )


def _decode_table(table: str, contents: bytes, most_bytes: int) -> pa.Table:
    """The rows of a table's file, checked as `append` checks rows.

    A small file may hold any number of equal values. What its rows will take in memory
    is therefore counted in three steps, each before the work that it allows: from the
    metadata, before the pages are read; with the texts, which are read as indices into a
    dictionary, before they are copied for every row; and by the caller, of the result.

    Args:
        most_bytes: the bytes in memory that are left for this table.
    """
    metadata = pq.read_metadata(pa.BufferReader(contents))
    fields = metadata.schema.to_arrow_schema()
    _check_schema(table, fields)
    _check_compression(table, metadata)
    fixed_bytes = _fixed_bytes(metadata, len(SCHEMAS[table]))
    _check_size(table, max(_page_bytes(metadata), fixed_bytes), most_bytes)
    texts = [field.name for field in fields if field.type == pa.string()]
    rows = pq.ParquetFile(pa.BufferReader(contents), read_dictionary=texts).read()
    text_bytes = sum(
        _text_bytes(chunk) for name in texts for chunk in rows[name].chunks
    )
    _check_size(table, fixed_bytes + text_bytes, most_bytes)
    return to_arrow(table, to_frame(with_all_columns(table, rows)))


def _check_schema(table: str, fields: pa.Schema) -> None:
    """Refuses another version, an unknown column and another type of a column."""
    schema = SCHEMAS[table]
    version = int((fields.metadata or {}).get(VERSION_KEY, 0))
    if version != VERSION:
        raise ValueError(f"{table}: schema version {version} in place of {VERSION}")
    for field in fields:
        is_known = field.name in schema.names
        if not is_known or field.type != schema.field(field.name).type:
            raise ValueError(f"{table}: a column {field.name!r} of type {field.type}")


def _check_compression(table: str, metadata: pq.FileMetaData) -> None:
    for chunk in _column_chunks(metadata):
        if chunk.compression not in (CODEC, "UNCOMPRESSED"):
            raise ValueError(f"{table}: compressed with {chunk.compression}")


def _page_bytes(metadata: pq.FileMetaData) -> int:
    """The bytes that all pages of a file decompress to, as its metadata say."""
    return sum(chunk.total_uncompressed_size for chunk in _column_chunks(metadata))


def _fixed_bytes(metadata: pq.FileMetaData, columns: int) -> int:
    """The bytes in memory of a file's rows without the characters of texts: 8 for each
    value of each of the table's columns."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return 8 * columns * sum(group.num_rows for group in groups)


def _column_chunks(metadata: pq.FileMetaData) -> Iterator[pq.ColumnChunkMetaData]:
    """Yields the metadata of every column of every row group."""
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            yield metadata.row_group(group).column(column)


def _text_bytes(texts: pa.DictionaryArray) -> int:
    """The bytes of the characters of texts once each row has a copy."""
    lengths = pc.binary_length(texts.dictionary)
    return pc.sum(lengths.cast(pa.int64()).take(texts.indices)).as_py() or 0


def _add(tables: dict[str, pa.Table], run_ids: set[str], root: Path) -> None:
    """Writes the rows of some runs to the log, all of them or none.

    All files are written to a folder of the log and moved to their places at the end,
    those of table `runs` last. If this process is killed meanwhile, the listed runs are
    whole, and the same call adds the others."""
    root.mkdir(parents=True, exist_ok=True)
    folder, added = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=root)), []
    try:
        for table, rows in tables.items():
            (folder / table).mkdir()
            groups = pd.Series(np.arange(len(rows))).groupby(rows["run_id"].to_numpy())
            for run_id, row_numbers in groups.indices.items():
                if run_id in run_ids:
                    of_run = rows.take(pa.array(row_numbers))
                    write_rows(folder / table / f"{run_id}.parquet", of_run)
        for table in tables:
            (root / table).mkdir(exist_ok=True)
            for file in sorted((folder / table).iterdir()):
                added.append(root / table / file.name)
                os.replace(file, added[-1])
        is_new = pc.is_in(
            tables["runs"]["run_id"], pa.array(sorted(run_ids), pa.string())
        )
        add_written_rows(root / "runs", tables["runs"].filter(is_new))
    except BaseException:
        for file in added:
            file.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
