"""One run with all its tables."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from workbench.log import definitions, times
from workbench.log.anonymous import anonymize
from workbench.log.machine import environment
from workbench.log.places import Root, default_root, new_run_id
from workbench.log.schema import LOGITS
from workbench.log.store import append


def record(row: Mapping, root: Root = None, **tables: pd.DataFrame | None) -> str:
    """Writes one run and its tables. The row of `runs` goes last, so that a listed run
    is whole.

    `environment` and `summary_columns` fill in columns that the row lacks. Paths in the row, also
    in its `config`, are shortened (see `anonymize`). The run's id sorts after those of
    all runs of the log, even if the clock was set back since.

    Args:
        row: columns of `runs`.
        tables: `fidelity`, `samples` and `layers` of the run; None and empty ones are
            left out. A null layer of `fidelity`, that of the logits, becomes `LOGITS`.

    Returns:
        The run id.

    Raises:
        InputError, OSError: see `append`. No file of the run is left behind.
    """
    if tables.get("fidelity") is not None:
        rows = tables["fidelity"].assign(definition=definitions.DEFINITION)
        if "layer" in rows:
            rows["layer"] = rows["layer"].fillna(LOGITS)
        tables["fidelity"] = rows
    folder = Path(root or default_root()) / "runs"
    run_id = new_run_id(
        max((file.stem for file in folder.glob("*.parquet")), default="")
    )
    tables = {n: rows for n, rows in tables.items() if rows is not None and len(rows)}
    written = []
    try:
        for table, rows in tables.items():
            written.append(append(table, rows, root, run_id))
        columns = (
            environment() | {"status": "ok"} | summary_columns(**tables) | dict(row)
        )
        append("runs", anonymize(columns), root, run_id)
    except BaseException:
        if not (folder / f"{run_id}.parquet").exists():
            # the run is not listed: its rows in other tables are no run's
            for path in written:
                path.unlink(missing_ok=True)
        raise
    return run_id


def summary_columns(
    samples: pd.DataFrame | None = None, fidelity: pd.DataFrame | None = None, **_
) -> dict:
    """The columns of `runs` that sum up a run's tables, where the run has them.

    Returns:
        tokens_per_s, call_ms, call_p90_ms: from `samples` (see `times.speeds`).
        worst_cosine: from `fidelity`, the least cosine of an isolated update; null where
            a value is not finite.
        worst_update: 1 − worst_cosine.
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
