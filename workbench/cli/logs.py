"""`log` prints what was measured; its subcommands compare two runs, and carry a log from
one machine to another."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import workbench
from workbench import paths
from workbench.cli.options import Json
from workbench.cli.output import print_and_exit, print_document
from workbench.errors import InputError
from workbench.progress import stage


def log(
    *,
    where: str | None = None,
    sort: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    rows: bool = False,
    log: Path | None = None,
    json: Json = False,
) -> None:
    """Prints one row for each setting, the newest last, with its speed and fidelity.

    A run is named by the id in the first column.

    Example: workbench log --where "compress == 'fp16' and T == 1"

    Args:
        where: A condition on the columns of runs: "T == 4 and compress == 'fp16'".
        sort: Column to sort by, such as tokens_per_s; -tokens_per_s for the largest
            first.
        rows: Every run with all its columns.
        log: Folder of the log; default: experiments/log of the checkout.
    """
    _check_log(log)
    stage("log: reading the runs")
    from workbench.log.condition import unknown_column_error
    from workbench.sweep import summary
    from workbench.sweep.table import table_lines

    if rows:
        table = workbench.log.load("runs", log, where)
    else:
        table = summary.summary(log, where)
    if sort:
        column = sort.removeprefix("-")
        if column not in table:
            raise unknown_column_error("--sort", repr(column), column, table.columns)
        table = table.sort_values(column, ascending=column == sort, kind="stable")
    if json:
        print_document(table.to_json(orient="records", date_format="iso"))
    elif table.empty:
        folder = log or workbench.log.default_root()
        print_document(f"no run of the log at {folder} fits; --log names another log")
    elif rows:
        table = table.dropna(axis="columns", how="all")
        print_document(table.to_string(index=False, max_colwidth=32))
    else:
        # a run of an experiment on no checkpoint has no setting and no speed to show
        shown = table[table[["checkpoint", "tokens_per_s"]].notna().any(axis=1)]
        lines = table_lines(shown, shipped=workbench.log.shipped_runs(log))
        if hidden := len(table) - len(shown):
            lines.append(f"{hidden} without a checkpoint: see `workbench log --rows`")
        print_document("\n".join(lines))


def _check_log(log: Path | None) -> None:
    """Refuses a path in --log where no folder is."""
    if log is not None and not log.is_dir():
        actual = "a file" if log.exists() else "no such folder"
        needed, step = "the folder of a log", "check the path, or leave --log out"
        raise InputError(f"--log {log}", actual, needed, step)


def log_compare(
    run_a: str, run_b: str, /, *, log: Path | None = None, json: Json = False
) -> None:
    """Compares two runs, each with all its repetitions: settings that differ, ratios of
    medians with intervals, gates that changed.

    Example: workbench log compare RUN_A RUN_B

    Args:
        run_a: A run, by the id in the first column of `workbench log`.
        run_b: The other one.
        log: Folder of the log; default: experiments/log of the checkout.
    """
    _check_log(log)
    stage("log: comparing the runs")
    from workbench.sweep import summary

    print_and_exit(summary.compare_runs(run_a, run_b, log), json)


def log_pack(file: Path, /, *, log: Path | None = None, json: Json = False) -> None:
    """Writes the whole log into one zip, without names of users and hosts and without
    paths.

    Example: workbench log pack build/log.zip

    Args:
        file: The zip to write.
        log: Folder of the log; default: experiments/log of the checkout.
    """
    _check_log(log)
    paths.prepare_output("log pack", file)
    stage("log: packing the runs")
    count = workbench.log.pack(file, log)
    print_and_exit({"runs": count, "bytes": file.stat().st_size}, json)


def log_unpack(file: Path, /, *, log: Path | None = None, json: Json = False) -> None:
    """Adds the runs of such a zip to the log.

    Example: workbench log unpack build/log.zip

    Args:
        file: The zip to read.
        log: Folder of the log; default: experiments/log of the checkout.
    """
    needed, step = "a file of `workbench log pack`", "check the path"
    paths.check_file("packed log", file, needed, step)
    stage("log: unpacking the runs")
    run_ids = workbench.log.unpack(file, log)
    print_and_exit({"imported": len(run_ids), "runs": run_ids}, json)
