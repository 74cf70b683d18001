"""The log's tables of a grid: times of one machine, fidelity of any, and one row per configuration."""

import json
import math
from functools import cache
from pathlib import Path

import pandas as pd

from workbench import log
from workbench.adopt.decoder import folder_identity
from workbench.log.machine import machine_names, of_machine
from workbench.log.store import Root
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import runs
from workbench.sweep.cell import find
from workbench.sweep.grid import RUN_AXES, Grid, cells


def stored_tables(
    grid: Grid, root: Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid with settings joined on, newest runs only.

    Times are those of one machine and one setting of everything that the grid does not vary: where the log holds the grid
    with several checkpoints of one name, or on several versions of a system, coremltools or torch, those of the newest run.
    Fidelity is of any machine. The column `invalid` of times is the reason why a run was not what
    its settings say, null for all others.

    Args:
        machine: whose times (see `workbench.log.machine.machine_name`); default: this machine's if the log has some, else
            those of the machine that measured last.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    measured, timed = _of_checkpoint(grid, root), _timed_runs(grid, root)
    of_checkpoint = measured[measured["status"] == "ok"]
    timed = runs.like_newest(of_machine(timed, machine, runs.here()), "software")
    logged = set((of_checkpoint if timed.empty else timed)["runtime"])
    auto = next((name for name in runs.RUNTIMES if name in logged), "portable")
    settings = [cell.columns(auto) for cell in cells(grid)]
    timed = runs.newest(runs.fitting(timed, settings, runs.TIMES), [*runs.TIMES, "round"])
    validated = runs.fitting(of_checkpoint, settings, runs.VALUES)
    fidelity = _rows_of("fidelity", validated, root)
    validated = runs.newest(validated[validated["run_id"].isin(fidelity["run_id"])], runs.VALUES)
    about = ["family", "checkpoint", "checkpoint_hash", "bundle"]
    timed = timed.assign(invalid=timed["reason"].where(timed["status"] == "invalid"))
    times = [*about, *runs.TIMES, "machine", "software", "os_build", "round", "invalid"]
    times += ["ane_ops_share", "ane_cost_share"]
    tables = {
        name: _join(_rows_of(name, timed, root), timed, times) for name in ("samples", "layers")
    }
    return tables | {"fidelity": _join(fidelity, validated, [*about, *runs.VALUES])}


def _rows_of(table: str, rows: pd.DataFrame, root: Root) -> pd.DataFrame:
    """Rows of a log table that belong to the given rows of `runs`."""
    return log.load(table, root=root, where={"run_id": rows["run_id"].tolist()})


def _join(table: pd.DataFrame, rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """A log table with `columns` of its rows of `runs`; runs that `rows` lacks are left out. A column
    that both have is the run's where the table leaves it open."""
    for name in (column for column in columns if column in table):
        of_run = table["run_id"].map(rows.set_index("run_id")[name])
        table = table.assign(**{name: table[name].fillna(of_run)})
    return table.merge(rows[["run_id", *(c for c in columns if c not in table)]], on="run_id")


def offered_machines(grid: Grid, root: Root = None) -> list[str]:
    """The machines on which the log holds times of a grid, the one of the newest run first."""
    return machine_names(_timed_runs(grid, root))


def _timed_runs(grid: Grid, root: Root) -> pd.DataFrame:
    """The sweeps' runs of a grid's cells, on any machine and whichever runtime auto means there."""
    rows = _of_checkpoint(grid, root)
    settings = (cell.columns(runtime) for cell in cells(grid) for runtime in runs.RUNTIMES)
    return runs.fitting(rows[rows["round"].notna()], settings, runs.TIMES)


def _of_checkpoint(grid: Grid, root: Root) -> pd.DataFrame:
    """The experiment's runs of the grid's checkpoint: of its contents, or where it is not at hand, of the newest ones of its
    name."""
    rows = runs.listing(grid.experiment, root, runs.MEASURED)
    if grid.bundle:
        found = (find(bundle, Path(root or log.default_root())) for bundle in grid.bundle)
        return rows[rows["bundle_hash"].isin(map(folder_identity, found))]
    path = find(grid.checkpoint, Path(root) if root else log.default_root())
    if not path.is_dir():
        return runs.like_newest(rows[rows["checkpoint"] == path.name], "checkpoint_hash")
    stats = [(file, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
    files = tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    return rows[rows["checkpoint_hash"] == _sha256(path, files)]


@cache
def _sha256(path: Path, files: tuple) -> str:
    """The checkpoint's hash, taken once for files of the same sizes and times."""
    return Checkpoint(path).sha256


def configurations(grid: Grid, root: Root = None, machine: str | None = None) -> pd.DataFrame:
    """One row per bundle, way to run it and T of a grid that the log holds on one machine, fastest
    first, those that only invalid runs measured last.

    Columns: ``name`` (its values of the axes that vary, and T), those values, ``machine``, ``runtime``, ``tokens_per_s`` and
    ``call_ms`` (medians over runs of their medians), ``call_p90_ms`` (the same of their 90th percentiles), ``n`` runs, and of its bundle ``worst_cosine`` (of isolated updates, any
    T), ``kl_mean`` (nats) and ``verdict``: RED where another gate than the user's limit is, or the mean KL is above the
    grid's `max_kl`; ``invalid`` is the reason where no run is valid; ``ane_ops_share`` and ``ane_cost_share`` are the
    Neural Engine's shares (null: no plan). For `machine` see `stored_tables`.
    """
    tables = stored_tables(grid, root, machine)
    samples, fidelity = tables["samples"], tables["fidelity"]
    varied = [name for name in varied_axes(grid) if name != "T"]
    about = ["bundle", *runs.HOW]  # what fidelity and verdict belong to
    keys = [*dict.fromkeys([*about, *varied]), "machine", "T"]
    timed = samples[
        ~samples["warmup"].fillna(False) & samples["phase"].isin(["call", "tokens_per_s"])
    ]
    valid = timed["invalid"].isna()
    timed = timed[
        valid | ~valid.groupby([timed[key] for key in keys], dropna=False).transform("any")
    ]
    of_run = timed.groupby([*keys, "run_id", "phase"], dropna=False)["value"]
    by_run = of_run.median().unstack("phase").reindex(columns=["tokens_per_s", "call"])
    p90 = of_run.quantile(0.9).unstack("phase").reindex(columns=["call"])
    rows = by_run.assign(p90=p90["call"]).groupby(keys, dropna=False)
    rows = rows.agg(
        tokens_per_s=("tokens_per_s", "median"),
        call_ms=("call", "median"),
        call_p90_ms=("p90", "median"),
        n=("call", "size"),
    )
    shares = timed.groupby(keys, dropna=False)[["invalid", "ane_ops_share", "ane_cost_share"]]
    rows = rows.join(shares.first())
    updates = fidelity[(fidelity["mode"] == "isolated") & (fidelity["tensor"] == "update")]
    worst = updates.groupby(about, dropna=False, as_index=False).agg(worst_cosine=("cosine", "min"))
    every = log.load("runs", root=root, where={"status": "ok"})
    validated = _priced(runs.newest(every[every["verdict"].notna()], about), grid.max_kl)
    validated = validated[[*about, "kl_mean", "verdict"]]
    rows = rows.reset_index().merge(worst, "left", about).merge(validated, "left", about)
    rows["verdict"] = rows["verdict"].astype(object).fillna("not_run")
    rows["name"] = [
        ", ".join(f"{n} {'none' if pd.isna(row[n]) else row[n]}" for n in [*varied, "T"])
        for row in rows.to_dict("records")
    ]
    columns = [
        "name",
        *varied,
        "T",
        "machine",
        "runtime",
        "bundle",
        "tokens_per_s",
        "call_ms",
        "call_p90_ms",
        "n",
        "worst_cosine",
        "kl_mean",
        "verdict",
        "ane_ops_share",
        "ane_cost_share",
        "invalid",
    ]
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable", ignore_index=True)
    return ranked[list(dict.fromkeys(columns))]


def _priced(rows: pd.DataFrame, max_kl: float) -> pd.DataFrame:
    """Rows of `runs` with `kl_mean` (null: not measured) and the `verdict` that they have under the limit `max_kl`."""
    configs, kl, verdicts = _configs(rows), kl_means(rows), []
    for config, mean, logged in zip(configs, kl, rows["verdict"], strict=True):
        others = [g["verdict"] for g in config.get("gates", []) if g["name"] != "max_kl"]
        red = "RED" in others or mean > max_kl
        verdicts.append(logged if math.isnan(mean) else "RED" if red else "GREEN")
    return rows.assign(kl_mean=kl, verdict=verdicts)


def kl_means(rows: pd.DataFrame) -> list[float]:
    """Mean KL in nats of the price that rows of `runs` measured; nan where they measured none."""
    prices = [config.get("price") or {} for config in _configs(rows)]
    return [float((price.get("kl") or {}).get("mean", "nan")) for price in prices]


def _configs(rows: pd.DataFrame) -> list[dict]:
    return [json.loads(text) if isinstance(text, str) else {} for text in rows["config"]]


def varied_axes(grid: Grid) -> list[str]:
    """The axes of a grid that have several values, by the names of their columns in `runs`."""
    axes = (
        grid.export | {"bundle": grid.bundle} | {axis: getattr(grid.run, axis) for axis in RUN_AXES}
    )
    return [axis for axis, values in axes.items() if len(values) > 1]
