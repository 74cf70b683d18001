"""`workbench residency` and `workbench bench log`: where operations run or should, and what the log costs."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import BundlePath, Json, app, show
from workbench.cli_bench import bench, show_rows


@app.command()
def residency(
    bundle: BundlePath,
    chip: Annotated[str, typer.Option(help="Chip to predict for, such as M1 or M4 Max.")] = "M4 Max",
    compute_units: Annotated[str, typer.Option(help="Units that a measured plan may use.")] = "CPU_AND_NE",
    log: Annotated[bool, typer.Option(help="Write the placement into the experiment log.")] = False, json: Json = False,
) -> None:  # fmt: skip
    """Where every compute operation runs: Core ML's plan on a Mac; elsewhere what published rules predict, with advice.

    Example: workbench residency build/llama --chip M1
    """
    from workbench.bundle import Bundle

    opened = Bundle.open(bundle)  # before anything heavy is imported
    from workbench import runs
    from workbench.eval import residency as placing
    from workbench.eval import roofline
    from workbench.runtime import coreml_available, load

    if coreml_available():
        models = [load(opened, shard, "coreml", compute_units=compute_units) for shard in opened.manifest.shards]
        found = placing.measured(models)
    else:
        found = placing.predicted(opened, generation=int(roofline.chip(chip).name[1]))
    result = {"source": found[0].source, "chip": None if coreml_available() else chip, "shards": [p.json() for p in found],
              "known": placing.known(found)}  # fmt: skip
    if log:
        result["run_id"] = runs.record("residency", runs.describe(opened) | {"command": "residency"} | placing.columns(found))
    show(result, json, [*placing.lines(found), *result["known"]])


@bench.command()
def log(
    runs: Annotated[int, typer.Option(help="Runs in the log.")] = 10_000,
    rounds: Annotated[int, typer.Option(help="Times that each side loads them.")] = 5,
    folder: Annotated[Path, typer.Option(help="Where the log is made and kept.")] = Path("build/bench"), json: Json = False,
) -> None:  # fmt: skip
    """Loading every run of a large log, against pandas reading the same files.

    Example: workbench bench log
    """
    from workbench.log.bench import rows

    show_rows(rows(folder / f"log-{runs}", runs, rounds), json)
