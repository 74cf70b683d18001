"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is the log of the runs that came with the project; loading a log
includes them, and only publishing writes there. Every value is checked against the
table's schema before anything is written. Files of an older version are migrated while
they are read and never rewritten."""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from workbench.errors import InputError, check_choice
from workbench.files import write_whole
from workbench.log import cache
from workbench.log import schema as tables
from workbench.log.schema import ALLOWED, JSON_COLUMNS, MIGRATIONS, SCHEMAS

SHIPPED = "shipped"
_VERSION_KEY = b"workbench.log.version"
Root = Path | str | None
"""A log's folder; None is `default_root()`."""
Rows = pd.DataFrame | Mapping | Sequence[Mapping]
_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def new_run_id() -> str:
    """UTC time and random hex, such as ``20260131T094512123456Z-5f3a9c01``; sorts by
    time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{secrets.token_hex(4)}"


def project_root(start: Path) -> Path | None:
    """The nearest folder at or above `start` that is a checkout of this project, or
    None."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            if 'name = "workbench"' in lines:
                return folder
    return None


def default_root() -> Path:
    """``experiments/log`` of the checkout around the working directory, else of the
    directory."""
    return (project_root(Path.cwd()) or Path.cwd()) / "experiments" / "log"


def project(root: Root = None) -> Path:
    """The project whose ``experiments/log`` a log is, else the folder that contains the
    log."""
    root = whole(root)
    folder = root.parent
    if (folder.name, root.name) == ("experiments", "log"):
        return folder.parent
    return folder


def whole(root: Root = None) -> Path:
    """The log at `root`; of the shipped part of a log, the whole log."""
    root = default_root() if root is None else Path(root).absolute()
    return root.parent if root.name == SHIPPED else root


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
        raise InputError(
            "run id",
            repr(run_id),
            "letters, digits, '-' and '_'",
            "take one from new_run_id()",
        )
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
    write_whole(path, lambda file: pq.write_table(data, file))
    return path


def load(
    table: str, root: Root = None, where: Mapping | str | None = None
) -> pd.DataFrame:
    """The rows of a table as Int64, boolean, str, float64 and UTC time columns; nulls
    were not measured.

    Rows of the runs shipped under `root` are included. An absent log has no rows.

    Args:
        where: columns with the value or list of values to select (None selects nulls),
            or a pandas query such as ``"T == 4 and cosine < 0.97"``.

    Raises:
        InputError: an unknown table, column or value; a file that is torn, of an
            unknown version, or with columns that the table lacks.
    """
    folders = _folders(table, root)
    if not isinstance(where, Mapping | str | None):
        raise InputError(
            "log filter",
            repr(where),
            "columns and values, or a pandas query",
            "write for example {'T': 4}",
        )
    query = None
    columns = where or {}
    if isinstance(where, str):
        query = where
        columns = {}
    keep = _expression(table, columns)
    if columns.get("run_id") is not None:  # a file is named after its run
        rows = _read(_files_of_runs(_several(columns["run_id"]), folders), table)
    else:
        version = f"{tables.version(table)} {SCHEMAS[table].to_string()}"
        read = partial(_read, table=table)
        rows = _union(*(cache.gathered(folder, version, read) for folder in folders))
    frame = rows.filter(keep).to_pandas(types_mapper=_PANDAS_TYPES.get)
    if query is None:
        return frame
    try:
        return frame.query(query)
    except Exception as error:  # pandas raises many types for an invalid query
        raise InputError(
            "log filter",
            f"{query!r} ({error})",
            f"a pandas query over {', '.join(frame)}",
            "write for example: T == 4 and depth > 0",
        ) from error


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with columns of Python objects, null as None."""
    return frame.astype(object).where(frame.notna(), None)


def _files_of_runs(run_ids: list[str], folders: Sequence[Path]) -> list[Path]:
    """Each run's file in the first of the folders that has one."""
    paths = []
    for run_id in run_ids:
        places = (folder / f"{run_id}.parquet" for folder in folders)
        paths += [place for place in places if place.is_file()][:1]
    return paths


def _union(own: pa.Table, shipped: pa.Table) -> pa.Table:
    """The rows of both, sorted by run id; rows of a run in both are included once."""
    if not len(shipped):
        return own
    in_both = pc.is_in(shipped["run_id"], own["run_id"].unique())
    rows = pa.concat_tables([own, shipped.filter(pc.invert(in_both))])
    return rows.take(pc.sort_indices(rows["run_id"]))


def files(root: Path | str) -> dict[str, bytes]:
    """Every file of the log at `root`: ``table/run_id.parquet`` → contents, for
    `adopt`."""
    paths = sorted(Path(root).glob("*/[!.]*.parquet"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def adopt(contents: Mapping[str, bytes], root: Root = None) -> str:
    """Writes one run's `files` into the log at `root` and returns the run id.

    The ``runs`` row is written last, so that a listed run is complete. Existing files
    are not written again, since a run's files never change."""
    for name in sorted(contents, key=lambda name: name.startswith("runs/")):
        table, _, file = name.partition("/")
        path = _folders(table, root)[0] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_whole(path, contents[name])
    return path.stem


def _read(paths: Sequence[Path], table: str) -> pa.Table:
    """The rows of some files in the current schema; refuses a file that does not fit
    it."""
    schema = SCHEMAS[table]
    current = []
    older = [schema.empty_table()]
    for path in paths:
        if lifts := MIGRATIONS[table][_file_version(path, table) - 1 :]:
            data = pq.ParquetFile(path).read()
            for lift in lifts:
                data = lift(data)
            older.append(data)
        else:
            current.append(path)
    lifted = pa.concat_tables(older, promote_options="default")
    lifted = lifted.select(schema.names).cast(schema)
    rows = ds.dataset(current, schema=schema, format="parquet").to_table()
    return pa.concat_tables([lifted, rows])


def _folders(table: str, root: Root) -> tuple[Path, Path]:
    """The folders of a table in the log at `root`: its own files, and those of shipped
    runs."""
    check_choice("log table", table, SCHEMAS, "correct the name")
    root = default_root() if root is None else Path(root)
    return root / table, root / SHIPPED / table


def _to_arrow(table: str, rows: Rows, run_id: str) -> pa.Table:
    """The rows with exactly the table's columns, every value checked."""
    subject = f"log table {table}"
    names = SCHEMAS[table].names
    frame = _frame(subject, rows)
    if frame.empty:
        raise InputError(
            subject, "no rows", "at least one", "append only what was measured"
        )
    if unknown := [name for name in frame if name not in names]:
        raise InputError(
            subject,
            f"columns {unknown}",
            f"some of {names}",
            "put what has no column into runs.config",
        )
    if "run_id" in frame and set(frame["run_id"]) != {run_id}:
        raise InputError(
            subject,
            "rows of another run",
            f"run_id {run_id} in all",
            "append each run by itself",
        )
    frame = frame.assign(run_id=run_id)
    version = str(tables.version(table)).encode()
    schema = SCHEMAS[table].with_metadata({_VERSION_KEY: version})
    columns = [_column(subject, field, frame) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _frame(subject: str, rows: Rows) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        return rows
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        rows = [rows]
    rows = list(rows)
    for row in rows:
        if not isinstance(row, Mapping):
            raise InputError(
                subject,
                f"{row!r} as a row",
                "mappings from columns to values",
                "write for example {'T': 4}",
            )
    try:
        return pd.DataFrame(rows)
    except UnicodeEncodeError as error:
        raise InputError(
            subject, str(error), "text that UTF-8 can hold", "correct the value"
        ) from error


def _column(subject: str, field: pa.Field, frame: pd.DataFrame) -> pa.Array:
    subject = f"{subject}, column {field.name}"
    values = frame.get(field.name, pd.Series([None] * len(frame)))
    try:
        if field.name in JSON_COLUMNS:
            values = values.map(_json_text, na_action="ignore")
        column = pa.array(values, field.type, from_pandas=True)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(
            subject, str(error), f"type {field.type}", "correct the value"
        ) from error
    if column.null_count and not field.nullable:
        raise InputError(
            subject, "no value", "one in every row", "say what the row is about"
        )
    allowed = ALLOWED.get(field.name)
    if allowed and (wrong := set(column.unique().drop_null().to_pylist()) - allowed):
        raise InputError(
            subject,
            ", ".join(sorted(wrong)),
            f"one of {sorted(allowed)}",
            "correct the value",
        )
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


def _file_version(path: Path, table: str) -> int:
    """The schema version of a file; refuses a torn file, an unknown version and unknown
    columns."""
    subject = f"log file {path}"
    latest = tables.version(table)
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise InputError(
            subject, str(error), "a whole Parquet file", "move it out of the log"
        ) from error
    version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version not in map(str, range(1, latest + 1)):
        raise InputError(
            subject,
            f"schema version {version}",
            f"version 1 to {latest} of table {table}",
            "read it with the release that wrote it",
        )
    unknown = set(schema.names) - set(SCHEMAS[table].names)
    if int(version) == latest and unknown:
        raise InputError(
            subject,
            f"columns {sorted(unknown)}",
            f"columns of table {table}",
            "update the workbench",
        )
    return int(version)


def _expression(table: str, where: Mapping) -> ds.Expression:
    """The filter of rows by column → value or values."""
    schema = SCHEMAS[table]
    keep = ds.scalar(True)
    for name, value in where.items():
        subject = f"filter on {table}"
        if name not in schema.names:
            raise InputError(
                subject,
                f"column {name!r}",
                f"one of {schema.names}",
                "correct the name",
            )
        kind = schema.field(name).type
        try:
            keep &= ds.field(name).isin(pa.array(_several(value), kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            needed = f"type {kind}"
            subject += f", {name}"
            raise InputError(
                subject, repr(value), needed, "correct the value"
            ) from error
    return keep


def _several(value) -> list:
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return [value]
