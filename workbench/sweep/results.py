"""The log's tables of a grid: times of one machine, fidelity of any, one row per
configuration."""

import json
from collections.abc import Iterable

import pandas as pd

from workbench import log
from workbench.errors import InputError
from workbench.sweep.grid import Grid, cells, varied_axes
from workbench.sweep.identity import COUNTS, OPTIONS
from workbench.sweep.run import HOW, MEASURED
from workbench.sweep.summary import BUNDLE, JUDGED, SPEEDS, repeated

ABOUT = (
    *("values", "setting", "round", "invalid", "family", "machine", "software"),
    *("checkpoint", "checkpoint_hash", "bundle", "ane_ops_share"),
    *(*OPTIONS, *HOW, *COUNTS),
)
"""Columns of a run that its samples, layers and fidelity get."""
CONFIGURATION = (
    *("setting", *BUNDLE, "run_id", "machine", "runtime", "bundle"),
    *("ane_ops_share", "invalid", *SPEEDS, "slowest", "fastest", "n", *JUDGED),
)
RUNTIMES = ("coreml", "portable", "stand-in")
"""What auto may mean, the preferred first."""


def stored_tables(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid's cells, each with
    the columns of its run.

    Times are of the newest run of each setting and round, on one machine with the
    software of its newest run; their column `invalid` is the reason why a run is
    invalid, else null. Fidelity is of the newest validation of each bundle, on any
    machine.

    Args:
        machine: the machine of the times (see `log.environment`); default: this machine
            if the log has times of it, else the machine of the newest run.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    timed, validated = _rows(grid, root, machine)
    tables = {}
    for table, runs in (("samples", timed), ("layers", timed), ("fidelity", validated)):
        own = log.load(table, root, {"run_id": runs["run_id"].tolist()})
        more = [name for name in ABOUT if name not in own]
        tables[table] = own.merge(runs[["run_id", *more]], on="run_id")
    return tables


def configurations(
    grid: Grid, root: log.Root = None, machine: str | None = None
) -> pd.DataFrame:
    """One row per setting of a grid, from runs of one machine.

    The fastest comes first; rows that only invalid runs measured come last. For
    `machine` see `stored_tables`.

    Returns:
        name: the values of the axes that vary, which are columns, too. machine,
        runtime, bundle, run_id (of the newest run). tokens_per_s, call_ms, call_p90_ms:
        medians over runs of the run's median or 90th percentile; slowest, fastest: the
        range of the runs' tok/s; n: the number of runs. worst_cosine, kl_mean (nats):
        of the bundle's newest validation; verdict: RED if a gate other than the user's
        limit is, or if the mean KL is above the grid's `max_kl`. ane_ops_share: the
        Neural Engine's share (null: no plan). invalid: the reason if no run is valid.
    """
    timed, validated = _rows(grid, root, machine)
    valid = timed["invalid"].isna()
    some = valid.groupby(timed["setting"]).transform("any").astype(bool)
    found = [_verdict(run, grid.max_kl) for run in validated.to_dict("records")]
    validated = validated.assign(verdict=pd.Series(found, validated.index, object))
    rows = repeated(timed[valid | ~some], ["setting"], validated)
    rows["verdict"] = rows["verdict"].fillna("not_run")
    varied = list(dict.fromkeys([*varied_axes(grid), "T"]))
    words = rows[varied].astype(object).fillna("none").to_dict("records")
    rows["name"] = [", ".join(f"{k} {v}" for k, v in row.items()) for row in words]
    rows = rows[list(dict.fromkeys(["name", *varied, *CONFIGURATION]))]
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable")
    return ranked.reset_index(drop=True)


def _of_grid(grid: Grid, root: log.Root) -> tuple[pd.DataFrame, pd.DataFrame, dict]:
    """Timed runs and validations of a grid's cells on any machine, and for each runtime
    that auto may mean the hashes of the cells."""
    every = list(cells(grid, root))
    runs = log.load("runs", root, {"status": list(MEASURED)})
    runs["invalid"] = runs["reason"].where(runs["status"] == "invalid")
    if grid.bundle:
        runs = runs[runs["bundle_hash"].isin({c.source.contents for c in every})]
    hashes = {}
    for auto in RUNTIMES:
        columns = [cell.columns(auto) for cell in every]
        hashes[auto] = {n: {row[n] for row in columns} for n in ("setting", "values")}
    timed = _fitting(runs[runs["round"].notna()], "setting", hashes.values())
    validated = _fitting(runs[runs["verdict"].notna()], "values", hashes.values())
    return timed, validated[validated["invalid"].isna()], hashes


def _fitting(runs: pd.DataFrame, column: str, hashes: Iterable[dict]) -> pd.DataFrame:
    return runs[runs[column].isin(set().union(*(known[column] for known in hashes)))]


def _rows(
    grid: Grid, root: log.Root, machine: str | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of `runs`: the newest of each setting and round of one machine, and the
    newest validation of each bundle and way to run it."""
    timed, validated, hashes = _of_grid(grid, root)
    timed = _of_machine(timed, machine)
    found = set((timed if len(timed) else validated)["runtime"])
    auto = next((name for name in RUNTIMES if name in found), "portable")
    timed = _fitting(timed, "setting", [hashes[auto]])
    validated = _fitting(validated, "values", [hashes[auto]])
    timed = timed.drop_duplicates(["setting", "round"], keep="last")
    return timed, validated.drop_duplicates(BUNDLE, keep="last")


def _of_machine(runs: pd.DataFrame, machine: str | None) -> pd.DataFrame:
    """The runs of one machine with the software of its newest one."""
    names = runs["machine"].iloc[::-1].unique().tolist()
    if machine is not None and machine not in names:
        known = "; ".join(names) or "none, no run fits"
        step = "name one of these, or none for the default"
        raise InputError("machine", repr(machine), f"one of {known}", step)
    if not names:
        return runs
    here = log.environment()["machine"]
    own = runs[runs["machine"] == (machine or (here if here in names else names[0]))]
    return own[own["software"] == own["software"].iloc[-1]]


def _verdict(run: dict, max_kl: float) -> str:
    """A run's verdict under another limit on the mean KL; the logged one where no KL
    was measured."""
    if pd.isna(run["kl_mean"]):
        return run["verdict"]
    gates = json.loads(run["config"]).get("gates", [])
    red = {gate["name"] for gate in gates if gate["verdict"] == "RED"}
    return "RED" if red - {"max_kl"} or run["kl_mean"] > max_kl else "GREEN"
