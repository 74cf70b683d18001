"""The log's tables of a grid: times of one machine, fidelity of any, and one row per
configuration."""

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

_SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms"]
_SHARES = ["ane_ops_share", "ane_cost_share"]
VALIDATED = ["bundle_hash", *runs.HOW]
"""What fidelity, price and verdict belong to, on any machine."""


def stored_tables(
    grid: Grid, root: Root = None, machine: str | None = None
) -> dict[str, pd.DataFrame]:
    """The log's tables `samples`, `layers` and `fidelity` of a grid with settings joined on, newest
    runs only.

    Times are those of one machine and one setting of everything that the grid does not vary: where
    the log holds the grid with several checkpoints of one name, or on several versions of a system,
    coremltools or torch, those of the newest run. Fidelity is of any machine. The column `invalid`
    of times is the reason why a run was not what its settings say, null for all others.

    Args:
        machine: whose times (see `workbench.log.machine.machine_name`); default: this machine's if
            the log has some, else those of the machine that measured last.

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
    times = [*about, *runs.TIMES, "machine", "software", "os_build", "round", "invalid", *_SHARES]
    tables = {
        name: _join(_rows_of(name, timed, root), timed, times) for name in ("samples", "layers")
    }
    return tables | {"fidelity": _join(fidelity, validated, [*about, *runs.VALUES])}


def _rows_of(table: str, rows: pd.DataFrame, root: Root) -> pd.DataFrame:
    """Rows of a log table that belong to the given rows of `runs`."""
    return log.load(table, root=root, where={"run_id": rows["run_id"].tolist()})


def _join(table: pd.DataFrame, rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """A log table with `columns` of its rows of `runs`; runs that `rows` lacks are left out. A
    column that both have is the run's where the table leaves it open."""
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
    """The experiment's runs of the grid's checkpoint: of its contents, or where it is not at hand,
    of the newest ones of its name."""
    rows = runs.listing(grid.experiment, root, runs.MEASURED)
    root = Path(root or log.default_root())
    if grid.bundle:
        identities = {folder_identity(find(bundle, root)) for bundle in grid.bundle}
        return rows[rows["bundle_hash"].isin(identities)]
    path = find(grid.checkpoint, root)
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

    Columns: ``name`` (its values of the axes that vary, and T), those values, ``machine``,
    ``runtime``, ``tokens_per_s`` and ``call_ms`` (medians over runs of their medians),
    ``slowest`` and ``fastest`` (the runs' range of tok/s), ``call_p90_ms`` (the medians of their
    90th percentiles), ``n`` runs, and of its bundle
    ``worst_cosine`` (of isolated updates, any T), ``kl_mean`` (nats) and ``verdict``: RED where
    another gate than the user's limit is, or the mean KL is above the grid's `max_kl`; ``invalid``
    is the reason where no run is valid; ``ane_ops_share`` and ``ane_cost_share`` are the Neural
    Engine's shares (null: no plan). For `machine` see `stored_tables`.
    """
    tables = stored_tables(grid, root, machine)
    varied = [name for name in varied_axes(grid) if name != "T"]
    about = ["bundle", *runs.HOW]  # what fidelity and verdict belong to
    keys = [*dict.fromkeys([*about, *varied]), "machine", "T"]
    rows = _speeds(tables["samples"], keys)
    fidelity = tables["fidelity"]
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
    columns = ["name", *varied, "T", "machine", "runtime", "bundle", *_SPEEDS]
    columns += ["slowest", "fastest", "n"]
    columns += ["worst_cosine", "kl_mean", "verdict", *_SHARES, "invalid"]
    ranked = rows.sort_values("tokens_per_s", ascending=False)
    ranked = ranked.sort_values("invalid", key=pd.Series.notna, kind="stable", ignore_index=True)
    return ranked[list(dict.fromkeys(columns))]


def _speeds(samples: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The columns of `configurations` that are times, by `keys`. Where a configuration has valid
    runs, its invalid ones are left out."""
    phases = samples["phase"].isin(["call", "tokens_per_s"])
    timed = samples[phases & ~samples["warmup"].fillna(False)]
    valid = timed["invalid"].isna()
    of_key = valid.groupby([timed[key] for key in keys], dropna=False)
    timed = timed[valid | ~of_key.transform("any")]
    of_run = timed.groupby([*keys, "run_id", "phase"], dropna=False)["value"]
    median, p90 = of_run.median().unstack("phase"), of_run.quantile(0.9).unstack("phase")
    by_run = median.reindex(columns=["tokens_per_s", "call"])
    by_run = by_run.assign(p90=p90.reindex(columns=["call"]))
    by_key = by_run.set_axis(_SPEEDS, axis=1).groupby(keys, dropna=False)
    speeds = by_key["tokens_per_s"]
    rows = by_key.median().assign(slowest=speeds.min(), fastest=speeds.max(), n=by_key.size())
    return rows.join(timed.groupby(keys, dropna=False)[["invalid", *_SHARES]].first())


def _priced(rows: pd.DataFrame, max_kl: float) -> pd.DataFrame:
    """Rows of `runs` with `kl_mean` (null: not measured) and the `verdict` that they have under the
    limit `max_kl`."""
    configs, kl, verdicts = _configs(rows), kl_means(rows), []
    for config, mean, logged in zip(configs, kl, rows["verdict"], strict=True):
        others = [g["verdict"] for g in config.get("gates", []) if g["name"] != "max_kl"]
        red = "RED" in others or mean > max_kl
        verdicts.append(logged if math.isnan(mean) else "RED" if red else "GREEN")
    return rows.assign(kl_mean=kl, verdict=verdicts)


def validated_costs(root: Root = None) -> pd.DataFrame:
    """`VALIDATED`, `worst_update` (largest 1 − cosine of an isolated update), `kl_mean` (nats) and
    `verdict`: of each bundle and way to run it those of its newest validation."""
    every = log.load("runs", root=root, where={"status": "ok"})
    every = every[every["verdict"].notna() & every["bundle_hash"].notna()]
    validated = runs.newest(every, VALIDATED)
    fidelity = log.load("fidelity", root=root, where={"tensor": "update", "mode": "isolated"})
    finite = fidelity["finite"].fillna(True).astype(bool)
    worst = 1 - fidelity["cosine"].where(finite, -math.inf).groupby(fidelity["run_id"]).min()
    costs = {"worst_update": validated["run_id"].map(worst), "kl_mean": kl_means(validated)}
    return validated[[*VALIDATED, "verdict"]].assign(**costs)


def kl_means(rows: pd.DataFrame) -> pd.Series:
    """Mean KL in nats that rows of `runs` measured, as their price or, in older ones, as the value
    of the gate `max_kl`; nan where they measured none."""
    means = []
    for config in _configs(rows):
        gates = {gate["name"]: gate["value"] for gate in config.get("gates", [])}
        price = (config.get("price") or {}).get("kl") or {}
        means.append(price.get("mean", gates.get("max_kl")))
    return pd.Series(means, rows.index, float)


def _configs(rows: pd.DataFrame) -> list[dict]:
    return [json.loads(text) if isinstance(text, str) else {} for text in rows["config"]]


def varied_axes(grid: Grid) -> list[str]:
    """The axes of a grid that have several values, by the names of their columns in `runs`."""
    axes = grid.export | {"bundle": grid.bundle} | runs.pick(vars(grid.run), *RUN_AXES)
    return [axis for axis, values in axes.items() if len(values) > 1]
