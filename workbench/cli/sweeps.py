"""`workbench sweep`, `log` and `compare`: many logged runs, their rows, and how two of them differ."""

from enum import StrEnum
from json import loads
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

import workbench
from workbench.cli.common import Json, LogFolder, show
from workbench.errors import InputError

Import = StrEnum("Import", {"import": "import"})


def sweep_command(
    grid: Annotated[Path, Argument(metavar="GRID.yaml")],
    log_dir: Annotated[
        Path | None, Option("--log-dir", "--log", help="Folder of the experiment log.")
    ] = None,
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
    show(result, json, [", ".join(f"{k} {v}" for k, v in result.items())])
    if result["failed"]:
        raise Exit(1)


def log_command(
    action: Annotated[
        Import | None, Argument(help="import takes in what workbench first-light wrote.")
    ] = None,
    file: Annotated[Path | None, Argument(metavar="ZIP", help="What to import.")] = None,
    where: str | None = None,
    table: str = "runs",
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Rows of the experiment log; `log import ZIP` takes another machine's first light into it.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        where: A pandas query over runs: "compress == 'fp16'".
    """
    if action:
        _import(file, log_dir, json)
        return
    rows = workbench.log.load(table, root=log_dir, where=where)
    echo(
        rows.to_json(orient="records", date_format="iso")
        if json
        else rows.dropna(axis="columns", how="all").to_string(index=False, max_colwidth=32)
    )


def _import(file: Path | None, log_dir: Path | None, json: bool) -> None:
    from workbench.firstlight.archive import import_zip

    if file is None:
        step = "write: workbench log import ZIP"
        raise InputError("log import", "no file", "what workbench first-light wrote", step)
    result = import_zip(file, log_dir)
    label = " (simulated)" if result["simulated"] else ""
    line = f"{result['imported']} new of {len(result['runs'])} runs of {result['machine']}"
    show(result, json, [f"{line}, {result['runtime']}{label}"])


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
