"""Experiments: `run` executes notebooks, `report` writes them up again, `sweep` measures
the cells of a grid, `log` shows what was measured."""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import workbench
from workbench import paths
from workbench.cli import ending
from workbench.cli.common import Json, print_result, show, text, unread
from workbench.errors import InputError, check_choice, visible


def run(
    numbers: list[str],
    /,
    *,
    set_: list[str] | None = None,
    publish: bool = False,
    json: Json = False,
) -> None:
    """Runs experiment notebooks headless: verdict, figures, log rows, report.

    The exit code is 3 if a cell raises. What is written is ignored by git.

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512

    Args:
        numbers: Experiments, such as 05 34.
        set_: NAME=VALUE, a notebook's parameter; of several notebooks those without it
            ignore it.
        publish: Make these the shipped write-ups.
    """
    from workbench import experiment

    numbers = [number.zfill(2) for number in numbers]
    for number in numbers:
        experiment.find_notebook(number)  # refuses all before any of them runs
    experiment.check_writable(f"workbench run {' '.join(numbers)}")
    values = {number: {} for number in numbers}
    defaults = {}
    if set_:
        defaults = {n: experiment.notebook_parameters(n).values for n in numbers}
    for assignment in set_ or []:
        name, _, value = assignment.partition("=")
        owners = [number for number in numbers if name in defaults[number]]
        # a name that none has is left to the first notebook to refuse
        for number in owners or numbers:
            default = defaults[number].get(name)
            values[number][name] = experiment.typed(name, value, default)
    for settings in values.values():
        if checkpoint := settings.get("CHECKPOINT"):
            paths.locate_checkpoint(
                paths.find(str(checkpoint))
            )  # before a kernel starts
    results = []
    for number in numbers:
        found = experiment.run_notebook(
            number, values[number], publish=publish, progress=not json
        )
        results.append(found)
        if not json:
            print(f"{found['verdict']}  experiment {found['experiment']}")
            lines = found["conclusion"].splitlines()
            lines += [
                f"{figure['path']}: {figure['alt']}" for figure in found["figures"]
            ]
            lines += [f"report    {found['report']}", f"notebook  {found['executed']}"]
            print(visible("\n".join(f"  {line}" for line in lines)), end="\n\n")
    step = "make lab"
    if parts := [n for n in numbers if values[n].get("EXTRACT")]:
        step = f"workbench run {' '.join(parts)}  (all cells and rounds)"
    found = {result["verdict"] for result in results}
    verdict = next((v for v in ("RED", "GREEN") if v in found), "not_run")
    lines = [f"verdict  {verdict}", f"go on    {step}"]
    show({"verdict": verdict, "experiments": results}, json, lines)


def report(
    number: str, /, *, publish: bool = False, html: bool = False, json: Json = False
) -> None:
    """Draws the figures of an experiment's newest run again from their data, and writes
    its report; without a run of your own, of the shipped one.

    Example: workbench report 05

    Args:
        number: Of the experiment, such as 05.
        publish: Make this the shipped write-up.
        html: Also the executed notebook as one HTML page without code.
    """
    from workbench import experiment

    run = experiment.last_run(number)
    experiment.check_writable(f"workbench report {number}")
    run = experiment.writable_run(run, experiment.read_run(run))
    folder = experiment.publish_run(run) if publish else run
    result = {"report": str(experiment.write_again(folder))}
    if html:
        result["html"] = str(experiment.write_html(run))
    show(result, json, list(result.values()))


def sweep(
    grid_or_bundle: str,
    /,
    *,
    T: Annotated[str, Parameter("--T")] = "1",
    depth: str = "0",
    rounds: Annotated[int, Parameter(alias="-r")] = 1,
    runtime: str = "auto",
    part: str = "1/1",
    scheduler: str | None = None,
    log: Path | None = None,
    json: Json = False,
) -> None:
    """Measures a grid's cells, each in a fresh process, and prints the table of them;
    cells that the log holds are not measured again. The exit code is 3 if a cell failed.

    A grid is a YAML file; a finished bundle with the options below; or first-light,
    what only a Mac can show, in about ten minutes (then: workbench log --pack).

    Example: workbench sweep BUNDLE --T 1,4 --depth 0,64 -r 5

    Args:
        T: Of a bundle: tokens a call, 1,4.
        rounds: Of a bundle: processes that measure each cell.
        depth: Of a bundle: tokens in the cache before, 0,64.
        runtime: Of a bundle or first-light: auto, portable, coreml, stand-in.
        part: 1/3: every third cell, for the first of three machines.
        scheduler: Measure on a Dask cluster's ANE workers: tcp://host:8786.
        log: Folder of the log.
    """
    parts = re.fullmatch(r"(\d+)/(\d+)", part)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise InputError("--part", part, "i/n with i from 1 to n", "write 1/2")
    own = {"T": T != "1", "depth": depth != "0", "rounds": rounds != 1}
    if grid_or_bundle == "first-light":
        unread("a bundle", **own)
        from workbench.sweep.seeded import first_light

        grids = first_light(workbench.log.project(log), runtime)
    elif Path(grid_or_bundle).is_dir():
        run = {"T": T.split(","), "depth": depth.split(",")}
        run |= {"rounds": rounds, "runtime": [runtime]}
        grid = {"bundle": [grid_or_bundle], "run": run}
        grids = [workbench.sweep.make_grid(grid, "sweep of a bundle")]
    else:
        own["runtime"] = runtime != "auto"
        unread("a bundle in place of a grid", **own)
        grids = [workbench.sweep.load_grid(grid_or_bundle)]
    from workbench.sweep.summary import summary, table_lines

    measure = partial(workbench.sweep.sweep, root=log, scheduler=scheduler)
    which = tuple(map(int, parts.groups()))
    found = [measure(grid, part=which) for grid in grids]
    counts = {"log": found[0]["log"]}
    for name in ("cells", "done", "resumed", "failed", "invalid"):
        counts[name] = sum(result[name] for result in found)
    counts["reasons"] = [why for result in found for why in result["reasons"]]
    settings = [setting for result in found for setting in result["settings"]]
    rows = summary(log, {"setting": settings})
    counts["verdict"] = "RED" if (rows["verdict"] == "RED").any() else None
    show(counts, json, [*table_lines(rows), "", *text(counts)])
    if counts["failed"]:
        sys.exit(ending.UNFINISHED)


def log(
    runs: tuple[str, str] | None = None,
    /,
    *,
    where: str | None = None,
    sort: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    rows: bool = False,
    pack: Path | None = None,
    unpack: Path | None = None,
    log: Path | None = None,
    json: Json = False,
) -> None:
    """Prints the log as a table, the newest last: speed beside fidelity for each
    setting; of two runs, both side by side.

    A run is named by the id in the first column. Of two runs each is compared with all
    its repetitions: settings that differ, ratios of medians with intervals, gates that
    changed.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        runs: Two runs to compare.
        where: A condition on the columns of runs: "T == 4 and compress == 'fp16'".
        sort: Column to sort by, such as tokens_per_s; -tokens_per_s for the largest
            first.
        rows: Every run with all its columns.
        pack: Write the whole log as one zip without names and paths.
        unpack: Add the runs of such a zip to the log.
        log: Folder of the log.
    """
    table = {"where": where, "sort": sort, "rows": rows}
    if runs:
        unread("log without RUNS", pack=pack, unpack=unpack, **table)
    elif unpack:
        unread("log without --unpack", pack=pack, **table)
        found = workbench.log.unpack(unpack, log)
        return show({"imported": len(found), "runs": found}, json)
    elif pack:
        unread("log without --pack", **table)
        paths.prepare_output("--pack", pack)
        count = workbench.log.pack(pack, log)
        return show({"runs": count, "bytes": pack.stat().st_size}, json)
    from workbench.sweep import summary

    if runs:
        return show(summary.difference(*runs, log), json)
    load = partial(workbench.log.load, "runs") if rows else summary.summary
    found = load(log, where)
    if sort:
        name = sort.removeprefix("-")
        check_choice("--sort", name, found)
        found = found.sort_values(name, ascending=name == sort, kind="stable")
    if json:
        print_result(found.to_json(orient="records", date_format="iso"))
    elif found.empty:
        folder = log or workbench.log.default_root()
        print(f"no run of the log at {folder} fits; --log names another log")
    elif rows:
        found = found.dropna(axis="columns", how="all")
        print(visible(found.to_string(index=False, max_colwidth=32)))
    else:
        print(visible("\n".join(summary.table_lines(found))))
