"""The cross product of export and run options: every cell measured once a round and logged, what the log holds left out.

Cells run one after the other in this machine's child processes, or on the workers of a Dask cluster; either way one
process, this one, writes the log, so a sweep that is killed loses at most the cell it was at.
"""

import hashlib
import itertools
import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench import export as exporting
from workbench import log
from workbench.bundle import Options
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.log import machines
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import cell as cell_
from workbench.sweep import cluster, runs
from workbench.sweep.cell import bundle_for

Several = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
Depths = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


RUN_AXES = ("runtime", "precision", "fast", "compute_units", "hints", "T", "depth")
"""The lists of `Run`."""


class Hints(BaseModel):
    """Core ML's optimization hints, by its own names."""

    model_config = ConfigDict(extra="forbid")
    reshapeFrequency: Literal["Frequent", "Infrequent"] | None = None
    specializationStrategy: Literal["Default", "FastPrediction"] | None = None
    allowLowPrecisionAccumulationOnGPU: bool | None = None


class Run(BaseModel):
    """How each bundle is run; every list is an axis. `repetitions` are sequences within one process, `rounds` are
    processes: each round measures every cell once, in an order of its own, `cool_down_s` seconds apart."""

    model_config = ConfigDict(extra="forbid")
    T: Several = [1]
    depth: Depths = [0]
    n_gen: int = Field(16, ge=1)
    repetitions: int = Field(3, ge=1)
    rounds: int = Field(1, ge=1)
    cool_down_s: float = Field(0, ge=0)
    threads: int = Field(1, ge=1)
    timeout_s: float = Field(3600, gt=0)
    runtime: Annotated[list[Literal["auto", "portable", "coreml"]], Field(min_length=1)] = ["auto"]
    precision: Annotated[list[Literal["declared", "exact", "narrow"]], Field(min_length=1)] = ["declared"]
    fast: Annotated[list[bool], Field(min_length=1)] = [True]
    compute_units: Annotated[list[Literal["CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL"]], Field(min_length=1)] = ["CPU_AND_NE"]
    hints: Annotated[list[Hints], Field(min_length=1)] = [Hints()]


class Grid(BaseModel):
    """A sweep: `checkpoint`, lists of export options, run options, and the prompt each bundle is validated on, if any."""

    model_config = ConfigDict(extra="forbid")
    checkpoint: str
    export: dict[str, Annotated[list, Field(min_length=1)]] = {}
    run: Run = Run()
    validate_ids: list[int] = []
    experiment: str = Field("sweep", pattern=r"^\w[\w-]*$")


@dataclass(frozen=True)
class Cell:
    """One bundle, one way to run it, one round; `judge_ids` where this is the cell that also judges its bundle."""

    checkpoint: str
    options: Options
    run: dict
    round: int
    judge_ids: tuple[int, ...]

    def setting(self, checkpoint_hash: str) -> str:
        """What rounds repeat: checkpoint contents, export options, run options."""
        return _hash([checkpoint_hash, self.options.model_dump(), self.run])

    def key(self, checkpoint_hash: str) -> str:
        """Identity of the cell: its setting, its round, and what it is judged on."""
        judged = f"-{_hash(list(self.judge_ids))[:6]}" if self.judge_ids else ""
        return f"{self.setting(checkpoint_hash)}-{self.round}{judged}"

    def columns(self, auto: str) -> dict:
        """Columns of `runs` that a run of this cell has (see `runs.TIMES`), where `auto` is the runtime that auto means."""
        runtime = auto if self.run["runtime"] == "auto" else self.run["runtime"]
        how = {name: self.run[name] for name in ("precision", "fast", "compute_units", "hints")}
        counts = {name: self.run[name] for name in ("threads", "T", "depth", "n_gen")}
        return runs.exported(self.options) | runs.executed(runtime, **how) | counts


def _hash(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load_grid(path: str | Path) -> Grid:
    """Reads a grid; unknown keys and values are refused before anything runs."""
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as problem:  # ValueError: not UTF-8, or a date that is none
        raise InputError(f"grid {path}", type(problem).__name__, "a YAML file", "see README: sweeps") from None
    return make_grid(found, f"grid {path}")


def make_grid(found: dict, subject: str = "grid") -> Grid:
    """A grid from a mapping, every export option and value checked."""
    try:
        grid = Grid.model_validate(found)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the grid"
        raise InputError(subject, f"{where}: {first.get('input')!r}", first["msg"], "see README: sweeps") from None
    if unknown := sorted(grid.export.keys() - Options.model_fields.keys()):
        raise InputError(subject, f"export options {', '.join(unknown)}", ", ".join(Options.model_fields), "correct the key")
    for _ in cells(grid):
        pass
    return grid


def cells(grid: Grid) -> Iterator[Cell]:
    """The cross product, round by round. The first way to run each bundle and runtime also judges it, once."""
    run, axes = grid.run, RUN_AXES
    common = {name: getattr(run, name) for name in ("n_gen", "repetitions", "cool_down_s", "threads")}
    for round_ in range(run.rounds):
        for values in itertools.product(*grid.export.values()):
            options = exporting.options(**dict(zip(grid.export, values, strict=True)))
            for chosen in itertools.product(*(getattr(run, axis) for axis in axes)):
                how = dict(zip(axes, chosen, strict=True)) | common
                how["hints"] = how["hints"].model_dump(exclude_none=True)
                judges = round_ == 0 and (how["T"], how["depth"]) == (min(run.T), min(run.depth))
                yield Cell(grid.checkpoint, options, how, round_, tuple(grid.validate_ids) if judges else ())


def sweep(grid: Grid, *, root: str | Path | None = None, bundles: Path | None = None, scheduler: str | None = None,
          progress: bool = True, measure: str = cell_.MEASURE_FUNCTION, seed: int = 0) -> dict:  # fmt: skip
    """Measures every cell that the log does not hold yet, in a random order within each round.

    Args:
        root: the log's folder.
        bundles: where bundles are cached (default: data/bundles of the project that the log belongs to, or beside a log of
            its own; on a cluster, of the project that each worker runs in).
        scheduler: address of a Dask scheduler (tcp://host:port) whose `ANE=1` workers measure; default: this machine.
        measure: the function that the child process of a cell calls.

    Returns:
        {cells, done, resumed, failed, log}: counts, and the log's folder.
    """
    from tqdm.auto import tqdm

    root = Path(root) if root else log.default_root()
    if scheduler is None:
        bundles = bundles or log.project(root) / "data" / "bundles"
    checkpoint = Checkpoint(cell_.find(grid.checkpoint, root))
    token_ids(grid.validate_ids, checkpoint.config.vocab_size, "validate_ids of the grid")
    everything = list(cells(grid))
    random.Random(seed).shuffle(everything)
    with _workers(scheduler, measure) as (hosts, results):
        _check_root(root)
        finished = done_cells(root, hosts)
        todo = sorted((c for c in everything if c.key(checkpoint.sha256) not in finished), key=lambda c: c.round)
        jobs = [_job(c, grid, checkpoint, bundles, here=scheduler is None) for c in todo]
        counts = {"cells": len(everything), "done": 0, "resumed": len(everything) - len(todo), "failed": 0, "log": str(root)}
        with tqdm(total=len(jobs), desc="sweep", unit="cell", disable=not progress) as bar:
            for _, files, last in results(jobs):
                run_id = log.adopt(files, root)
                ended = log.load("runs", root=root, where={"run_id": run_id})["status"].iloc[0]
                counts["done" if ended == "ok" else "failed"] += last
                bar.update(last)
    return counts


def _check_root(root: Path) -> None:
    """Makes the log's folder, so that nothing is measured which could not be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"log {root}", problem.strerror, "a folder that can be written", "name another with --log") from None


def _job(cell: Cell, grid: Grid, checkpoint: Checkpoint, bundles: Path | None, here: bool) -> dict:
    """A cell as what can travel to another process or, where paths are other ones, to another machine."""
    sha256, path = checkpoint.sha256, str(checkpoint.path.resolve()) if here else cell.checkpoint
    return {"checkpoint": path, "checkpoint_hash": sha256, "options": cell.options.model_dump(), "run": cell.run,
            "setting": cell.setting(sha256), "round": cell.round, "cell": cell.key(sha256),
            "judge_ids": list(cell.judge_ids), "experiment": grid.experiment, "bundles": str(bundles) if bundles else None,
            "timeout_s": grid.run.timeout_s, "attempt": 1, "started": None, "worker": None,
            "sweep": secrets.token_hex(4)}  # fmt: skip


@contextmanager
def _workers(scheduler: str | None, measure: str):
    """((machine, software) of all that measure, function from jobs to results) here or on a cluster."""
    if scheduler is None:
        yield {_host(log.environment())}, lambda jobs: ((job, cell_.run_cell(job, measure), True) for job in jobs)
        return
    with cluster.connect(scheduler) as found:
        hosts = {_host(environment) for environment in found.environments()}
        yield hosts, lambda jobs: found.results(jobs, cell_.run_cell, cell_.failed)


def _host(environment: dict) -> tuple[str, str]:
    return machines.name(environment), machines.software(environment)


def done_cells(root: Path, hosts: set[tuple[str, str]] | None = None) -> set[str]:
    """Keys of the cells that ended well in the log at `root`, on one of these machines with its software.

    Args:
        hosts: (`machines.name`, `machines.software`) of each; default: this machine.
    """
    hosts = hosts or {_host(log.environment())}
    found = machines.with_names(log.load("runs", root=root, where={"status": "ok", "command": "sweep"}))
    rows = found[["machine", "software", "config"]].itertuples(index=False)
    return {json.loads(config)["cell"] for machine, software, config in rows if (machine, software) in hosts}


def stored_tables(grid: Grid, root: str | Path | None = None, machine: str | None = None) -> dict[str, pd.DataFrame]:
    """What the log holds of a grid: tables `samples`, `layers` and `fidelity` with settings joined on, newest runs only.

    Times are those of one machine and one setting of everything that the grid does not vary: where the log holds the grid
    with several checkpoints of one name, or on several versions of a system, coremltools or torch, those of the newest run.
    Fidelity is whichever machine judged it.

    Args:
        machine: whose times (see `workbench.log.machines.name`); default: this machine's if the log has some, else those of the
            machine that measured last.

    Raises:
        InputError: no run of the grid is of `machine`.
    """
    every, timed = _of_checkpoint(grid, root), _timed(grid, root)
    timed = runs.like_newest(machines.choose(timed, machine, runs.here()), "software")
    device = every if timed.empty else timed
    auto = "coreml" if device["runtime"].eq("coreml").any() else "portable"
    wanted = [cell.columns(auto) for cell in cells(grid)]
    timed = runs.newest(runs.fitting(timed, wanted, runs.TIMES), [*runs.TIMES, "round"])
    judged = runs.fitting(every, wanted, runs.VALUES)
    fidelity = log.load("fidelity", root=root, where={"run_id": judged["run_id"].tolist()})
    judged = runs.newest(judged[judged["run_id"].isin(fidelity["run_id"])], runs.VALUES)
    about = ["family", "checkpoint", "checkpoint_hash", "bundle"]
    times = [*about, *runs.TIMES, "machine", "software", "os_build", "round"]
    return {name: runs.table(name, timed, times, root) for name in ("samples", "layers")} | {
        "fidelity": fidelity.merge(judged[["run_id", *about, *(c for c in runs.VALUES if c not in fidelity)]], on="run_id")}


def offered_machines(grid: Grid, root: str | Path | None = None) -> list[str]:
    """The machines on which the log holds times of a grid, the one of the newest run first."""
    return machines.names(_timed(grid, root))


def _timed(grid: Grid, root: str | Path | None) -> pd.DataFrame:
    """The sweeps' runs of a grid's cells, on any machine and whichever runtime auto means there."""
    rows = _of_checkpoint(grid, root)
    wanted = (cell.columns(runtime) for cell in cells(grid) for runtime in runs.RUNTIMES)
    return runs.fitting(rows[rows["round"].notna()], wanted, runs.TIMES)


def _of_checkpoint(grid: Grid, root: str | Path | None) -> pd.DataFrame:
    """The experiment's runs of the grid's checkpoint: of its contents, or where it is not at hand, of the newest ones of its
    name."""
    rows = runs.listing(grid.experiment, root)
    path = cell_.find(grid.checkpoint, Path(root) if root else log.default_root())
    if path.is_dir():
        return rows[rows["checkpoint_hash"] == _contents(Checkpoint(path))]
    return runs.like_newest(rows[rows["checkpoint"] == path.name], "checkpoint_hash")


_HASHES: dict[tuple, str] = {}


def _contents(checkpoint: Checkpoint) -> str:
    """The checkpoint's hash, taken once for files of the same sizes and times."""
    found = sorted(path for path in checkpoint.path.iterdir() if path.is_file())
    key = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found)
    if key not in _HASHES:
        _HASHES[key] = checkpoint.sha256
    return _HASHES[key]


def configurations(grid: Grid, root: str | Path | None = None, machine: str | None = None) -> pd.DataFrame:
    """One row per bundle, way to run it and T of a grid that the log holds on one machine, fastest first.

    Columns: ``name`` (its values of the axes that vary, and T), those values, ``machine``, ``runtime``, ``tokens_per_s`` and
    ``call_ms`` (medians over runs of their medians), ``n`` runs, and of its bundle ``worst_cosine`` (of isolated updates, any
    T) and ``verdict``. For `machine` see `stored`.
    """
    found = stored_tables(grid, root, machine)
    samples, fidelity = found["samples"], found["fidelity"]
    varied = [name for name in varied_axes(grid) if name != "T"]
    value = ["bundle", "runtime", "precision", "compute_units", "hints"]  # what fidelity and verdict belong to
    shown = [*value, *(name for name in varied if name not in value), "machine", "T"]
    timed = samples[~samples["warmup"].fillna(False) & samples["phase"].isin(["call", "tokens_per_s"])]
    by_run = timed.groupby([*shown, "run_id", "phase"], dropna=False)["value"].median().unstack("phase").reset_index()
    by_run = by_run.reindex(columns=[*shown, "run_id", "tokens_per_s", "call"])
    rows = by_run.groupby(shown, dropna=False).agg(
        tokens_per_s=("tokens_per_s", "median"), call_ms=("call", "median"), n=("call", "size")).reset_index()  # fmt: skip
    updates = fidelity[(fidelity["mode"] == "isolated") & (fidelity["tensor"] == "update")]
    worst = updates.groupby(value, dropna=False, as_index=False)["cosine"].min()
    every = log.load("runs", root=root)
    judged = runs.newest(every[every["verdict"].notna()], value)
    for column, answers, name in (("worst_cosine", worst, "cosine"), ("verdict", judged, "verdict")):
        known = dict(zip(runs.values(answers, value), answers[name]))
        rows[column] = [known.get(key) for key in runs.values(rows, value)]
    rows["verdict"] = rows["verdict"].fillna("not_run")
    rows["worst_cosine"] = rows["worst_cosine"].astype(float)
    rows["name"] = [", ".join(f"{n} {row[n]}" for n in [*varied, "T"]) for row in rows.to_dict("records")]
    columns = ["name", *varied, "T", "machine", "runtime", "bundle", "tokens_per_s", "call_ms", "n", "worst_cosine", "verdict"]
    return rows.sort_values("tokens_per_s", ascending=False, ignore_index=True)[list(dict.fromkeys(columns))]


def varied_axes(grid: Grid) -> list[str]:
    """The axes of a grid that have several values, by the names of their columns in `runs`."""
    run = {axis: getattr(grid.run, axis) for axis in RUN_AXES}
    return [axis for axis, values in (grid.export | run).items() if len(values) > 1]


__all__ = ["Grid", "bundle_for", "cells", "configurations", "done_cells", "load_grid", "make_grid", "offered_machines", "stored_tables",
           "sweep", "varied_axes"]  # fmt: skip
