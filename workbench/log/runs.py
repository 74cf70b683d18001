"""One run with all its tables, and logs as one file."""

import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.files import write_whole
from workbench.log.anonymous import anonymous, identifiers
from workbench.log.machine import environment
from workbench.log.places import SHIPPED, Root, default_root, new_run_id
from workbench.log.schema import JSON_COLUMNS, SCHEMAS
from workbench.log.store import append, load, to_arrow


def record(row: Mapping, root: Root = None, **tables: pd.DataFrame | None) -> str:
    """Writes one run and its tables; the `runs` row goes last, so that a run that is
    listed is whole.

    The row is completed by `environment` and by what its tables say (see `scalars`);
    paths in it, in its `config` too, are shortened (see `anonymous`).

    Args:
        tables: `fidelity`, `samples` and `layers` of the run; None or an empty one is
            left out.

    Returns:
        The run id.
    """
    run_id = new_run_id()
    tables = {n: rows for n, rows in tables.items() if rows is not None and len(rows)}
    for table, rows in tables.items():
        append(table, rows, root, run_id)
    known = environment() | {"status": "ok"} | scalars(**tables)
    append("runs", anonymous(known | row), root, run_id)
    return run_id


def scalars(
    samples: pd.DataFrame | None = None, fidelity: pd.DataFrame | None = None, **_
) -> dict:
    """The columns of `runs` that sum up a run's tables, those that are there.

    Returns:
        tokens_per_s, call_ms: medians without warm-ups; call_p90_ms: the 90th
        percentile. worst_cosine (the least of an isolated update), worst_update (1 less
        it); null where a value is not finite.
    """
    row = {}
    if samples is not None:
        timed = samples[~samples["warmup"].astype(bool)]
        by_phase = timed.groupby("phase")["value"]
        medians, tails = by_phase.median(), by_phase.quantile(0.9)
        row = {
            "tokens_per_s": medians.get("tokens_per_s"),
            "call_ms": medians.get("call"),
            "call_p90_ms": tails.get("call"),
        }
    if fidelity is not None:
        updates = fidelity.query("tensor == 'update' and mode == 'isolated'")
        worst = updates["cosine"].astype(float).min(skipna=False)
        row |= {"worst_cosine": worst, "worst_update": 1 - worst}
    return row


def pack(out: Path, root: Root = None) -> int:
    """Writes the log at `root`, without the runs that came with the project, as one zip
    without names of user, host and home, paths and UUIDs. Returns the number of
    runs."""
    names, root = identifiers(), Path(root or default_root())
    shipped = load("runs", root / SHIPPED)["run_id"]
    out.parent.mkdir(parents=True, exist_ok=True)
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for table in reversed(SCHEMAS):
            rows = load(table, root)
            rows = rows[~rows["run_id"].isin(shipped)]
            for name in rows.select_dtypes("str"):
                read = json.loads if name in JSON_COLUMNS else str
                texts = rows[name].dropna().unique()
                clean = {text: anonymous(read(text), names) for text in texts}
                rows[name] = rows[name].map(clean)
            if len(rows):
                with archive.open(f"{table}/log.parquet", "w") as file:
                    pq.write_table(to_arrow(table, rows), file)
    write_whole(out, packed.getvalue())
    return len(rows)


def unpack(path: Path, root: Root = None) -> list[str]:
    """Adds the runs of a packed log to the log at `root`, and returns the ids of those
    that it lacked; a run that it has is not changed.

    Raises:
        InputError: a file of another kind, damaged, or of another version. The log is
            not changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if not re.fullmatch(r"\w+/log\.parquet", name):
                        raise ValueError(f"a foreign file {name!r}")
                archive.extractall(folder)
            packed = {table: load(table, folder) for table in reversed(SCHEMAS)}
            if packed["runs"].empty:
                raise ValueError("no run in it")
        except Exception as problem:  # of many types, for a damaged zip
            found = getattr(problem, "actual", str(problem))
            needed = "a file of `workbench log --pack`"
            step = "ask for the file again; nothing was taken in"
            raise InputError(f"packed log {path.name}", found, needed, step) from None
    for table, rows in packed.items():  # runs last: a listed run is whole
        new = rows[~rows["run_id"].isin(load(table, root)["run_id"])]
        for run_id, own in new.groupby("run_id"):
            append(table, own, root, run_id)
    return sorted(new["run_id"])
