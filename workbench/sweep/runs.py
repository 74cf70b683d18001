"""Rows of the table `runs` that bundles and decoders determine, how a run is recorded, and which
rows belong together."""

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
"""Export options, all of them columns of `runs`."""

HOW = ("runtime", "precision", "compute_units", "hints")

VALUES = (*OPTIONS, *HOW)
"""What decides the values that a bundle of one checkpoint computes: machines do not."""

COUNTS = ("threads", "T", "depth", "n_gen", "min_tokens", "min_seconds")

TIMES = (*VALUES, "fast", *COUNTS)
"""What, with checkpoint, machine and software, decides how long it takes."""

RUNTIMES = ("coreml", "portable", "stand-in", "coreai")

MEASURED = ("ok", "invalid")
"""How runs end that measured something; what an invalid one measured is not what its settings
say."""


def pick(mapping: Mapping, *names: str) -> dict:
    """The items of a mapping that have these names."""
    return {name: mapping[name] for name in names}


def counted(run: Mapping) -> dict:
    """Columns of `runs` that say how much a cell's run measures, null for what it leaves open."""
    return {name: run.get(name) for name in COUNTS}


def exported(options: Options | Mapping) -> dict:
    """Columns of `runs` that export options are, null for those that are left out."""
    chosen = options if isinstance(options, Mapping) else options.model_dump()
    return dict.fromkeys(OPTIONS) | {
        name: _text(value) if isinstance(value, list | tuple | dict) else value
        for name, value in chosen.items()
    }


def executed(
    runtime: str, precision: str, fast: bool, compute_units: str, hints: Mapping, **_
) -> dict:
    """Columns of `runs` that a decoder's arguments are, null where the runtime has no such thing;
    others are ignored. The fault of a stand-in is no column."""
    name, _, _ = runtime.partition(":")
    portable, coreml = name == "portable", name not in ("portable", "coreai")
    return {
        "runtime": name,
        "precision": precision if portable else None,
        "fast": bool(fast and precision == "declared") if portable else None,
        "compute_units": compute_units if coreml else None,
        "hints": _text(hints) if coreml else None,
    }


def _text(value) -> str:
    return json.dumps(value, sort_keys=True)


def describe(bundle: Bundle, decoder: Decoder | None = None) -> dict:
    """Columns of `runs` that a bundle and the way it was run determine. Placement stays null: it is
    measured elsewhere."""
    m = bundle.manifest
    row = {
        "checkpoint": m.checkpoint["name"],
        "checkpoint_hash": m.checkpoint["sha256"],
        "bundle": bundle.root.name,
        "bundle_hash": bundle.identity,
        "bundle_bytes": sum(shard.bytes for shard in m.shards) + m.embedding.file.bytes,
        "family": m.family,
    }
    return row | exported(m.options) | (executed(**vars(decoder)) if decoder else {})


def state_before() -> dict:
    """Columns of `runs` that say in which state the machine is before a measurement."""
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
    """Writes one run and its tables; the `runs` row goes last, so a run that is listed is whole.

    Absolute paths in the row, in its `config` too, are shortened (see `workbench.log.scrub`).

    Args:
        rest: gives more columns of the row, once the tables are written.
        tables: `fidelity`, `samples`, `layers` and `exhibits` of the run; None or an empty one is
            left out.

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
    """Rows of `runs` that ended in one of these ways, well by default, with their `machine` and
    `software`."""
    where = {"status": list(status)} | ({"experiment": experiment} if experiment else {})
    return with_machines(log.load("runs", root=root, where=where))


def here() -> str:
    """This machine's name."""
    return machine_name(log.environment())


def fitting(
    rows: pd.DataFrame, settings: Iterable[Mapping], columns: Sequence[str]
) -> pd.DataFrame:
    """The rows whose `columns` are those of one of `settings`; null fits null alone."""
    settings = {tuple(setting[column] for column in columns) for setting in settings}
    return rows[np.array([row in settings for row in values(rows, columns)], bool)]


def values(rows: pd.DataFrame, columns: Sequence[str]) -> list[tuple]:
    """Each row's values of some columns as plain Python values, null as None."""
    plain = rows[list(columns)].astype(object)
    return list(plain.where(plain.notna(), None).itertuples(index=False, name=None))


def newest(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The newest run of each setting."""
    by_time = rows.sort_values("run_id")
    return by_time.groupby(list(by), dropna=False).tail(1)


def like_newest(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows whose `column` is that of the newest one."""
    return rows[rows[column].isin(rows.loc[rows["run_id"] == rows["run_id"].max(), column])]


def footer(*run_ids: str, **more) -> pd.DataFrame:
    """The last cell of a notebook: its log rows, and the versions of the software that wrote
    them."""
    environment = pick(log.environment(), "platform", "commit", "versions")
    rows = {"log rows": ", ".join(run_ids)} | more | environment
    return pd.DataFrame(rows.items(), columns=["", "value"]).set_index("")
