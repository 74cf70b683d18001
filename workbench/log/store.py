"""Rows in, immutable Parquet files ``<root>/<table>/<run_id>.parquet``, DataFrames out.

``<root>/shipped`` is the log of the runs that came with the project. Loading a log
includes them; only publishing writes there. Every value is checked against the table's
schema before anything is written.

`parquet` reads and writes one file, `cache` holds the rows of the table `runs` that were
read before."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError, check_choice
from workbench.log import cache, parquet
from workbench.log.condition import rows_that_fit
from workbench.log.parquet import TableFile, list_files, with_all_columns, write_rows
from workbench.log.places import Root, default_root, new_run_id, shipped_root
from workbench.log.schema import ALLOWED, JSON_COLUMNS, SCHEMAS

Rows = pd.DataFrame | Mapping | Sequence[Mapping]
RUN_ID = re.compile(r"\w[\w-]*", re.ASCII)
_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def append(
    table: str, rows: Rows, root: Root = None, run_id: str | None = None
) -> Path:
    """Writes one run's rows of one table and returns the new file, whose stem is the
    run id. `record` writes a whole run, with the columns that describe its machine.

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


def load(
    table: str, root: Root = None, where: Mapping | str | None = None
) -> pd.DataFrame:
    """The rows of a table, sorted by run, as Int64, boolean, str, float64 and UTC time
    columns. A null was not measured.

    Rows of the runs shipped under `root` are included. An absent log has no rows. Rows
    of `runs` that are older than the column `quality` have one verdict in their file;
    here they have both (see `verdicts.split_verdict`).

    Args:
        where: columns with the value or list of values to select (None selects nulls);
            or a condition such as ``"T == 4 and cosine < 0.97"`` (see `condition`).

    Raises:
        InputError: an unknown table, column or value; a file that is torn, of another
            version, or with columns that the table lacks.
    """
    selection, condition = {}, None
    if isinstance(where, str):
        condition = where or None
    elif where:
        selection = {name: np.atleast_1d(values) for name, values in where.items()}
    if table == "runs":
        rows = _load_runs(root)
    else:
        # a file is named after its run: only the files of the selected runs are read
        rows = _load_rows(table, root, selection.pop("run_id", None))
    try:
        rows = _select(table, rows, selection)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        actual = f"{where!r} ({error})"
        needed = f"values of the columns {', '.join(SCHEMAS[table].names)}"
        step = "write for example: {'T': 4, 'compress': ['fp16', 'int8-channel']}"
        raise InputError("log filter", actual, needed, step) from error
    frame = to_frame(rows)
    return rows_that_fit(frame, condition) if condition else frame


def _load_runs(root: Root) -> pa.Table:
    """All rows of the table `runs`, from its cache, sorted by run id."""
    shipped, logged = _list_runs("runs", root)
    shipped_folder, folder = _folders("runs", root)
    parts = [cache.read_rows(shipped_folder, shipped), cache.read_rows(folder, logged)]
    rows = pa.concat_tables(parts)
    order = np.argsort(rows["run_id"].to_numpy(), kind="stable")
    return rows.take(pa.array(order))


def _load_rows(table: str, root: Root, run_ids: np.ndarray | None) -> pa.Table:
    """The rows of another table of some runs, or of all (None), sorted by run id."""
    shipped, logged = _list_runs(table, root)
    files = shipped | logged
    names = files.keys() if run_ids is None else files.keys() & set(run_ids)
    return _read(table, tuple(files[name] for name in sorted(names)))


def _list_runs(
    table: str, root: Root
) -> tuple[dict[str, TableFile], dict[str, TableFile]]:
    """The files of a table by run id: those of shipped runs, and those of the log's own
    folder. A run in both folders is listed once, in the log's folder."""
    shipped, logged = map(list_files, _folders(table, root))
    return {name: shipped[name] for name in shipped.keys() - logged.keys()}, logged


def _select(table: str, rows: pa.Table, selection: Mapping) -> pa.Table:
    """The rows that have one of the values named for each column. Raises errors of
    Python or Arrow for an unknown column or a value of another type."""
    for name, values in selection.items():
        # Python's values: the type of an empty array would not fit the column's
        accepted = pa.array(values.tolist(), SCHEMAS[table].field(name).type)
        rows = rows.filter(pc.is_in(rows[name], accepted))
    return rows


@lru_cache(maxsize=64)
def _read(table: str, files: tuple[TableFile, ...]) -> pa.Table:
    """The rows of some files, one after the other."""
    parts = [parquet.read_file(table, file)[0] for file in files]
    return pa.concat_tables([SCHEMAS[table].empty_table(), *parts]).combine_chunks()


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
