"""One run with all its tables."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from workbench.log import definitions, times
from workbench.log.anonymous import anonymous
from workbench.log.machine import environment
from workbench.log.places import Root, default_root, new_run_id
from workbench.log.store import append


def record(row: Mapping, root: Root = None, **tables: pd.DataFrame | None) -> str:
    """Writes one run and its tables; the `runs` row goes last, so that a run that is
    listed is whole.

    The row is completed by `environment` and by what its tables say (see `scalars`);
    paths in it, in its `config` too, are shortened (see `anonymous`). Its id sorts after
    those of all runs of the log, also where the clock was set back since.

    Args:
        tables: `fidelity`, `samples` and `layers` of the run; None or an empty one is
            left out.

    Returns:
        The run id.
    """
    if tables.get("fidelity") is not None:
        rows = tables["fidelity"]
        tables["fidelity"] = rows.assign(definition=definitions.DEFINITION)
    folder = Path(root or default_root()) / "runs"
    run_id = new_run_id(
        max((file.stem for file in folder.glob("*.parquet")), default="")
    )
    tables = {n: rows for n, rows in tables.items() if rows is not None and len(rows)}
    written = []
    try:
        for table, rows in tables.items():
            written.append(append(table, rows, root, run_id))
        columns = environment() | {"status": "ok"} | scalars(**tables) | dict(row)
        append("runs", anonymous(columns), root, run_id)
    except BaseException:
        if not (folder / f"{run_id}.parquet").exists():
            for path in written:  # rows of a run that is not listed
                path.unlink(missing_ok=True)
        raise
    return run_id


def scalars(
    samples: pd.DataFrame | None = None, fidelity: pd.DataFrame | None = None, **_
) -> dict:
    """The columns of `runs` that sum up a run's tables, those that are there.

    Returns:
        tokens_per_s, call_ms, call_p90_ms: see `times.speeds`. worst_cosine (the least
        of an isolated update), worst_update (1 less it); null where a value is not
        finite.
    """
    row = {}
    if samples is not None:
        of_run = times.speeds(samples.assign(run_id=""))
        row = of_run.loc[""].to_dict() if len(of_run) else {}
    if fidelity is not None:
        updates = fidelity.query("tensor == 'update' and mode == 'isolated'")
        worst = updates["cosine"].astype(float).min(skipna=False)
        row |= {"worst_cosine": worst, "worst_update": 1 - worst}
    return row
