"""`workbench sweep` measures cells of a grid, `log` shows what was measured."""

import re
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

import workbench
from workbench.cli.common import Json, LogFolder, show
from workbench.errors import InputError

PANEL = "Experiments and their log"
ROUNDS = "Of a bundle: processes that measure each cell."


def sweep_command(
    what: Annotated[str, Argument(metavar="GRID.yaml|BUNDLE|first-light")],
    T: Annotated[str, Option("--T", help="Of a bundle: tokens a call, 1,4.")] = "1",
    depth: str = "0",
    rounds: Annotated[int, Option("--rounds", "-r", min=1, help=ROUNDS)] = 1,
    runtime: str | None = None,
    part: str = "1/1",
    scheduler: str | None = None,
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Measures a grid's cells, each in a fresh process, and prints the table of them;
    cells that the log holds are not measured again.

    A grid is a YAML file; a finished bundle with the options below; or first-light,
    what only a Mac can show, in about ten minutes (then: workbench log --pack).

    Example: workbench sweep BUNDLE --T 1,4 --depth 0,64 -r 5

    Args:
        depth: Of a bundle: tokens in the cache before, 0,64.
        runtime: Of a bundle or first-light: auto, portable, coreml, stand-in.
        part: 1/3: every third cell, for the first of three machines.
        scheduler: Measure on a Dask cluster's ANE workers: tcp://host:8786.
    """
    from workbench.sweep.summary import summary, table_lines

    parts = re.fullmatch(r"(\d+)/(\d+)", part)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise InputError("--part", part, "i/n with i from 1 to n", "write 1/2")
    grids = _grids(what, T, depth, rounds, runtime, log_dir)
    counts, settings = {}, set()
    for grid in grids:
        how = {"root": log_dir, "scheduler": scheduler, "progress": not json}
        chosen = tuple(map(int, parts.groups()))
        result = workbench.sweep.sweep(grid, part=chosen, **how)
        settings |= result.pop("settings")
        for name, value in result.items():
            added = value if name == "log" else counts.get(name, type(value)()) + value
            counts[name] = added
    said = ", ".join(f"{k} {v}" for k, v in counts.items() if k != "reasons")
    lines = []
    if not json:
        lines = table_lines(summary(log_dir, {"setting": settings}))
    show(counts, json, [*lines, said, *dict.fromkeys(counts["reasons"])])
    if counts["failed"]:
        raise Exit(1)


def _grids(what, T, depth, rounds, runtime, log_dir) -> list:
    """The grids that the command's argument names."""
    if what == "first-light":
        from workbench.log import project
        from workbench.sweep.seeded import first_light

        return first_light(project(log_dir), runtime or "auto")
    if not Path(what).is_dir():
        return [workbench.sweep.load_grid(what)]
    run = {"T": _counts("--T", T), "depth": _counts("--depth", depth)}
    run |= {"rounds": rounds, "runtime": [runtime or "auto"]}
    return [workbench.sweep.make_grid({"bundle": [what], "run": run}, "sweep")]


def _counts(option: str, text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(option, repr(text), "counts with commas", "write 1,4")
    return [int(count) for count in text.split(",")]


def log_command(
    run_a: Annotated[str | None, Argument(metavar="[A]")] = None,
    run_b: Annotated[str | None, Argument(metavar="[B]")] = None,
    where: str | None = None,
    sort: str | None = None,
    rows: bool = False,
    pack: Path | None = None,
    unpack: Path | None = None,
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Prints the log as a table, the newest last: speed beside fidelity for each
    setting; A B: two runs side by side.

    A run is named by the id in the first column. Of A and B each is compared with all
    its repetitions: settings that differ, ratios of medians with intervals, errors,
    gates that changed.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        where: A pandas query over the rows of runs: "compress == 'fp16'".
        sort: Column to sort by, such as tokens_per_s; -tokens_per_s for the largest
            first.
        rows: Every run with all its columns.
        pack: Write the whole log as one zip without names and paths.
        unpack: Add the runs of such a zip to the log.
    """
    from workbench import log
    from workbench.sweep import summary

    if pack:
        count = log.pack(pack, log_dir)
        found = {"zip": str(pack), "runs": count, "bytes": pack.stat().st_size}
        show(found, json, [f"{pack}: {count} runs, {found['bytes']:,} bytes"])
        return
    if unpack:
        found = log.unpack(unpack, log_dir)
        line = f"{len(found)} new runs from {unpack}"
        show({"imported": len(found), "runs": found}, json, [line])
        return
    if run_a:
        if not run_b:
            needed, step = "two runs", "name two of `workbench log`"
            raise InputError("log", "one run", needed, step)
        found = summary.difference(run_a, run_b, log_dir)
        show(found, json, summary.difference_lines(found))
        return
    load = log.load if rows else summary.summary
    found = load("runs", log_dir, where) if rows else load(log_dir, where)
    found = summary.sorted_rows(found, sort)
    if json:
        echo(found.to_json(orient="records", date_format="iso"))
    elif found.empty:
        folder = log_dir or log.default_root()
        end = " fits" if where else "; --log names another"
        echo(f"no run in the log at {folder}{end}")
    elif rows:
        found = found.dropna(axis="columns", how="all")
        echo(found.to_string(index=False, max_colwidth=32))
    else:
        echo("\n".join(summary.table_lines(found)))
