"""A table's rows gathered in one file beside the files of the runs, for fast loading.

The file is derived and disposable: it is used only while every file that its rows came
from exists unchanged. A log without it, or with one that cannot be read or written,
loads the same rows more slowly."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather

from workbench.files import write_whole

NAME = ".gathered"
KEY = b"workbench.log.gathered"
WORTH = 64  # rows are gathered when at least so many files were read one by one


def gathered(
    folder: Path, version: str, read: Callable[[list[Path]], pa.Table]
) -> pa.Table:
    """All rows of the table in `folder`, by file name.

    Args:
        version: name of the rows' schema; rows gathered under another name are read
            again.
        read: reads the rows of some files and refuses a file that cannot be read.
    """
    files = _files(folder)
    cached, tables = _load(folder / NAME, version)
    if not cached.items() <= files.items():
        cached = {}
        tables = []
    new = [folder / name for name in files if name not in cached]
    tables = [read(new), *tables]
    together = pa.concat_tables(tables).combine_chunks()  # a chunk per file is slow
    if cached and new:
        together = together.take(pc.sort_indices(together["run_id"]))
    if len(new) >= WORTH:
        _save(folder / NAME, version, files, together)
    return together


def _files(folder: Path) -> dict[str, list[int]]:
    """Name → [bytes, time of change in ns] of every file of the table, by name."""
    if not folder.is_dir():
        return {}
    files = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(".parquet") and entry.name[0] != ".":
            files[entry.name] = [entry.stat().st_size, entry.stat().st_mtime_ns]
    return files


def _load(path: Path, version: str) -> tuple[dict, list[pa.Table]]:
    """The files that were gathered and their rows, one table; none of another
    version."""
    try:
        table = feather.read_table(path)
        about = json.loads(table.schema.metadata[KEY])
        if about["version"] == version:
            return about["files"], [table.replace_schema_metadata(None)]
    # no file, a torn one, or another format
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}, []


def _save(path: Path, version: str, files: dict, rows: pa.Table) -> None:
    about = json.dumps({"version": version, "files": files})
    rows = rows.replace_schema_metadata({KEY: about})
    with suppress(OSError):  # a read-only or full disk only costs time
        write_whole(path, partial(feather.write_feather, rows, compression="zstd"))
