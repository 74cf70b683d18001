"""The log's tables of a grid: times of one machine, fidelity of any; one row per setting
(`configurations`) or per process (`processes`).

Runs are in the order of their ids, which begin with their time: the oldest first. Every
function here relies on this order, in which `log.load` gives them, and keeps it."""

import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench import log
from workbench.check import gates
from workbench.errors import check_choice
from workbench.sweep.grid import MEASURED, Cell, Grid, stored_cells
from workbench.sweep.identity import RUNTIMES
from workbench.sweep.summary import SAME_VALUES_COLUMNS, summarize_settings, with_kl_p99

LAYER_MS = "layer_ms"
"""A column of the log's `layers` that `processes` takes like a phase."""


def stored_tables(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid's cells, each with
    the columns of its run.

    Times come from the first run of each setting and round, on one machine with the
    software of its newest run. Their column `invalid` is the reason why a run is
    invalid, `disturbed` the reason why other work disturbed it (see `log.disturbance_reasons`);
    both are null otherwise. Fidelity comes from the newest validation of each bundle
    and way to run it, on any machine; validations on the grid's prompt take precedence.
    Rows of another definition are left out (see `log.select_current`), and stderr says
    so once.

    Args:
        machine: the machine of the times (see `log.identify_machine`); default: this machine
            if the log has times of it, else the machine of the newest run.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    selected = _select_runs(grid, root, machine)
    runs_of_table = {
        "samples": selected.timed,
        "layers": selected.timed,
        "fidelity": selected.validated,
    }
    tables = {}
    for table, runs in runs_of_table.items():
        rows = log.load(table, root, {"run_id": runs["run_id"]})
        of_run = runs.columns.difference([*rows, "config", "versions"], sort=False)
        if table == "fidelity":
            rows, left_out = log.select_current(rows)
            if left_out:
                _print_once(left_out)
        tables[table] = rows.merge(runs[["run_id", *of_run]], on="run_id")
    return tables


@cache  # a slider reads the tables again at every move
def _print_once(sentence: str) -> None:
    """Prints a sentence on stderr unless this process has printed it before."""
    print(sentence, file=sys.stderr)


def configurations(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> pd.DataFrame:
    """One row per setting of a grid, from runs of one machine (for `machine` see
    `stored_tables`). The fastest comes first; rows that only invalid runs measured come
    last.

    Returns:
        The columns of the newest run, and:
        name: the values of the axes that vary.
        tokens_per_s, call_ms, call_p90_ms, slowest, fastest, n, run_ids, disturbed: see
            `summary.summarize_settings`.
        worst_cosine, kl_mean, kl_p99 (nats): of the bundle's validation (see
            `stored_tables`).
        verdict: on the export.
        quality: OVER if the mean KL is above the grid's `max_kl`; not_run where none
            was measured, or where the export is RED.
        ane_ops_share: the Neural Engine's share of operations (null: no plan).
        invalid: the reason why no run is valid, otherwise null.
    """
    timed, validated = _select_runs(grid, root, machine)
    validated = validated.assign(quality=_judge_qualities(validated, grid.max_kl))
    # grouped by status too: invalid runs must not count as rounds of valid ones
    rows = summarize_settings(timed, ["setting", "status"], validated, root)
    for name in ("verdict", "quality"):
        rows[name] = rows[name].fillna("not_run")
    rows["name"] = _name_settings(grid, rows)
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable")
    return ranked.drop_duplicates("setting", ignore_index=True)


def processes(
    grid: Grid,
    root: log.Root = None,
    machine: str | None = None,
    phase: str = "tokens_per_s",
) -> pd.DataFrame:
    """One row per process, which is a run, of a grid on one machine (for `machine` see
    `stored_tables`).

    Args:
        phase: of the log's `samples`; or `layer_ms`, the ms of a layer in a call: the
            median over the layers of each layer's median over calls.

    Returns:
        The columns of the run, and:
        value: see `log.by_process`.
        invalid, disturbed: the reason why the process says nothing, otherwise null.
            Disturbed processes are left out of settings that have others.
        name: the values of the axes that vary.
    """
    tables = stored_tables(grid, root, machine)
    rows = per_process(tables["layers" if phase == LAYER_MS else "samples"], phase)
    return rows.assign(name=_name_settings(grid, rows)).reset_index(drop=True)


def per_process(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """One row per process with its value, from the rows of the table `samples` or
    `layers` of `stored_tables`; see `processes`."""
    if phase == LAYER_MS:
        values = rows.groupby("run_id")[LAYER_MS].median()
    else:
        rows = rows[rows["phase"] == phase]
        values = log.by_process(rows).set_index("run_id")["value"]
    processes = rows.drop_duplicates("run_id")
    processes = processes.assign(value=processes["run_id"].map(values))
    processes = processes.dropna(subset="value")
    return processes[log.select_undisturbed(processes, ["setting"])]


def _name_settings(grid: Grid, rows: pd.DataFrame) -> list[str]:
    """The name of each row: the values of T and of the axes of the grid that vary;
    where no axis varies, of T and of all export options in the grid."""
    axes = grid.export | {"bundle": grid.bundle} | dict(grid.run)
    varied = [
        name
        for name, values in axes.items()
        if isinstance(values, list) and len(values) > 1
    ]
    if not varied:
        varied = [name for name in grid.export if name in rows]
    if "T" not in varied:
        varied.append("T")
    settings = rows[varied].astype(object).fillna("none").to_dict("records")
    return [", ".join(f"{k} {v}" for k, v in row.items()) for row in settings]


class _SelectedRuns(NamedTuple):
    """Rows of `runs`, for times and for fidelity."""

    timed: pd.DataFrame
    """The first run of each setting and round, of one machine with its newest
    software."""
    validated: pd.DataFrame
    """The newest validation of each bundle and way to run it, of any machine; one on the
    grid's prompt takes precedence."""


def _select_runs(grid: Grid, root: log.Root, machine: str | None) -> _SelectedRuns:
    """Selects the runs of the log from which the tables of a grid are made."""
    cells = stored_cells(grid, root)
    cell_rows = pd.DataFrame(cell.columns() for cell in cells)
    runs = _load_measured(grid, cells, root)
    validated = _order_validations(runs, cell_rows)
    timed = _select_timed(runs, cell_rows, machine)
    if grid.run.runtime == ["auto"]:
        timed, validated = _select_runtime(timed, validated)
    # The oldest run of a round: a later one was made for its validation. If it counted, a
    # validation would change the value of a setting and its place in the order of the
    # round.
    timed = timed.drop_duplicates(["setting", "round"], keep="first")
    # the last one, since `_order_validations` puts the preferred one last
    validated = validated.drop_duplicates(SAME_VALUES_COLUMNS, keep="last")
    return _SelectedRuns(timed, validated)


def _load_measured(grid: Grid, cells: list[Cell], root: log.Root) -> pd.DataFrame:
    """The runs of the log that have samples, of any setting; where the grid names finished
    bundles, of these alone. The columns `disturbed` and `invalid` are the reasons why a
    run is so, otherwise null."""
    runs = with_kl_p99(log.load("runs", root, {"status": MEASURED}))
    runs["disturbed"] = log.disturbance_reasons(runs)
    runs["invalid"] = runs["reason"].where(runs["status"] == "invalid")
    # `values` is equal for bundles that were exported alike by different versions
    if grid.bundle:
        hashes = {cell.source.contents_hash for cell in cells}
        runs = runs[runs["bundle_hash"].isin(hashes)]
    return runs


def _order_validations(runs: pd.DataFrame, cell_rows: pd.DataFrame) -> pd.DataFrame:
    """All runs that validated a bundle of the grid, in the order of preference, the
    preferred one last: those on other prompts, then those on the grid's prompt, both by
    time, as in `runs`.

    Args:
        cell_rows: a row for each cell, with the columns of `Cell.columns`.
    """
    validated = runs[(runs["status"] == "ok") & runs["verdict"].notna()]
    validated = validated[validated["values"].isin(cell_rows["values"])]
    on_prompt = validated["prompt"].isin(cell_rows["prompt"].dropna())
    return pd.concat([validated[~on_prompt], validated[on_prompt]])


def _select_timed(
    runs: pd.DataFrame, cell_rows: pd.DataFrame, machine: str | None
) -> pd.DataFrame:
    """The runs of the grid's settings on one machine, with its newest software."""
    timed = runs[runs["setting"].isin(cell_rows["setting"]) & runs["round"].notna()]
    if timed.empty and machine is None:
        return timed
    timed = timed[timed["machine"] == _choose_machine(timed, machine)]
    newest = timed.iloc[-1]
    return timed[timed["software"] == newest["software"]]


def _select_runtime(timed: pd.DataFrame, validated: pd.DataFrame) -> _SelectedRuns:
    """Leaves out the runs on all but the preferred one of the runtimes that `auto` may
    stand for. Runs on the runtime of a plug-in's target stay."""
    names = set((timed if len(timed) else validated)["runtime"])
    less_preferred = [name for name in RUNTIMES if name in names][1:]
    timed = timed[~timed["runtime"].isin(less_preferred)]
    validated = validated[~validated["runtime"].isin(less_preferred)]
    return _SelectedRuns(timed, validated)


def _choose_machine(timed: pd.DataFrame, machine: str | None) -> str:
    """The machine of the times: the one that is named; otherwise this machine, if it
    has timed runs; otherwise the machine of the newest run.

    Raises:
        InputError: no timed run is of the machine named.
    """
    newest_first = timed["machine"].iloc[::-1].unique().tolist()
    if machine is None:
        this_machine = log.identify_machine()["machine"]
        machine = this_machine if this_machine in newest_first else newest_first[0]
    check_choice("machine", machine, newest_first)
    return machine


def _judge_qualities(validated: pd.DataFrame, max_kl: float) -> pd.Series:
    """The quality of each validation under a grid's limit on the mean KL, which may
    differ from the limit that the validation was run with."""
    qualities = np.where(validated["kl_mean"] > max_kl, gates.OVER, gates.WITHIN)
    has_quality = validated["kl_mean"].notna() & validated["verdict"].ne(gates.RED)
    qualities = pd.Series(qualities, validated.index, object)
    return qualities.where(has_quality, gates.NOT_RUN)
