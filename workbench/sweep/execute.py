"""Measures the cells of a grid that the log does not hold yet.

Cells run one after the other in this machine's child processes, or on the workers of a Dask
cluster; either way one process, this one, writes the log, so a sweep that is killed loses at most
the cell it was at.
"""

import json
import random
import secrets
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from workbench import log
from workbench.adopt.decoder import open_folder
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.files import sha256
from workbench.log.machine import machine_name, software_name, with_machines
from workbench.log.store import Root
from workbench.models.checkpoint import Checkpoint
from workbench.paths import adopted
from workbench.runtime import named, resolve
from workbench.sweep import cell, cluster, runs
from workbench.sweep.grid import Cell, Grid, cells, check_sizes


def sweep(
    grid: Grid,
    *,
    root: Root = None,
    bundles: Path | None = None,
    scheduler: str | None = None,
    progress: bool = True,
    measure: str = cell.MEASURE_FUNCTION,
    on_cell: Callable[[], None] = lambda: None,
) -> dict:
    """Measures every cell that the log does not hold yet, in a random order within each round.

    Args:
        root: the log's folder.
        bundles: where bundles are cached (default: data/bundles of the project that the log belongs
            to, or beside a log of its own; on a cluster, of the project that each worker runs in).
        scheduler: address of a Dask scheduler whose `ANE=1` workers measure; default: this machine.
        measure: the function that the child process of a cell calls.
        on_cell: called after each measured cell.

    Returns:
        {cells, done, resumed, failed, invalid, log, reasons}: counts, the log's folder, and why
        cells failed or are invalid; cells that ran on another unit than the named one are done and
        invalid.
    """
    from tqdm.auto import tqdm

    root = Path(root) if root else log.default_root()
    if scheduler is None:
        bundles = bundles or log.project(root) / "data" / "bundles"
    sources = {path: _source(grid, path, root) for path in grid.bundle or [None]}
    check_sizes(grid)
    everything = list(cells(grid))
    random.Random(0).shuffle(everything)
    with _workers(scheduler, measure, grid.checkpoint) as (hosts, results, send):
        try:  # nothing is measured that could not be written
            root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            needed, step = "a folder that can be written", "name another with --log"
            raise InputError(f"log {root}", problem.strerror, needed, step) from None
        finished = done_cells(root, hosts, _auto() if scheduler is None else None)
        missing = [c for c in everything if c.key(_contents(sources[c.bundle])) not in finished]
        missing.sort(key=lambda c: c.round)
        about = {path: send(source) for path, source in sources.items()} if missing else {}
        jobs = [_job(c, grid, about[c.bundle], bundles) for c in missing]
        counts = {"cells": len(everything), "done": 0, "resumed": len(everything) - len(jobs)}
        counts |= {"failed": 0, "invalid": 0, "log": str(root), "reasons": []}
        with tqdm(total=len(jobs), desc="sweep", unit="cell", disable=not progress) as bar:
            for _, files, last in results(jobs):
                run_id = log.adopt(files, root)
                if not last:
                    continue
                row = log.load("runs", root=root, where={"run_id": run_id}).iloc[0]
                status = row["status"]
                counts["done" if status in runs.MEASURED else "failed"] += 1
                counts["invalid"] += status == "invalid"
                reason = f"{status}: {row['reason']}"
                if status != "ok" and reason not in counts["reasons"]:
                    counts["reasons"].append(reason)
                bar.update()
                on_cell()
    return counts


def _source(grid: Grid, bundle: str | None, root: Path) -> dict:
    """Keys of a job that say what its cell starts from, with the paths of this machine: the grid's
    checkpoint, or a finished bundle; `identity` and `bundle` are null without one."""
    subject = "validate_ids of the grid"
    golden = grid.golden and str(cell.find(grid.golden, root).resolve())
    if bundle is None:
        checkpoint = Checkpoint(cell.find(grid.checkpoint, root))
        token_ids(grid.validate_ids, checkpoint.config.vocab_size, subject)
        path, sha256 = str(checkpoint.path.resolve()), checkpoint.sha256
        more = {"bundle": None, "identity": None}
    else:
        opened = open_folder(cell.find(bundle, root))
        token_ids(grid.validate_ids, opened.manifest.dims.V, subject)
        path, sha256 = (opened.manifest.checkpoint[name] for name in ("name", "sha256"))
        more = {"bundle": str(opened.root), "identity": opened.identity}
    return {"checkpoint": path, "checkpoint_hash": sha256, "golden": golden} | more


def _contents(source: dict) -> str:
    """What a cell's key is made of: its bundle's identity, else its checkpoint's hash."""
    return source["identity"] or source["checkpoint_hash"]


def _job(c: Cell, grid: Grid, source: dict, bundles: Path | None) -> dict:
    """A cell as what can travel to another process or, where paths are other ones, to another
    machine."""
    return source | {
        "options": c.options.model_dump(),
        "run": c.run,
        "setting": c.setting(_contents(source)),
        "round": c.round,
        "cell": c.key(_contents(source)),
        "judge_ids": list(c.judge_ids),
        "max_kl": grid.max_kl,
        "experiment": grid.experiment,
        "bundles": bundles and str(bundles),
        "timeout_s": grid.run.timeout_s,
        "attempt": 1,
        "started": None,
        "worker": None,
        "sweep": secrets.token_hex(4),
    }


@contextmanager
def _workers(scheduler: str | None, measure: str, checkpoint: str):
    """((machine, software) of all that measure, function from jobs to results, function that makes
    a source's paths those of whoever measures) here or on a cluster."""
    if scheduler is None:
        here = {_host(log.environment())}
        yield here, lambda jobs: ((job, cell.run_cell(job, measure), True) for job in jobs), dict
        return
    with cluster.connect(scheduler) as workers:
        hosts = set(map(_host, workers.environments()))
        yield (
            hosts,
            lambda jobs: workers.results(jobs, cell.run_cell, cell.failed),
            lambda source: _sent(source, workers, checkpoint),
        )


def _sent(source: dict, workers: cluster.Cluster, checkpoint: str) -> dict:
    """A source with paths that every worker has: finished bundles and goldens are sent, by hash, to
    those that lack them; a checkpoint is on each of them already."""
    paths = {"checkpoint": checkpoint} if source["identity"] is None else {}
    if paths:
        workers.check(cell.lacks, checkpoint)
    for name, folder in (("bundle", "bundles"), ("golden", "golden")):
        if source[name]:
            path = Path(source[name])
            if adopted(path):
                needed, step = "bundles, which are whole folders", "leave --scheduler out"
                raise InputError(f"cluster, {path}", "packages beside a folder", needed, step)
            digest = source["identity"] if name == "bundle" else sha256(path)
            paths[name] = f"data/{folder}/{digest[:16]}/{path.name}"
            workers.send(path, paths[name])
    return source | paths


def _host(environment: dict) -> tuple[str, str]:
    return machine_name(environment), software_name(environment)


def done_cells(
    root: Path, hosts: set[tuple[str, str]] | None = None, auto: str | None = None
) -> set[str]:
    """Keys of the cells that were measured, on one of these machines with its software, in the log
    at `root`. Invalid ones count: they would be so again.

    Args:
        hosts: (`machine_name`, `software_name`) of each; default: this machine.
        auto: the runtime that auto means there (None: any); default: here.
    """
    if hosts is None:
        hosts, auto = {_host(log.environment())}, _auto()
    where = {"status": list(runs.MEASURED), "command": "sweep"}
    rows = with_machines(log.load("runs", root=root, where=where))
    configs = map(json.loads, rows["config"])
    return {
        config["cell"]
        for row, config in zip(rows.itertuples(), configs)
        if (row.machine, row.software) in hosts
        and (not auto or row.runtime == auto or config.get("run", {}).get("runtime") != "auto")
    }


def _auto() -> str:
    """The runtime that auto means in this process, without a fault."""
    return named(resolve())[0]
