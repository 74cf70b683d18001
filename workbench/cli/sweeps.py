"""`workbench sweep`, `log` and `compare`: many logged runs, their rows, and how two of them differ."""

from json import loads
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, echo

import workbench
from workbench.cli.common import Json, LogFolder, show

PANEL = "Experiments and their log"


def sweep_command(
    grid: Annotated[Path, Argument(metavar="GRID.yaml")],
    log_dir: LogFolder = None,
    scheduler: str | None = None,
    json: Json = False,
) -> None:
    """The cross product of a grid's options, one logged run per cell and round, each in a fresh process; resumes.

    Bundles are kept in data/bundles of the project that the log belongs to, or beside a log of its own.

    Example: workbench sweep grid.yaml

    Args:
        scheduler: Measure on a Dask cluster's ANE workers: tcp://host:8786.
    """
    sweep = workbench.sweep
    result = sweep.sweep(
        sweep.load_grid(grid), root=log_dir, scheduler=scheduler, progress=not json
    )
    counts = ", ".join(f"{k} {v}" for k, v in result.items() if k != "reasons")
    show(result, json, [counts, *(f"failed: {reason}" for reason in result["reasons"])])
    if result["failed"]:
        raise Exit(1)


def log_command(
    where: str | None = None, table: str = "runs", log_dir: LogFolder = None, json: Json = False
) -> None:
    """Rows of the experiment log.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        where: A pandas query over runs: "compress == 'fp16'".
    """
    rows = workbench.log.load(table, root=log_dir, where=where)
    echo(
        rows.to_json(orient="records", date_format="iso")
        if json
        else rows.dropna(axis="columns", how="all").to_string(index=False, max_colwidth=32)
    )


def compare_command(run_a: str, run_b: str, log_dir: LogFolder = None, json: Json = False) -> None:
    """Two runs and all that repeat them: what differs in their settings, and ratios of medians with intervals.

    Example: workbench compare 20260131T094512Z-5f3a9c01 20260131T094633Z-1c02ad7e
    """
    comparison = workbench.log.compare(run_a, run_b, log_dir)
    settings, measures = comparison.settings, comparison.measures
    omitted = comparison.indistinguishable
    result = {
        "settings": settings.to_dict("records"),
        "measures": loads(measures.to_json(orient="records")),
        "hidden": omitted,
    }
    text = measures.dropna(axis="columns", how="all").to_string(index=False, float_format="%.4g")
    show(
        result,
        json,
        [
            settings.to_string(index=False),
            "",
            text,
            f"{omitted} measurements without a difference left out",
        ],
    )
