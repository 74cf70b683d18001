"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is the log of the runs that came with the project; loading a log
includes them, and only publishing writes there. Every value is checked against the
table's schema before anything is written."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pyarrow as pa
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
    if not isinstance(run_id, str) or not re.fullmatch(r"\w[\w-]*", run_id, re.ASCII):
        needed = "letters, digits, '-' and '_'"
        raise InputError("run id", repr(run_id), needed, "leave it out for a new one")
    path, shipped = (folder / f"{run_id}.parquet" for folder in _folders(table, root))
    data = _to_arrow(table, rows, run_id)
    if path.exists() or shipped.exists():
        raise InputError(
            f"log table {table}",
            f"run {run_id} written already",
            "one file per run",
            "use a new run id",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # a row's file is opened half as long without what serves large tables
    small = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    how = small if len(data) == 1 else {}
    write_whole(path, lambda file: pq.write_table(data, file, **how))
    return path


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
    own, shipped = _folders(table, root)
    columns = where if isinstance(where, Mapping) else {}
    if columns.get("run_id") is not None:  # a file is named after its run
        names = {f"{run_id}.parquet" for run_id in _several(columns["run_id"])}
        names = sorted(names)
        paths = [f / name for name in names for f in (own, shipped)]
        paths = [path for path in paths if path.is_file()]
    else:
        paths = [*own.glob("[!.]*.parquet"), *shipped.glob("[!.]*.parquet")]
    # a run in both is read once
    paths = {path.name: path for path in reversed(paths)}
    changed = tuple(f.stat().st_mtime_ns for f in (own, shipped) if f.is_dir())
    rows = _read(table, tuple(paths[name] for name in sorted(paths)), changed)
    rows = rows.filter(_expression(table, columns))
    frame = rows.to_pandas(types_mapper=_PANDAS_TYPES.get)
    if where is None or isinstance(where, Mapping):
        return frame
    try:
        return frame.query(where)
    except Exception as error:  # pandas raises many types for an invalid query
        raise InputError(
            "log filter",
            f"{where!r} ({error})",
            f"a pandas query over {', '.join(frame)}",
            "write for example: T == 4 and depth > 0",
        ) from error


@lru_cache(maxsize=64)
def _read(table: str, paths: tuple[Path, ...], changed: tuple) -> pa.Table:
    """The rows of some files, which never change; `changed`: when their folders did."""
    schema = SCHEMAS[table]
    dataset = ds.dataset(list(paths), schema=schema, format="parquet")
    for fragment in dataset.get_fragments():
        check_file(table, Path(fragment.path), fragment)
    return dataset.to_table().combine_chunks()


def check_file(table: str, path: Path, file: ds.Fragment) -> None:
    """Refuses a file that is torn, of another version, or has unknown columns."""
    subject = f"log file {path}"
    try:
        schema = file.physical_schema
    except (OSError, pa.ArrowInvalid) as error:
        needed, step = "a whole Parquet file", "move it out of the log"
        raise InputError(subject, str(error), needed, step) from error
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != str(VERSION):
        step = f"run: python tools/rewrite_log.py {path.parents[1]}"
        if version.isdigit() and int(version) > VERSION:
            step = "update the workbench"
        actual, needed = f"schema version {version}", f"version {VERSION}"
        raise InputError(subject, actual, needed, step)
    if unknown := set(schema.names) - set(SCHEMAS[table].names):
        actual, needed = f"columns {sorted(unknown)}", f"columns of table {table}"
        raise InputError(subject, actual, needed, "update the workbench")


def find(run: str, runs: pd.DataFrame) -> pd.Series:
    """The row of `runs` whose id is `run`, or the only one whose id ends in it.

    Raises:
        InputError: there is none, or several.
    """
    rows = runs[runs["run_id"] == run]
    if rows.empty and run:
        rows = runs[runs["run_id"].str.endswith(run)]
    if len(rows) != 1:
        actual = f"{len(rows) or 'none'} with this end" if run else "no name"
        step = "list them with `workbench log`"
        raise InputError(f"run {run}", actual, "a run in the log", step)
    return rows.iloc[0]


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with columns of Python objects, null as None."""
    return frame.astype(object).where(frame.notna(), None)


def _folders(table: str, root: Root) -> tuple[Path, Path]:
    """The folders of a table in the log at `root`: its own files, and those of shipped
    runs."""
    check_choice("log table", table, SCHEMAS, "correct the name")
    root = default_root() if root is None else Path(root)
    return root / table, root / SHIPPED / table


def _to_arrow(table: str, rows: Rows, run_id: str) -> pa.Table:
    """The rows with those of the table's columns that have a value, each checked."""
    subject = f"log table {table}"
    schema = SCHEMAS[table].with_metadata({VERSION_KEY: str(VERSION).encode()})
    if isinstance(rows, Mapping):
        rows = [rows]
    try:
        frame = pd.DataFrame(rows)
    except UnicodeEncodeError as error:
        needed = "text that UTF-8 can hold"
        raise InputError(subject, str(error), needed, "correct the value") from error
    if frame.empty:
        step = "append only what was measured"
        raise InputError(subject, "no rows", "at least one", step)
    if unknown := [name for name in frame if name not in schema.names]:
        step = "put what has no column into runs.config"
        raise InputError(subject, f"columns {unknown}", f"some of {schema.names}", step)
    if set(frame.get("run_id", [run_id])) != {run_id}:
        needed, step = f"run_id {run_id} in all", "append each run by itself"
        raise InputError(subject, "rows of another run", needed, step)
    frame, absent = frame.assign(run_id=run_id), pd.Series([None] * len(frame))
    columns = [_column(subject, f, frame.get(f.name, absent)) for f in schema]
    whole = pa.Table.from_arrays(columns, schema=schema)
    return whole.select([n for n in schema.names if whole[n].null_count < len(whole)])


def _column(subject: str, field: pa.Field, values: pd.Series) -> pa.Array:
    subject = f"{subject}, column {field.name}"
    step = "correct the value"
    try:
        if field.name in JSON_COLUMNS:
            values = values.map(_json_text, na_action="ignore")
        column = pa.array(values, field.type, from_pandas=True)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(subject, str(error), f"type {field.type}", step) from error
    if column.null_count and not field.nullable:
        raise InputError(subject, "no value", "one in every row", step)
    allowed = ALLOWED.get(field.name)
    if allowed and (wrong := set(column.unique().drop_null().to_pylist()) - allowed):
        actual, needed = ", ".join(sorted(wrong)), f"one of {sorted(allowed)}"
        raise InputError(subject, actual, needed, step)
    return column


def _json_text(value: Mapping | str) -> str:
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    if not isinstance(json.loads(text, parse_constant=_no_constant), dict):
        raise TypeError(f"{text} is not a JSON object")
    return text


def _no_constant(name: str):
    """Refuses NaN and Infinity, which Python parses and JSON lacks."""
    raise ValueError(f"{name} is not JSON")


def _expression(table: str, where: Mapping) -> ds.Expression:
    """The filter of rows by column → value or values."""
    schema = SCHEMAS[table]
    keep = ds.scalar(True)
    for name, value in where.items():
        subject = f"filter on {table}"
        check_choice(f"{subject}, column", name, schema.names, "correct the name")
        kind = schema.field(name).type
        try:
            keep &= ds.field(name).isin(pa.array(_several(value), kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            actual, needed = f"{name}: {value!r}", f"type {kind}"
            raise InputError(subject, actual, needed, "correct the value") from error
    return keep


def _several(value) -> list:
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return [value]
