"""The log's tables of a grid: times of one machine, fidelity of any, one row per
configuration."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from workbench import log
from workbench.adopt.decoder import folder_identity
from workbench.log.machine import machine_names, of_machine
from workbench.log.store import Root
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import runs
from workbench.sweep.cell import find
from workbench.sweep.grid import RUN_AXES, Grid, cells

_SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms"]
_SHARES = ["ane_ops_share", "ane_cost_share"]
VALIDATED = ["bundle_hash", *runs.HOW]
"""Columns of `runs` that decide fidelity, price and verdict, on any machine."""


def stored_tables(
    grid: Grid, root: Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid, newest runs only,
    with their settings joined on.

    Times are of one machine and of one setting of everything that the grid does not
    vary. Where the log holds several checkpoints of one name, or several versions of
    system, coremltools or torch, the times are those of the newest run. Fidelity is of
    any machine. The column `invalid` of times is the reason why a run is invalid, else
    null.

    Args:
        machine: the machine of the times (see `workbench.log.machine.machine_name`);
            default: this machine if the log has times of it, else the machine of the
            newest run.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    measured = _of_checkpoint(grid, root)
    timed = _timed_runs(grid, root)
    of_checkpoint = measured[measured["status"] == "ok"]
    timed = runs.like_newest(of_machine(timed, machine, runs.here()), "software")
    logged = set((of_checkpoint if timed.empty else timed)["runtime"])
    auto = next((name for name in runs.RUNTIMES if name in logged), "portable")
    settings = [cell.columns(auto) for cell in cells(grid)]
    timed = runs.fitting(timed, settings, runs.TIMES)
    timed = runs.newest(timed, [*runs.TIMES, "round"])
    timed["invalid"] = timed["reason"].where(timed["status"] == "invalid")
    validated = runs.fitting(of_checkpoint, settings, runs.VALUES)
    fidelity = _rows_of("fidelity", validated, root)
    validated = validated[validated["run_id"].isin(fidelity["run_id"])]
    validated = runs.newest(validated, runs.VALUES)
    about = ["family", "checkpoint", "checkpoint_hash", "bundle"]
    times = [*about, *runs.TIMES, "machine", "software"]
    times += ["os_build", "round", "invalid", *_SHARES]
    return {
        "samples": _join(_rows_of("samples", timed, root), timed, times),
        "layers": _join(_rows_of("layers", timed, root), timed, times),
        "fidelity": _join(fidelity, validated, [*about, *runs.VALUES]),
    }


def _rows_of(table: str, rows: pd.DataFrame, root: Root) -> pd.DataFrame:
    """Rows of a log table that belong to the given rows of `runs`."""
    return log.load(table, root=root, where={"run_id": rows["run_id"].tolist()})


def _join(table: pd.DataFrame, rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """A log table with `columns` of `rows`, rows of `runs`; runs that `rows` lacks are
    dropped. In a column that both have, the run's value fills the table's nulls."""
    missing = ["run_id"]
    for name in columns:
        if name in table:
            of_run = table["run_id"].map(rows.set_index("run_id")[name])
            table = table.assign(**{name: table[name].fillna(of_run)})
        else:
            missing.append(name)
    return table.merge(rows[missing], on="run_id")


def offered_machines(grid: Grid, root: Root = None) -> list[str]:
    """The machines of a grid's times in the log, the one of the newest run first."""
    return machine_names(_timed_runs(grid, root))


def _timed_runs(grid: Grid, root: Root) -> pd.DataFrame:
    """The sweeps' runs of a grid's cells, on any machine and for any runtime that auto
    may mean."""
    rows = _of_checkpoint(grid, root)
    settings = []
    for cell in cells(grid):
        settings += map(cell.columns, runs.RUNTIMES)
    return runs.fitting(rows[rows["round"].notna()], settings, runs.TIMES)


def _of_checkpoint(grid: Grid, root: Root) -> pd.DataFrame:
    """The experiment's runs of the grid's checkpoint, by its hash; without the
    checkpoint's folder, by its name and the hash of the newest run."""
    rows = runs.listing(grid.experiment, root, runs.MEASURED)
    root = Path(root or log.default_root())
    if grid.bundle:
        identities = [folder_identity(find(bundle, root)) for bundle in grid.bundle]
        return rows[rows["bundle_hash"].isin(identities)]
    path = find(grid.checkpoint, root)
    if not path.is_dir():
        rows = rows[rows["checkpoint"] == path.name]
        return runs.like_newest(rows, "checkpoint_hash")
    files = []
    for file in filter(Path.is_file, sorted(path.iterdir())):
        stat = file.stat()
        files.append((file, stat.st_size, stat.st_mtime_ns))
    return rows[rows["checkpoint_hash"] == _sha256(path, tuple(files))]


@cache
def _sha256(path: Path, files: tuple) -> str:
    """The checkpoint's hash; `files` is the key of the cache: paths, sizes and
    times."""
    return Checkpoint(path).sha256


def configurations(
    grid: Grid, root: Root = None, machine: str | None = None
) -> pd.DataFrame:
    """One row per bundle, way to run it and T that the log holds of one machine.

    The fastest comes first; rows that only invalid runs measured come last. For
    `machine` see `stored_tables`.

    Returns:
        name: the values of the varying axes, and T; then each of these values.
        machine, runtime, bundle. tokens_per_s, call_ms, call_p90_ms: medians over runs
        of the run's median or 90th
            percentile.
        slowest, fastest: the range of the runs' tok/s; n: the number of runs.
        worst_cosine: the bundle's smallest cosine of isolated updates at any T.
        kl_mean: nats; verdict: RED if a gate other than the user's limit is, or if the
            mean KL is above the grid's `max_kl`.
        ane_ops_share, ane_cost_share: the Neural Engine's shares (null: no plan).
        invalid: the reason if no run is valid.
    """
    tables = stored_tables(grid, root, machine)
    varied = [name for name in varied_axes(grid) if name != "T"]
    about = ["bundle", *runs.HOW]  # these columns decide fidelity and verdict
    keys = [*dict.fromkeys([*about, *varied]), "machine", "T"]
    rows = _speeds(tables["samples"], keys)
    fidelity = tables["fidelity"]
    updates = fidelity.query("mode == 'isolated' and tensor == 'update'")
    worst = updates.groupby(about, dropna=False)["cosine"].min()
    worst = worst.reset_index(name="worst_cosine")
    every = log.load("runs", root, {"status": "ok"}).dropna(subset="verdict")
    validated = _priced(runs.newest(every, about), grid.max_kl)
    validated = validated[[*about, "kl_mean", "verdict"]]
    rows = rows.reset_index().merge(worst, "left", about)
    rows = rows.merge(validated, "left", about)
    rows["verdict"] = rows["verdict"].astype(object).fillna("not_run")
    rows["name"] = _names(rows[[*varied, "T"]])
    columns = ["name", *varied, "T", "machine", "runtime", "bundle", *_SPEEDS]
    columns += ["slowest", "fastest", "n"]
    columns += ["worst_cosine", "kl_mean", "verdict", *_SHARES, "invalid"]
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable")
    return ranked[list(dict.fromkeys(columns))].reset_index(drop=True)


def _names(rows: pd.DataFrame) -> list[str]:
    """Each row's columns with their values in words, null as "none"."""
    names = []
    for row in rows.astype(object).fillna("none").to_dict("records"):
        names.append(", ".join(f"{column} {value}" for column, value in row.items()))
    return names


def _speeds(samples: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The columns of `configurations` that are times, by `keys`. Invalid runs are
    dropped where a configuration has valid ones."""
    phases = samples["phase"].isin(["call", "tokens_per_s"])
    timed = samples[phases & ~samples["warmup"].fillna(False)]
    valid = timed["invalid"].isna()
    of_key = valid.groupby([timed[key] for key in keys], dropna=False)
    timed = timed[valid | ~of_key.transform("any")]
    of_run = timed.groupby([*keys, "run_id", "phase"], dropna=False)["value"]
    median = of_run.median().unstack("phase")
    p90 = of_run.quantile(0.9).unstack("phase")
    by_run = median.reindex(columns=["tokens_per_s", "call"])
    by_run = by_run.assign(p90=p90.reindex(columns=["call"]))
    by_key = by_run.set_axis(_SPEEDS, axis=1).groupby(keys, dropna=False)
    speeds = by_key["tokens_per_s"]
    extent = {"slowest": speeds.min(), "fastest": speeds.max(), "n": by_key.size()}
    rows = by_key.median().assign(**extent)
    return rows.join(timed.groupby(keys, dropna=False)[["invalid", *_SHARES]].first())


def _priced(rows: pd.DataFrame, max_kl: float) -> pd.DataFrame:
    """Rows of `runs` with `kl_mean` (null: not measured) and the `verdict` under the
    limit `max_kl`; where no KL was measured the logged verdict stays."""
    kl = kl_means(rows)
    faulty = []
    for config in _configs(rows):
        red = {g["name"] for g in config.get("gates", []) if g["verdict"] == "RED"}
        faulty.append(bool(red - {"max_kl"}))
    verdicts = np.where((kl > max_kl) | np.array(faulty, bool), "RED", "GREEN")
    return rows.assign(kl_mean=kl, verdict=rows["verdict"].mask(kl.notna(), verdicts))


def validated_costs(root: Root = None) -> pd.DataFrame:
    """The newest validation of each bundle and way to run it: `VALIDATED`,
    `worst_update` (largest 1 − cosine of an isolated update), `kl_mean` (nats) and
    `verdict`."""
    every = log.load("runs", root, {"status": "ok"})
    validated = runs.newest(every.dropna(subset=["verdict", "bundle_hash"]), VALIDATED)
    updates = log.load("fidelity", root, {"tensor": "update", "mode": "isolated"})
    finite = updates["finite"].fillna(True).astype(bool)
    cosine = updates["cosine"].where(finite, -math.inf)
    worst = 1 - cosine.groupby(updates["run_id"]).min()
    validated["worst_update"] = validated["run_id"].map(worst)
    validated["kl_mean"] = kl_means(validated)
    return validated[[*VALIDATED, "verdict", "worst_update", "kl_mean"]]


def kl_means(rows: pd.DataFrame) -> pd.Series:
    """The mean KL in nats of rows of `runs`, nan if not measured. It is the run's
    price, or the value of the gate `max_kl` in older rows."""
    means = []
    for config in _configs(rows):
        gates = {gate["name"]: gate["value"] for gate in config.get("gates", [])}
        price = (config.get("price") or {}).get("kl") or {}
        means.append(price.get("mean", gates.get("max_kl")))
    return pd.Series(means, rows.index, float)


def _configs(rows: pd.DataFrame) -> list[dict]:
    return [json.loads(text) for text in rows["config"].fillna("{}")]


def varied_axes(grid: Grid) -> list[str]:
    """The axes of a grid that have several values, by the names of their columns in
    `runs`."""
    axes = grid.export | {"bundle": grid.bundle} | runs.pick(vars(grid.run), *RUN_AXES)
    return [axis for axis, values in axes.items() if len(values) > 1]
