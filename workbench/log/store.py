"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is the log of the runs that came with the project; loading a log
includes them, and only publishing writes there. Every value is checked against the
table's schema before anything is written."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from workbench.errors import InputError, check_choice
from workbench.files import write_whole
from workbench.log.places import SHIPPED, Root, default_root, new_run_id
from workbench.log.schema import ALLOWED, JSON_COLUMNS, SCHEMAS, VERSION

VERSION_KEY = b"workbench.log.version"
Rows = pd.DataFrame | Mapping | Sequence[Mapping]
_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def append(
    table: str, rows: Rows, root: Root = None, run_id: str | None = None
) -> Path:
    """Writes one run's rows of one table and returns the new file, whose stem is the
    run id.

    Args:
        rows: a DataFrame, one mapping or several. Missing columns are null. So is NaN;
            a measured value that is not finite has ``fidelity.finite`` false. JSON
            columns take mappings or their text.
        root: default: `default_root()`.
        run_id: filled into every row; default: a new one.

    Raises:
        InputError: an unknown table or column, a value that does not fit its column, no
            rows, or a run that this table already has. No file is left behind.
        OSError: the file cannot be written. No file is left behind.
    """
    run_id = new_run_id() if run_id is None else run_id
    folders = _folders(table, root)
    path = folders[-1] / f"{run_id}.parquet"
    try:
        if not re.fullmatch(r"\w[\w-]*", run_id, re.ASCII):
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
    # a row's file is opened half as long without what serves large tables
    small = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    options = small if len(data) == 1 else {}
    write_whole(path, lambda file: pq.write_table(data, file, **options))


def with_all_columns(table: str, data: pa.Table) -> pa.Table:
    """The rows with every column of the table in the schema's order; absent ones are
    null."""
    schema = SCHEMAS[table]
    columns = [
        data[field.name]
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
    columns; nulls were not measured.

    Rows of the runs shipped under `root` are included. An absent log has no rows.

    Args:
        where: columns with the value or list of values to select (None selects nulls),
            or a pandas query such as ``"T == 4 and cosine < 0.97"``.

    Raises:
        InputError: an unknown table, column or value; a file that is torn, of another
            version, or with columns that the table lacks.
    """
    folders = [folder for folder in _folders(table, root) if folder.is_dir()]
    # a run in both is read once
    paths = {p.stem: p for folder in folders for p in folder.glob("[!.]*.parquet")}
    query = where if isinstance(where, str) else None
    columns = {} if query else {k: np.atleast_1d(v) for k, v in (where or {}).items()}
    # a file is named after its run
    names = sorted(paths.keys() & set(columns.pop("run_id", paths)))
    changed = tuple(folder.stat().st_mtime_ns for folder in folders)
    rows = _read(table, tuple(paths[name] for name in names), changed)
    try:
        for name, values in columns.items():
            # as Python's values: an empty array's type would not fit the column's
            kept = pa.array(values.tolist(), SCHEMAS[table].field(name).type)
            rows = rows.filter(pc.is_in(rows[name], kept))
        frame = rows.to_pandas(types_mapper=_PANDAS_TYPES.get)
        frame = frame.query(query) if query else frame
        if not isinstance(frame, pd.DataFrame):
            raise TypeError("no condition on rows")
        return frame
    except Exception as error:  # pandas raises many types for an invalid query
        found = f"{where!r} ({error})"
        needed = f"values of, or a pandas query over, {', '.join(SCHEMAS[table].names)}"
        step = "write for example: T == 4 and depth > 0"
        raise InputError("log filter", found, needed, step) from error


@lru_cache(maxsize=64)
def _read(table: str, paths: tuple[Path, ...], changed: tuple) -> pa.Table:
    """The rows of some files, which never change; `changed`: when their folders did.
    Refuses a file that is torn, of another version, or has unknown columns."""
    schema = SCHEMAS[table]
    dataset = ds.dataset(list(paths), schema=schema, format="parquet")
    for file in dataset.get_fragments():
        step = "update the workbench"
        try:
            own = file.physical_schema
            version = int((own.metadata or {}).get(VERSION_KEY, 0))
            unknown = set(own.names) - set(schema.names)
            found = f"columns {sorted(unknown)}" if unknown else None
            if version != VERSION:
                found = f"schema version {version}"
            if version < VERSION:
                step = f"run: python tools/rewrite_log.py {Path(file.path).parents[1]}"
        except (OSError, pa.ArrowInvalid) as error:
            found, step = str(error), "move it out of the log"
        if found:
            needed = f"a whole Parquet file of table {table}, version {VERSION}"
            raise InputError(f"log file {file.path}", found, needed, step)
    try:
        return dataset.to_table().combine_chunks()
    except (OSError, pa.ArrowException) as error:
        needed = f"whole Parquet files of table {table}"
        found, step = str(error).split(), "move the damaged file out of the log"
        raise InputError(f"log table {table}", " ".join(found), needed, step) from None


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with columns of Python objects, null as None."""
    return frame.astype(object).where(frame.notna(), None)


def _folders(table: str, root: Root) -> tuple[Path, Path]:
    """The folders of a table in the log at `root`: of shipped runs, and its own."""
    check_choice("log table", table, SCHEMAS, "correct the name")
    root = Path(root or default_root())
    return root / SHIPPED / table, root / table


def to_arrow(table: str, frame: pd.DataFrame) -> pa.Table:
    """The rows in all columns of the table, each of its type, so that a reader that
    takes the schema of one file finds every column. Raises errors of Python's and
    Arrow's for what does not fit."""
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
