"""The log's tables of a grid: times of one machine, fidelity of any, one row per
configuration."""

import json
import sys
from functools import cache

import pandas as pd

from workbench import log
from workbench.errors import check_choice
from workbench.sweep.grid import Grid, cells
from workbench.sweep.identity import RUNTIMES
from workbench.sweep.run import MEASURED
from workbench.sweep.summary import BUNDLE, repeated, with_tail


def stored_tables(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid's cells, each with
    the columns of its run.

    Times are of the first run of each setting and round, on one machine with the
    software of its newest run; their column `invalid` is the reason why a run is
    invalid, `disturbed` why other work disturbed it (see `log.disturbed`), else null.
    Fidelity is of the newest validation of each bundle and way to run it, on any
    machine; where there are some on the grid's prompt, of the newest of those. Rows of
    another definition are left out (see `log.select_current`), which stderr says once.

    Args:
        machine: the machine of the times (see `log.environment`); default: this machine
            if the log has times of it, else the machine of the newest run.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    timed, validated = _runs(grid, root, machine)
    tables = {}
    for table, runs in (("samples", timed), ("layers", timed), ("fidelity", validated)):
        own = log.load(table, root, {"run_id": runs["run_id"]})
        more = runs.columns.difference([*own, "config", "versions"], sort=False)
        if table == "fidelity":
            own, left_out = log.select_current(own)
            if left_out:
                _say(left_out)
        tables[table] = own.merge(runs[["run_id", *more]], on="run_id")
    return tables


LAYER_MS = "layer_ms"
"""A column of the log's `layers`, named like a phase."""


@cache  # a slider reads the tables again at every move
def _say(words: str) -> None:
    print(words, file=sys.stderr)


def configurations(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> pd.DataFrame:
    """One row per setting of a grid, from runs of one machine.

    The fastest comes first; rows that only invalid runs measured come last. For
    `machine` see `stored_tables`.

    Returns:
        The columns of the newest run; name: the values of the axes that vary.
        tokens_per_s, call_ms, call_p90_ms, slowest, fastest, n, run_ids, disturbed: see
        `summary.repeated`. worst_cosine, kl_mean, kl_p99 (nats): of the bundle's
        validation (see `stored_tables`);
        verdict: RED if a gate other than the user's limit is, or if the mean KL is above the grid's
        `max_kl`; faulty: whether a gate other than the user's limit is RED.
        ane_ops_share: the Neural Engine's share (null: no plan). invalid: the
        reason if no run is valid.
    """
    timed, validated = _runs(grid, root, machine)
    verdicts = [_verdict(run, grid.max_kl) for run in validated.to_dict("records")]
    validated["verdict"] = pd.Series(verdicts, validated.index, object)
    red = [bool(_red(run)) for run in validated.to_dict("records")]
    faulty = validated.assign(faulty=red).set_index(BUNDLE)["faulty"]
    rows = repeated(timed, ["setting", "status"], validated, root)
    rows["verdict"] = rows["verdict"].fillna("not_run")
    rows = rows.merge(faulty.reset_index(), "left", BUNDLE)
    rows["faulty"] = rows["faulty"].eq(True)
    rows["name"] = _names(grid, rows)
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable")
    return ranked.drop_duplicates("setting", ignore_index=True)


def processes(
    grid: Grid,
    root: log.Root = None,
    machine: str | None = None,
    phase: str = "tokens_per_s",
) -> pd.DataFrame:
    """One row per process, which is a run, of a grid on one machine.

    For `machine` see `stored_tables`.

    Args:
        phase: of the log's `samples`, or `layer_ms`: ms of a layer in a call, the
            median over the layers of each one's median of its calls.

    Returns:
        The columns of the run; value (see `log.by_process`); invalid, disturbed: the
        reason why the process says nothing, else null. Disturbed processes are left out
        of settings that have others; name: the values of the axes that vary.
    """
    tables = stored_tables(grid, root, machine)
    rows = per_process(tables["layers" if phase == LAYER_MS else "samples"], phase)
    return rows.assign(name=_names(grid, rows)).reset_index(drop=True)


def per_process(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """One row per process, and its value, of rows of the table `samples` or `layers` of
    `stored_tables`; see `processes`."""
    if phase == LAYER_MS:
        values = rows.groupby("run_id")[LAYER_MS].median()
    else:
        rows = rows[rows["phase"] == phase]
        values = log.by_process(rows).set_index("run_id")["value"]
    first = rows.drop_duplicates("run_id")
    first = first.assign(value=first["run_id"].map(values)).dropna(subset="value")
    return first[log.select_undisturbed(first, ["setting"])]


def _names(grid: Grid, rows: pd.DataFrame) -> list[str]:
    """The values of the axes of a grid that vary and T, for each row; where no axis
    varies, all export options that the grid gives."""
    axes = grid.export | {"bundle": grid.bundle} | dict(grid.run)
    varied = [n for n in axes if isinstance(axes[n], list) and axes[n][1:]]
    if not varied:
        varied = [n for n in grid.export if n in rows]
    varied += [name for name in axes if name == "T" and name not in varied]
    words = rows[varied].astype(object).fillna("none").to_dict("records")
    return [", ".join(f"{k} {v}" for k, v in row.items()) for row in words]


def _runs(
    grid: Grid, root: log.Root, machine: str | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of `runs`: the first of each setting and round of one machine, and the
    newest validation of each bundle and way to run it."""
    every = list(cells(grid, root))
    hashes = pd.DataFrame(cell.columns(auto) for cell in every for auto in RUNTIMES)
    runs = with_tail(log.load("runs", root, {"status": MEASURED}))
    runs["disturbed"] = log.disturbed(runs)
    runs["invalid"] = runs["reason"].where(runs["status"] == "invalid")
    if grid.bundle:
        known = {cell.source.contents for cell in every}
        runs = runs[runs["bundle_hash"].isin(known)]
    judged = runs[(runs["status"] == "ok") & runs["verdict"].notna()]
    validated = judged[judged["values"].isin(hashes["values"])]
    # on the grid's prompt counts as newer than on another one
    asked = validated["prompt"].isin(hashes["prompt"].dropna())
    validated = validated.loc[asked.sort_values(kind="stable").index]
    timed = runs[runs["setting"].isin(hashes["setting"]) & runs["round"].notna()]
    if len(timed) or machine is not None:
        # the machine and its software of the newest run
        names = timed["machine"].iloc[::-1].unique().tolist()
        here = log.environment()["machine"]
        machine = machine or (here if here in names else names[0])
        check_choice("machine", machine, names)
        timed = timed[timed["machine"] == machine]
        timed = timed[timed["software"] == timed["software"].iloc[-1]]
    if grid.run.runtime == ["auto"]:
        found = set((timed if len(timed) else validated)["runtime"])
        # a plug-in's target has a runtime of its own
        others = [name for name in RUNTIMES if name in found][1:]
        timed = timed[~timed["runtime"].isin(others)]
        validated = validated[~validated["runtime"].isin(others)]
    # a later run of the same round was made for its validation; were it to count, a
    # setting would have another value after a validation, in another place of the order
    timed = timed.drop_duplicates(["setting", "round"], keep="first")
    return timed, validated.drop_duplicates(BUNDLE, keep="last")


def _verdict(run: dict, max_kl: float) -> str:
    """A run's verdict under another limit on the mean KL; the logged one where no KL
    was measured."""
    if pd.isna(run["kl_mean"]):
        return run["verdict"]
    return "RED" if _red(run) or run["kl_mean"] > max_kl else "GREEN"


def _red(run: dict) -> set[str]:
    """The gates of a run that are RED, but for the user's limit on the mean KL."""
    config = run["config"] if isinstance(run["config"], str) else "{}"
    gates = json.loads(config).get("gates", [])
    return {gate["name"] for gate in gates if gate["verdict"] == "RED"} - {"max_kl"}
