"""`workbench memory`, `residency` and `bench log`: what fits, where operations run or should, what the log costs."""

from pathlib import Path
from typing import Annotated

import typer

from workbench import paths
from workbench.cli.app import BundlePath, Json, Memory, app, show
from workbench.cli.bench import bench, show_rows


@app.command()
def memory(
    source: Annotated[Path, typer.Argument(metavar="BUNDLE_OR_CHECKPOINT")], max_seq_len: int = 512, t_max: int = 4,
    batch: int = 1, compress: str = "fp16", machine: Memory = None, json: Json = False,
) -> None:  # fmt: skip
    """Weights + caches + embedding + buffers against a machine's memory, and the decode speed that each chip should reach.

    Example: workbench memory data/tiny-llama --max-seq-len 4096 --compress int8-tensor --memory 16G
    """
    from workbench.bundle import Bundle

    paths.bundle_or_checkpoint(source)
    opened = Bundle.open(source) if (source / paths.BUNDLE).exists() else None
    from workbench.ane import memory as budgets
    from workbench.ane import roofline
    from workbench.export import options
    from workbench.models.checkpoint import Checkpoint

    size = budgets.machine_bytes() if machine is None else budgets.parse_bytes(machine)
    if opened:
        budget = budgets.budget_of_bundle(opened, size)
        works = roofline.bundle_work(opened)
    else:
        chosen = options(max_seq_len=max_seq_len, t_max=t_max, batch=batch, compress=compress)
        budget = budgets.budget_of_checkpoint(Checkpoint(source), chosen, size)
        works = budgets.decode_work(Checkpoint(source), chosen)
    sizes, speeds = budget.json(), roofline.by_chip(works)
    misfit = float(roofline.misfits()["misfit"].abs().median())
    lines = [f"{name:14}{value / 2**20:12.2f} MiB" for name, value in sizes.items() if name != "fits"]
    lines += ["fits" if sizes["fits"] else "does not fit", "", f"predicted on the Neural Engine, T = 1 (median misfit {misfit:.0%}):",
              speeds.to_string(index=False, float_format="%.3g")]  # fmt: skip
    show(sizes | {"predicted": speeds.to_dict("records"), "predicted_misfit": misfit}, json, lines)


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

    opened = Bundle.open(bundle)
    from workbench.ane import placement as placing
    from workbench.ane import roofline
    from workbench.runtime import coreml_available, load_shard
    from workbench.sweep import runs

    if coreml_available():
        models = [load_shard(opened, shard, "coreml", compute_units=compute_units) for shard in opened.manifest.shards]
        found = placing.measured_placement(models)
    else:
        found = placing.predicted_placement(opened, generation=int(roofline.chip(chip).name[1]))
    result = {"source": found[0].source, "chip": None if coreml_available() else chip, "shards": [p.json() for p in found],
              "known": placing.contradictions(found)}  # fmt: skip
    if log:
        result["run_id"] = runs.record_run("residency", runs.describe(opened) | {"command": "residency"} | placing.columns(found))
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
    from workbench.benchmarks.log import rows

    show_rows(rows(folder / f"log-{runs}", runs, rounds), json)
