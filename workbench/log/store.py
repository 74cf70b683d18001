"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is a log as well: the runs that came with the project. What is loaded from a log
includes them, and only publishing writes there. Every value is checked against the table's schema
before anything is written; files of an older version are lifted while they are read and never
rewritten.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
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
    """UTC time and random hex, e.g. ``20260131T094512123456Z-5f3a9c01``: sorts by time, unique
    without coordination."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{secrets.token_hex(4)}"


def project_root(start: Path) -> Path | None:
    """The nearest folder at or above `start` that is a checkout of this project, or None."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and 'name = "workbench"' in file.read_text(encoding="utf-8").splitlines():
            return folder
    return None


def default_root() -> Path:
    """``experiments/log`` of the checkout that the working directory is in (notebooks find it so),
    or of the directory."""
    return (project_root(Path.cwd()) or Path.cwd()) / "experiments" / "log"


def project(root: Root = None) -> Path:
    """The project that a log belongs to: the one whose ``experiments/log`` it is, else the folder
    that holds it."""
    root = whole(root)
    folder = root.parent
    return folder.parent if (folder.name, root.name) == ("experiments", "log") else folder


def whole(root: Root = None) -> Path:
    """The log at `root`; where that is the shipped part of a log, the log that it is part of."""
    root = default_root() if root is None else Path(root).absolute()
    return root.parent if root.name == SHIPPED else root


def append(table: str, rows: Rows, root: Root = None, run_id: str | None = None) -> Path:
    """Write one run's rows of one table and return the new file, whose stem is the run id.

    `rows` is a DataFrame, one mapping or several. Columns left out are null; so is NaN, since a
    result that was measured and is not finite says so in ``fidelity.finite``. JSON columns take
    mappings or their text. `run_id` (default: a new one) is filled in; `root` defaults to
    `default_root()`.

    Raises InputError for an unknown table or column, a value that does not fit its column, no rows,
    or a run that this table already has; OSError when the disk does not take the file. Nothing is
    left behind in either case.
    """
    run_id = new_run_id() if run_id is None else run_id
    if not isinstance(run_id, str) or not re.fullmatch(r"\w[\w-]*", run_id, re.ASCII):
        needed, step = "letters, digits, '-' and '_'", "take one from new_run_id()"
        raise InputError("run id", repr(run_id), needed, step)
    path, shipped = (folder / f"{run_id}.parquet" for folder in _folders(table, root))
    data = _to_arrow(table, rows, run_id)
    if path.exists() or shipped.exists():
        actual = f"run {run_id} written already"
        raise InputError(f"log table {table}", actual, "one file per run", "use a new run id")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: pq.write_table(data, file))
    return path


def load(table: str, root: Root = None, where: Mapping | str | None = None) -> pd.DataFrame:
    """The rows of a table as Int64, boolean, str, float64 and UTC time columns, missing where not
    measured.

    `where` maps columns to a value or a list of values to keep (None keeps what was not measured),
    or is a pandas query such as ``"T == 4 and cosine < 0.97"``. Rows of the runs shipped under
    `root` are included. An absent log is an empty one.

    Raises InputError for an unknown table, column or value, and for a file that is torn, of an
    unknown version, or has columns that the table has not.
    """
    folders = _folders(table, root)
    if not isinstance(where, Mapping | str | None):
        needed, example = "columns and values, or a pandas query", "write for example {'T': 4}"
        raise InputError("log filter", repr(where), needed, example)
    query, columns = (where, {}) if isinstance(where, str) else (None, where or {})
    keep = _expression(table, columns)
    if columns.get("run_id") is not None:  # a file is named after its run
        names = (f"{run_id}.parquet" for run_id in _several(columns["run_id"]))
        own_first = ([f / name for f in folders if (f / name).is_file()] for name in names)
        rows = _read([path for paths in own_first for path in paths[:1]], table)
    else:
        version, read = _fingerprint(table), lambda paths: _read(paths, table)
        rows = _union(*(cache.gathered(folder, version, read) for folder in folders))
    frame = rows.filter(keep).to_pandas(types_mapper=_PANDAS_TYPES.get)
    if query is None:
        return frame
    try:
        return frame.query(query)
    except Exception as error:  # whatever pandas makes of a query that means nothing
        needed = f"a pandas query over {', '.join(frame)}"
        example = "write for example: T == 4 and depth > 0"
        raise InputError("log filter", f"{query!r} ({error})", needed, example) from error


def _union(own: pa.Table, shipped: pa.Table) -> pa.Table:
    """The rows of both by run id; of a run that is in both, its rows once."""
    if not len(shipped):
        return own
    shipped = shipped.filter(pc.invert(pc.is_in(shipped["run_id"], own["run_id"].unique())))
    rows = pa.concat_tables([own, shipped])
    return rows.take(pc.sort_indices(rows["run_id"]))


def files(root: Path | str) -> dict[str, bytes]:
    """Every file of the log at `root`: ``table/run_id.parquet`` → contents, what `adopt` takes."""
    paths = sorted(Path(root).glob("*/[!.]*.parquet"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def adopt(contents: Mapping[str, bytes], root: Root = None) -> str:
    """Writes one run's `files` into the log at `root`, its ``runs`` row last: a run that is listed
    is whole.

    Files that are there already are left alone, since a run's files never change. Returns the run
    id.
    """
    for name in sorted(contents, key=lambda name: name.startswith("runs/")):
        table, _, file = name.partition("/")
        path = _folders(table, root)[0] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_whole(path, contents[name])
    return path.stem


def _fingerprint(table: str) -> str:
    """The version and the columns of a table, under which its rows are gathered."""
    return f"{tables.version(table)} {SCHEMAS[table].to_string()}"


def _read(paths: Sequence[Path], table: str) -> pa.Table:
    """The rows of some files in the current schema; whatever cannot be read faithfully is refused
    by name."""
    schema, current, older = SCHEMAS[table], [], [SCHEMAS[table].empty_table()]
    for path in paths:
        if lifts := MIGRATIONS[table][_file_version(path, table) - 1 :]:
            data = pq.ParquetFile(path).read()
            for lift in lifts:
                data = lift(data)
            older.append(data)
        else:
            current.append(path)
    lifted = pa.concat_tables(older, promote_options="default").select(schema.names).cast(schema)
    rows = ds.dataset(current, schema=schema, format="parquet").to_table()
    return pa.concat_tables([lifted, rows])


def _folders(table: str, root: Root) -> tuple[Path, Path]:
    """Where the log at `root` keeps the files of a table: its own, and those of shipped runs."""
    check_choice("log table", table, SCHEMAS, "correct the name")
    root = default_root() if root is None else Path(root)
    return root / table, root / SHIPPED / table


def _to_arrow(table: str, rows: Rows, run_id: str) -> pa.Table:
    """The rows with exactly the table's columns, every value checked."""
    subject, names = f"log table {table}", SCHEMAS[table].names
    frame = _frame(subject, rows)
    if frame.empty:
        raise InputError(subject, "no rows", "at least one", "append only what was measured")
    if unknown := [name for name in frame if name not in names]:
        step = "put what has no column into runs.config"
        raise InputError(subject, f"columns {unknown}", f"some of {names}", step)
    if "run_id" in frame and set(frame["run_id"]) != {run_id}:
        needed, step = f"run_id {run_id} in all", "append each run by itself"
        raise InputError(subject, "rows of another run", needed, step)
    frame = frame.assign(run_id=run_id)
    schema = SCHEMAS[table].with_metadata({_VERSION_KEY: str(tables.version(table)).encode()})
    return pa.Table.from_arrays([_column(subject, field, frame) for field in schema], schema=schema)


def _frame(subject: str, rows: Rows) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        return rows
    rows = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Mapping) else [rows]
    for row in rows:
        if not isinstance(row, Mapping):
            needed, example = "mappings from columns to values", "write for example {'T': 4}"
            raise InputError(subject, f"{row!r} as a row", needed, example)
    try:
        return pd.DataFrame(rows)
    except UnicodeEncodeError as error:
        needed = "text that UTF-8 can hold"
        raise InputError(subject, str(error), needed, "correct the value") from error


def _column(subject: str, field: pa.Field, frame: pd.DataFrame) -> pa.Array:
    subject = f"{subject}, column {field.name}"
    values = frame.get(field.name, pd.Series([None] * len(frame)))
    try:
        if field.name in JSON_COLUMNS:
            values = values.map(_json_text, na_action="ignore")
        column = pa.array(values, field.type, from_pandas=True)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(subject, str(error), f"type {field.type}", "correct the value") from error
    if column.null_count and not field.nullable:
        raise InputError(subject, "no value", "one in every row", "say what the row is about")
    allowed = ALLOWED.get(field.name)
    if allowed and (wrong := set(column.unique().drop_null().to_pylist()) - allowed):
        raise InputError(
            subject, ", ".join(sorted(wrong)), f"one of {sorted(allowed)}", "correct the value"
        )
    return column


def _json_text(value: Mapping | str) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, allow_nan=False)
    if not isinstance(json.loads(text, parse_constant=_no_constant), dict):
        raise TypeError(f"{text} is not a JSON object")
    return text


def _no_constant(name: str):
    """Python reads NaN and Infinity, JSON has neither."""
    raise ValueError(f"{name} is not JSON")


def _file_version(path: Path, table: str) -> int:
    """The version that a file was written with; refuses whatever this code cannot read
    faithfully."""
    subject, latest = f"log file {path}", tables.version(table)
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise InputError(
            subject, str(error), "a whole Parquet file", "move it out of the log"
        ) from error
    version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version not in map(str, range(1, latest + 1)):
        needed = f"version 1 to {latest} of table {table}"
        raise InputError(
            subject, f"schema version {version}", needed, "read it with the release that wrote it"
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
    """Column → value or values, as one expression that filters files while they are read."""
    schema, keep = SCHEMAS[table], ds.scalar(True)
    for name, value in where.items():
        subject = f"filter on {table}"
        if name not in schema.names:
            needed = f"one of {schema.names}"
            raise InputError(subject, f"column {name!r}", needed, "correct the name")
        kind = schema.field(name).type
        try:
            keep &= ds.field(name).isin(pa.array(_several(value), kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            needed = f"type {kind}"
            subject += f", {name}"
            raise InputError(subject, repr(value), needed, "correct the value") from error
    return keep


def _several(value) -> list:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]
