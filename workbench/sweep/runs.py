"""The columns of the table `runs` that a bundle and a decoder determine, the recording
of a run, and the selection of rows by their settings."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from workbench import log
from workbench.bundle import Bundle, Options
from workbench.decode import Decoder
from workbench.log.host_state import host_state
from workbench.log.machine import machine_name, with_machines
from workbench.log.scrub import scrubbed
from workbench.log.store import Root

OPTIONS = tuple(Options.model_fields)
"""Export options, each a column of `runs`."""

HOW = ("runtime", "precision", "compute_units", "hints")

VALUES = (*OPTIONS, *HOW)
"""Columns that decide the values a bundle of one checkpoint computes, on every machine."""

COUNTS = ("threads", "T", "depth", "n_gen", "min_tokens", "min_seconds")

TIMES = (*VALUES, "fast", *COUNTS)
"""Columns that, with checkpoint, machine and software, decide times."""

RUNTIMES = ("coreml", "portable", "stand-in", "coreai")

MEASURED = ("ok", "invalid")
"""Statuses of runs with samples; an invalid run did not run as its settings say."""


def pick(mapping: Mapping, *names: str) -> dict:
    """The items of a mapping that have these names."""
    return {name: mapping[name] for name in names}


def counted(run: Mapping) -> dict:
    """The columns `COUNTS` of a cell's run, null for those that it leaves open."""
    return {name: run.get(name) for name in COUNTS}


def exported(options: Options | Mapping) -> dict:
    """The columns of `runs` for export options, null for those that are missing."""
    columns = dict.fromkeys(OPTIONS)
    if isinstance(options, Mapping):
        columns |= options
    else:
        columns |= options.model_dump()
    for name, value in columns.items():
        if isinstance(value, list | tuple | dict):
            columns[name] = _text(value)
    return columns


def executed(
    runtime: str, precision: str, fast: bool, compute_units: str, hints: Mapping, **_
) -> dict:
    """The columns of `runs` for a decoder's arguments, null where the runtime has no
    such thing. Other arguments are ignored; the fault of a stand-in has no column."""
    name, _, _ = runtime.partition(":")
    columns = dict.fromkeys((*HOW, "fast")) | {"runtime": name}
    if name == "portable":
        fuses = bool(fast and precision == "declared")
        columns |= {"precision": precision, "fast": fuses}
    elif name != "coreai":
        columns |= {"compute_units": compute_units, "hints": _text(hints)}
    return columns


def _text(value) -> str:
    return json.dumps(value, sort_keys=True)


def describe(bundle: Bundle, decoder: Decoder | None = None) -> dict:
    """The columns of `runs` for a bundle and, if it ran, its decoder; placement stays
    null."""
    m = bundle.manifest
    row = {
        "checkpoint": m.checkpoint["name"],
        "checkpoint_hash": m.checkpoint["sha256"],
        "bundle": bundle.root.name,
        "bundle_hash": bundle.identity,
        "bundle_bytes": sum(shard.bytes for shard in m.shards) + m.embedding.file.bytes,
        "family": m.family,
    }
    row |= exported(m.options)
    if decoder:
        row |= executed(**vars(decoder))
    return row


def state_before() -> dict:
    """The columns `…_before` of `runs`: the machine's state before a measurement."""
    state = host_state()
    names = ("power_source", "thermal", "thermal_pressure", "swap_bytes")
    return {f"{name}_before": state[name] for name in names}


def record_run(
    experiment: str,
    row: dict,
    *,
    root: Root = None,
    rest: Callable[[], dict] = dict,
    **tables: pd.DataFrame | list[dict] | None,
) -> str:
    """Writes one run and its tables; the `runs` row goes last, so a run that is listed
    is whole.

    Absolute paths in the row, in its `config` too, are shortened (see
    `workbench.log.scrub`).

    Args:
        rest: returns further columns of the row; called once the tables are written.
        tables: `fidelity`, `samples`, `layers` and `exhibits` of the run; None or an
            empty one is left out.

    Returns:
        The run id.
    """
    run_id = log.new_run_id()
    for table, rows in tables.items():
        if rows is not None and len(rows):
            log.append(table, rows, root=root, run_id=run_id)
    row = log.environment() | {"experiment": experiment, "status": "ok"} | row | rest()
    log.append("runs", scrubbed(row, log.project()), root=root, run_id=run_id)
    return run_id


def listing(
    experiment: str | None = None, root: Root = None, status: Sequence[str] = ("ok",)
) -> pd.DataFrame:
    """Rows of `runs` with one of these statuses, with their `machine` and
    `software`."""
    where = {"status": list(status)}
    if experiment:
        where["experiment"] = experiment
    return with_machines(log.load("runs", root, where))


def here() -> str:
    """This machine's name."""
    return machine_name(log.environment())


def fitting(
    rows: pd.DataFrame, settings: Iterable[Mapping], columns: Sequence[str]
) -> pd.DataFrame:
    """The rows whose `columns` equal those of one of `settings`; null equals null
    alone."""
    settings = {tuple(setting[column] for column in columns) for setting in settings}
    return rows[np.array([row in settings for row in values(rows, columns)], bool)]


def values(rows: pd.DataFrame, columns: Sequence[str]) -> list[tuple]:
    """Each row's values of some columns as plain Python values, null as None."""
    plain = log.plain(rows[list(columns)])
    return list(plain.itertuples(index=False, name=None))


def varied(rows: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Those of the columns in which some rows differ."""
    counts = rows[list(columns)].nunique(dropna=False)
    return counts.index[counts > 1].tolist()


def newest(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The newest run of each setting."""
    by_time = rows.sort_values("run_id")
    return by_time.groupby(list(by), dropna=False).tail(1)


def like_newest(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows whose `column` is that of the newest one."""
    newest_rows = rows[rows["run_id"] == rows["run_id"].max()]
    return rows[rows[column].isin(newest_rows[column])]


def footer(*run_ids: str, **more) -> pd.DataFrame:
    """The table in a notebook's last cell: its log rows, and the versions that wrote
    them."""
    environment = pick(log.environment(), "platform", "commit", "versions")
    rows = {"log rows": ", ".join(run_ids)} | more | environment
    return pd.DataFrame(rows.items(), columns=["", "value"]).set_index("")
