"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is a log as well: the runs that came with the project. What is loaded from a log includes them, and
only publishing writes there. Every value is checked against the table's schema before anything is written; files of
an older version are lifted while they are read and never rewritten.
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

from workbench.errors import InputError
from workbench.files import write_whole
from workbench.log import cache
from workbench.log import schema as tables
from workbench.log.schema import ALLOWED, JSON_COLUMNS, MIGRATIONS, SCHEMAS

SHIPPED = "shipped"
_VERSION_KEY = b"workbench.log.version"
_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def new_run_id() -> str:
    """UTC time and random hex, e.g. ``20260131T094512123456Z-5f3a9c01``: sorts by time, unique without coordination."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{secrets.token_hex(4)}"


def project_root(start: Path) -> Path | None:
    """The nearest folder at or above `start` that is a checkout of this project, or None."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and re.search(
            r'^name = "workbench"$', file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            return folder
    return None


def default_root() -> Path:
    """``experiments/log`` of the checkout that the working directory is in (notebooks find it so), or of the directory."""
    return (project_root(Path.cwd()) or Path.cwd()) / "experiments" / "log"


def project(root: Path | None = None) -> Path:
    """The project that a log belongs to: the one whose ``experiments/log`` it is, else the folder that holds it."""
    root = whole(root)
    folder = root.parent
    return folder.parent if (folder.name, root.name) == ("experiments", "log") else folder


def whole(root: Path | str | None = None) -> Path:
    """The log at `root`; where that is the shipped part of a log, the log that it is part of."""
    root = default_root() if root is None else Path(root).absolute()
    return root.parent if root.name == SHIPPED else root


def append(
    table: str,
    rows: pd.DataFrame | Mapping | Sequence[Mapping],
    root: Path | str | None = None,
    run_id: str | None = None,
) -> Path:
    """Write one run's rows of one table and return the new file, whose stem is the run id.

    `rows` is a DataFrame, one mapping or several. Columns left out are null; so is NaN, since a result that was
    measured and is not finite says so in ``fidelity.finite``. JSON columns take mappings or their text. `run_id` (default: a
    new one) is filled in; `root` defaults to `default_root()`.

    Raises InputError for an unknown table or column, a value that does not fit its column, no rows, or a run that this
    table already has; OSError when the disk does not take the file. Nothing is left behind in either case.
    """
    run_id = new_run_id() if run_id is None else run_id
    if not isinstance(run_id, str) or not re.fullmatch(r"\w[\w-]*", run_id, re.ASCII):
        raise InputError(
            "run id", repr(run_id), "letters, digits, '-' and '_'", "take one from new_run_id()"
        )
    own, shipped = _folders(table, root)
    path = own / f"{run_id}.parquet"
    data = _to_arrow(table, rows, run_id)
    if path.exists() or (shipped / path.name).exists():
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
    table: str, root: Path | str | None = None, where: Mapping | str | None = None
) -> pd.DataFrame:
    """The rows of a table as Int64, boolean, str, float64 and UTC time columns, missing where not measured.

    `where` maps columns to a value or a list of values to keep (None keeps what was not measured), or is a pandas query
    such as ``"T == 4 and cosine < 0.97"``. Rows of the runs shipped under `root` are included. An absent log is an
    empty one.

    Raises InputError for an unknown table, column or value, and for a file that is torn, of an unknown version, or has
    columns that the table has not.
    """
    folders = _folders(table, root)
    if not isinstance(where, Mapping | str | None):
        raise InputError(
            "log filter",
            repr(where),
            "columns and values, or a pandas query",
            "write for example {'T': 4}",
        )
    keep = _expression(table, where) if isinstance(where, Mapping) else ds.scalar(True)
    if (
        isinstance(where, Mapping) and where.get("run_id") is not None
    ):  # a file is named after its run
        own_first = (
            [folder / f"{run_id}.parquet" for folder in folders]
            for run_id in _several(where["run_id"])
        )
        rows = _read(
            [path for paths in own_first for path in list(filter(Path.is_file, paths))[:1]], table
        )
    else:
        version, read = _fingerprint(table), lambda paths: _read(paths, table)
        rows = _union(*(cache.gathered(folder, version, read) for folder in folders))
    frame = rows.filter(keep).to_pandas(types_mapper=_PANDAS_TYPES.get)
    return _query(frame, where) if isinstance(where, str) else frame


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


def adopt(contents: Mapping[str, bytes], root: Path | str | None = None) -> str:
    """Writes one run's `files` into the log at `root`, its ``runs`` row last: a run that is listed is whole.

    Files that are there already are left alone, since a run's files never change. Returns the run id.
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
    """The rows of some files in the current schema; whatever cannot be read faithfully is refused by name."""
    schema, latest = SCHEMAS[table], tables.version(table)
    versions = {path: _file_version(path, table) for path in paths}
    current = [path for path, version in versions.items() if version == latest]
    older = [
        _migrated(path, table, version) for path, version in versions.items() if version < latest
    ]
    lifted = (
        pa.concat_tables([schema.empty_table(), *older], promote_options="default")
        .select(schema.names)
        .cast(schema)
    )
    return pa.concat_tables(
        [lifted, ds.dataset(current, schema=schema, format="parquet").to_table()]
    )


def _folders(table: str, root: Path | str | None) -> tuple[Path, Path]:
    """Where the log at `root` keeps the files of a table: its own, and those of shipped runs."""
    if table not in SCHEMAS:
        raise InputError(
            "log table", repr(table), f"one of {', '.join(SCHEMAS)}", "correct the name"
        )
    root = default_root() if root is None else Path(root)
    return root / table, root / SHIPPED / table


def _to_arrow(
    table: str, rows: pd.DataFrame | Mapping | Sequence[Mapping], run_id: str
) -> pa.Table:
    """The rows with exactly the table's columns, every value checked."""
    subject, names = f"log table {table}", SCHEMAS[table].names
    frame = _frame(subject, rows)
    if frame.empty:
        raise InputError(subject, "no rows", "at least one", "append only what was measured")
    if unknown := [name for name in frame if name not in names]:
        raise InputError(
            subject,
            f"columns {unknown}",
            f"some of {names}",
            "put what has no column into runs.config",
        )
    if "run_id" in frame and set(frame["run_id"]) != {run_id}:
        raise InputError(
            subject, "rows of another run", f"run_id {run_id} in all", "append each run by itself"
        )
    frame = frame.assign(run_id=run_id)
    schema = SCHEMAS[table].with_metadata({_VERSION_KEY: str(tables.version(table)).encode()})
    return pa.Table.from_arrays([_column(subject, field, frame) for field in schema], schema=schema)


def _frame(subject: str, rows: pd.DataFrame | Mapping | Sequence[Mapping]) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        return rows
    rows = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Mapping) else [rows]
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise InputError(
            subject,
            f"{wrong[0]!r} as a row",
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
    except (
        TypeError,
        ValueError,
        OverflowError,
        pa.ArrowNotImplementedError,
    ) as error:  # Arrow's own are of the first two
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
    """The version that a file was written with; refuses whatever this code cannot read faithfully."""
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


def _migrated(path: Path, table: str, version: int) -> pa.Table:
    data = pq.ParquetFile(path).read()
    for lift in MIGRATIONS[table][version - 1 :]:
        data = lift(data)
    return data


def _expression(table: str, where: Mapping) -> ds.Expression:
    """Column → value or values, as one expression that filters files while they are read."""
    schema, keep = SCHEMAS[table], ds.scalar(True)
    for name, value in where.items():
        if name not in schema.names:
            raise InputError(
                f"filter on {table}",
                f"column {name!r}",
                f"one of {schema.names}",
                "correct the name",
            )
        kind = schema.field(name).type
        try:
            keep &= ds.field(name).isin(pa.array(_several(value), kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"filter on {table}, {name}", repr(value), f"type {kind}", "correct the value"
            ) from error
    return keep


def _several(value) -> list:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


# what pandas makes of a query that means nothing
MEANINGLESS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)


def _query(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    try:
        return frame.query(where)
    except MEANINGLESS as error:
        needed, example = (
            f"a pandas query over {', '.join(frame)}",
            "write for example: T == 4 and depth > 0",
        )
        raise InputError("log filter", f"{where!r} ({error})", needed, example) from error
