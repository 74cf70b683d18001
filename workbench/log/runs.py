"""One run with all its tables, and logs as one file."""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.files import write_whole
from workbench.log.anonymous import anonymous, identifiers
from workbench.log.machine import environment
from workbench.log.places import SHIPPED, Root, new_run_id, project, whole
from workbench.log.schema import JSON_COLUMNS, SCHEMAS
from workbench.log.store import append, check_file

_EPOCH = (1980, 1, 1, 0, 0, 0)


def record(
    row: Mapping,
    root: Root = None,
    *,
    run_id: str | None = None,
    **tables: pd.DataFrame | list[dict] | None,
) -> str:
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
    run_id = run_id or new_run_id()
    for table, rows in tables.items():
        if rows is not None and len(rows):
            append(table, rows, root, run_id)
    known = environment() | {"status": "ok"} | scalars(**tables)
    append("runs", anonymous(known | row, project(root)), root, run_id)
    return run_id


def scalars(samples=None, fidelity=None, **_) -> dict:
    """The columns of `runs` that sum up a run's tables, those that are there.

    Returns:
        tokens_per_s, call_ms: medians without warm-ups; call_p90_ms: the 90th
        percentile. cold_s, warm_s: seconds of the
        first loading of all shards, with Core ML's compilation, and of the second.
        worst_cosine (the least of an isolated update), worst_update (1 less it; null
        where a value is not finite).
    """
    row = {}
    if samples is not None and len(samples):
        timed = pd.DataFrame(samples)
        timed = timed[~timed["warmup"].astype("boolean").fillna(False)]
        by_phase = timed.groupby("phase")["value"]
        medians, sums = by_phase.median(), by_phase.sum()
        row = {
            "tokens_per_s": medians.get("tokens_per_s"),
            "call_ms": medians.get("call"),
            "call_p90_ms": by_phase.quantile(0.9).get("call"),
            "warm_s": sums.get("load", pd.NA) / 1e3,
            "cold_s": sums.reindex(["compile", "cold_load"]).sum(min_count=1) / 1e3,
        }
    if fidelity is not None and len(fidelity):
        rows = pd.DataFrame(fidelity)
        updates = rows[(rows["tensor"] == "update") & (rows["mode"] == "isolated")]
        if len(updates) and updates["finite"].astype("boolean").fillna(True).all():
            worst = float(updates["cosine"].min())
            row |= {"worst_cosine": worst, "worst_update": 1 - worst}
    return row


def pack(out: Path, root: Root = None) -> int:
    """Writes the log at `root` as one zip without names of user, host, home, serial
    numbers and UUIDs; equal logs give equal bytes. Returns the number of runs."""
    root = whole(root)
    names = identifiers()
    paths = sorted(root.glob("*/[!.]*.parquet"))

    def write(file) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                member = zipfile.ZipInfo(f"{path.parent.name}/{path.name}", _EPOCH)
                archive.writestr(member, _anonymous_file(path, names))

    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, write)
    return sum(path.parent.name == "runs" for path in paths)


def _anonymous_file(path: Path, names: set[str]) -> bytes:
    """A Parquet file with every text anonymous; JSON stays valid JSON."""
    table = pq.read_table(path)

    def change(text: str | None, name: str) -> str | None:
        if text is None or name not in JSON_COLUMNS:
            return anonymous(text, names=names)
        return json.dumps(anonymous(json.loads(text), names=names), sort_keys=True)

    for i, field in enumerate(table.schema):
        if field.type == pa.string() and field.name != "run_id":
            texts = [change(text, field.name) for text in table[i].to_pylist()]
            table = table.set_column(i, field, pa.array(texts, field.type))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def unpack(path: Path, root: Root = None) -> list[str]:
    """Adds the runs of a packed log to the log at `root`, and returns the ids of those
    that it lacked; a run that it has is not changed.

    Raises:
        InputError: a file of another kind, damaged, or of another version. The log is
            not changed.
    """
    subject, needed = f"packed log {path.name}", "a file of `workbench log --pack`"
    format, contents = ds.ParquetFileFormat(), {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                table, _, file = name.partition("/")
                if table not in SCHEMAS or Path(file).name != file:
                    raise ValueError(f"a foreign file {name!r}")
                contents[name] = archive.read(name)
                fragment = format.make_fragment(pa.BufferReader(contents[name]))
                check_file(table, Path(name), fragment)
    except (
        OSError,
        ValueError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as problem:
        step = "ask for the file again; nothing was taken in"
        raise InputError(subject, str(problem), needed, step) from None
    new = []
    # runs last: a listed run is whole
    for name in sorted(contents, key=lambda name: name.startswith("runs/")):
        target = whole(root) / name
        shipped = whole(root) / SHIPPED / name
        if not (target.exists() or shipped.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, contents[name])
            new += [target.stem] * name.startswith("runs/")
    return new
