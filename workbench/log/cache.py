"""A table's rows gathered in one file beside the files of the runs, for fast loading.

The file is derived and disposable: it is used only while every file that its rows came
from exists unchanged. A log without it, or with one that cannot be read or written,
loads the same rows more slowly."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather

from workbench.files import write_whole

NAME, KEY = ".gathered", b"workbench.log.gathered"
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
    cached, rows = _load(folder / NAME, version)
    if not cached.items() <= files.items():
        cached, rows = {}, None
    new = [folder / name for name in files if name not in cached]
    tables = [read(new), *([] if rows is None else [rows])]
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
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    parquet = (e for e in entries if e.name.endswith(".parquet") and e.name[0] != ".")
    return {e.name: [e.stat().st_size, e.stat().st_mtime_ns] for e in parquet}


def _load(path: Path, version: str) -> tuple[dict, pa.Table | None]:
    try:
        table = feather.read_table(path)
        about = json.loads(table.schema.metadata[KEY])
        if about["version"] == version:
            return about["files"], table.replace_schema_metadata(None)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # no file, a torn one, or another format
        pass
    return {}, None


def _save(path: Path, version: str, files: dict, rows: pa.Table) -> None:
    rows = rows.replace_schema_metadata(
        {KEY: json.dumps({"version": version, "files": files})}
    )
    try:
        write_whole(
            path, lambda file: feather.write_feather(rows, file, compression="zstd")
        )
    except OSError:  # a read-only or full disk only costs time
        pass
