"""`workbench sweep` logs many runs, `log` prints their rows, `compare` and `diff` set
two of them side by side."""

from enum import StrEnum
from json import loads
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, echo

import workbench
from workbench.cli.common import Json, LogFolder, show
from workbench.errors import InputError

Import = StrEnum("Import", {"import": "import"})

PANEL = "Experiments and their log"


def sweep_command(
    grid: Annotated[Path, Argument(metavar="GRID.yaml")],
    log_dir: LogFolder = None,
    scheduler: str | None = None,
    json: Json = False,
) -> None:
    """Runs the cross product of a grid's options, each cell in a fresh process;
    resumes.

    Every cell and round is one logged run. Bundles are cached in data/bundles of the
    log's project, or beside a log outside a project.

    Example: workbench sweep grid.yaml

    Args:
        scheduler: Measure on a Dask cluster's ANE workers: tcp://host:8786.
    """
    options = workbench.sweep.load_grid(grid)
    where = {"root": log_dir, "scheduler": scheduler}
    result = workbench.sweep.sweep(options, **where, progress=not json)
    counts = ", ".join(f"{k} {v}" for k, v in result.items() if k != "reasons")
    show(result, json, [counts, *result["reasons"]])
    if result["failed"]:
        raise Exit(1)


def log_command(
    action: Annotated[
        Import | None,
        Argument(help="import takes in what workbench first-light wrote."),
    ] = None,
    file: Annotated[
        Path | None, Argument(metavar="ZIP", help="What to import.")
    ] = None,
    where: str | None = None,
    table: str = "runs",
    summary: bool = False,
    sort: str | None = None,
    format: str = "md",
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Prints rows of the experiment log; --summary: speed beside fidelity for each
    configuration.

    `log import ZIP` adds the first-light results of another machine.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        where: A pandas query over runs: "compress == 'fp16'".
        summary: The table as llama-bench prints it: tok/s ± sd, worst update, KL,
            verdict.
        sort: Column to sort by, such as tokens_per_s; -tokens_per_s for the largest
            first.
        format: Of the summary: md, csv, tex or json.
    """
    from workbench.log.text import sorted_rows

    if action:
        _import(file, log_dir, json)
        return
    if summary:
        from workbench.report.summary import summary_rows, text_table

        rows = sorted_rows(summary_rows(log_dir, where), sort)
        echo(text_table(rows, "json" if json else format))
        return
    rows = sorted_rows(workbench.log.load(table, root=log_dir, where=where), sort)
    if json:
        echo(rows.to_json(orient="records", date_format="iso"))
    elif rows.empty:
        folder = log_dir or workbench.log.default_root()
        end = " fits" if where else "; --log names another"
        echo(f"no row of {table} in the log at {folder}{end}")
    else:
        rows = rows.dropna(axis="columns", how="all")
        echo(rows.to_string(index=False, max_colwidth=32))


def _import(file: Path | None, log_dir: Path | None, json: bool) -> None:
    from workbench.firstlight.archive import import_zip

    if file is None:
        needed = "what workbench first-light wrote"
        step = "write: workbench log import ZIP"
        raise InputError("log import", "no file", needed, step)
    result = import_zip(file, log_dir)
    count = f"{result['imported']} new of {len(result['runs'])} runs"
    line = f"{count} of {result['machine']}, {result['runtime']}"
    if result["simulated"]:
        line += " (simulated)"
    show(result, json, [line])


def compare_command(
    run_a: str, run_b: str, log_dir: LogFolder = None, json: Json = False
) -> None:
    """Compares two runs with their repetitions: settings that differ, ratios of
    medians, intervals.

    Example: workbench compare 20260131T094512Z-5f3a9c01 20260131T094633Z-1c02ad7e
    """
    from workbench.log.text import comparison_lines

    comparison = workbench.log.compare(run_a, run_b, log_dir)
    result = {
        "settings": comparison.settings.to_dict("records"),
        "measures": loads(comparison.measures.to_json(orient="records")),
        "hidden": comparison.indistinguishable,
    }
    show(result, json, comparison_lines(comparison))


def diff_command(
    run_a: str,
    run_b: str,
    tensor: str = "update",
    out: Path | None = None,
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Compares two validations of one checkpoint: a heatmap of A's error less B's, and
    the gates that changed.

    Example: workbench diff 20260131T094512Z-5f3a9c01 20260131T094633Z-1c02ad7e

    Args:
        tensor: update, k, v, hidden or logits.
        out: Path of the figure without its ending; default:
            experiments/diffs/A-B/update.
    """
    from workbench.log.text import setting_lines
    from workbench.report.difference import run_difference

    difference = run_difference(run_a, run_b, log_dir, tensor)
    paths = difference.save(log_dir, out)
    worst = difference.cells.loc[difference.cells["difference"].abs().idxmax()]
    result = {
        "tensor": tensor,
        "metric": difference.metric,
        "T": list(difference.Ts),
        "cells": len(difference.cells),
        "largest": worst[["layer", "position", "a", "b"]].to_dict(),
        "gates": difference.gates.to_dict("records"),
        "settings": difference.settings.to_dict("records"),
        "figures": [str(path) for path in paths],
    }
    place = f"layer {worst['layer']:.0f}, position {worst['position']:.0f}"
    lines = [
        *setting_lines(difference.settings),
        "",
        f"{tensor}, {difference.metric}: {len(difference.cells)} cells; "
        f"largest difference at {place}: A {worst['a']:.3g}, B {worst['b']:.3g}",
    ]
    for gate in result["gates"]:
        lines.append(f"{gate['gate']:29}A {gate['a']}, B {gate['b']}")
    if not result["gates"]:
        lines.append("no gate changed its verdict")
    show(result, json, lines + result["figures"])
