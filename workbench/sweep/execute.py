"""Measures the cells of a grid that the log lacks.

Cells run one after the other in child processes of this machine, or on the workers of a
Dask cluster. This process alone writes the log, a cell's files as soon as the cell
ends, so that a sweep that is killed loses at most the cell that was running."""

import json
import random
import secrets
from collections.abc import Callable, Mapping
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
    """Measures every cell that the log lacks, in a random order within each round.

    Args:
        root: the log's folder.
        bundles: the cache of bundles; default: data/bundles of the log's project, or
            beside a log outside a project; on a cluster, of the project that each
            worker runs in.
        scheduler: address of a Dask scheduler whose `ANE=1` workers measure; default:
            this machine.
        measure: the function that the child process of a cell calls.
        on_cell: called after each measured cell.

    Returns:
        {cells, done, resumed, failed, invalid, log, reasons}: counts, the log's folder,
        and the reasons of failed and invalid cells. A cell that ran on another unit
        than the named one counts as done and as invalid.
    """
    from tqdm.auto import tqdm

    root = Path(root) if root else log.default_root()
    if scheduler is None:
        bundles = bundles or log.project(root) / "data" / "bundles"
    sources = {}
    for path in grid.bundle or [None]:
        sources[path] = _source(grid, path, root)
    check_sizes(grid)
    everything = list(cells(grid))
    random.Random(0).shuffle(everything)
    with _workers(scheduler, measure, grid.checkpoint) as (hosts, results, send):
        _make_folder(root)
        finished = done_cells(root, hosts, _auto() if scheduler is None else None)
        missing = [
            c for c in everything if c.key(_contents(sources[c.bundle])) not in finished
        ]
        missing.sort(key=lambda c: c.round)
        if missing:
            sources = {path: send(source) for path, source in sources.items()}
        jobs = [_job(c, grid, sources[c.bundle], bundles) for c in missing]
        counts = {
            "cells": len(everything),
            "done": 0,
            "resumed": len(everything) - len(jobs),
        }
        counts |= {"failed": 0, "invalid": 0, "log": str(root), "reasons": []}
        with tqdm(
            total=len(jobs), desc="sweep", unit="cell", disable=not progress
        ) as bar:
            for _, files, last in results(jobs):
                run_id = log.adopt(files, root)
                if last:
                    _count(
                        counts,
                        log.load("runs", root=root, where={"run_id": run_id}).iloc[0],
                    )
                    bar.update()
                    on_cell()
    return counts


def _make_folder(root: Path) -> None:
    """Makes the log's folder before anything is measured; refuses one that cannot be
    written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        needed = "a folder that can be written"
        step = "name another with --log"
        raise InputError(f"log {root}", problem.strerror, needed, step) from None


def _count(counts: dict, row: Mapping) -> None:
    """Adds a finished cell, a row of `runs`, to the counts of the sweep."""
    status = row["status"]
    counts["done" if status in runs.MEASURED else "failed"] += 1
    counts["invalid"] += status == "invalid"
    reason = f"{status}: {row['reason']}"
    if status != "ok" and reason not in counts["reasons"]:
        counts["reasons"].append(reason)


def _source(grid: Grid, bundle: str | None, root: Path) -> dict:
    """Keys of a job for the grid's checkpoint or for a finished bundle, with this
    machine's paths.

    `identity` and `bundle` are null where the bundle is still to be exported.
    """
    subject = "validate_ids of the grid"
    golden = grid.golden and str(cell.find(grid.golden, root).resolve())
    if bundle is None:
        checkpoint = Checkpoint(cell.find(grid.checkpoint, root))
        token_ids(grid.validate_ids, checkpoint.config.vocab_size, subject)
        path = str(checkpoint.path.resolve())
        sha256 = checkpoint.sha256
        more = {"bundle": None, "identity": None}
    else:
        opened = open_folder(cell.find(bundle, root))
        token_ids(grid.validate_ids, opened.manifest.dims.V, subject)
        path, sha256 = (opened.manifest.checkpoint[name] for name in ("name", "sha256"))
        more = {"bundle": str(opened.root), "identity": opened.identity}
    return {"checkpoint": path, "checkpoint_hash": sha256, "golden": golden} | more


def _contents(source: dict) -> str:
    """The hash in a cell's key: its bundle's identity, else its checkpoint's hash."""
    return source["identity"] or source["checkpoint_hash"]


def _job(c: Cell, grid: Grid, source: dict, bundles: Path | None) -> dict:
    """A cell as JSON values for the process, here or on another machine, that measures
    it."""
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
    """The processes that measure, here or on a cluster.

    Yields:
        (machine, software) of each; a function from jobs to `Cluster.results`; a
        function that replaces a source's paths by those of the measuring machine.
    """
    if scheduler is None:
        here = {_host(log.environment())}
        yield (
            here,
            lambda jobs: ((job, cell.run_cell(job, measure), True) for job in jobs),
            dict,
        )
        return
    with cluster.connect(scheduler) as workers:
        hosts = set(map(_host, workers.environments()))

        def results(jobs: list[dict]):
            return workers.results(jobs, cell.run_cell, cell.failed)

        yield hosts, results, lambda source: _sent(source, workers, checkpoint)


def _sent(source: dict, workers: cluster.Cluster, checkpoint: str) -> dict:
    """A source with paths that exist on every worker.

    Bundles and goldens are sent to the workers that lack them, into folders named by
    their hash; a checkpoint must be on each worker already."""
    if source["identity"] is None:
        paths = {"checkpoint": checkpoint}
    else:
        paths = {}
    if paths:
        workers.check(cell.lacks, checkpoint)
    for name, folder in (("bundle", "bundles"), ("golden", "golden")):
        if source[name]:
            path = Path(source[name])
            if adopted(path):
                needed = "bundles, which are whole folders"
                step = "leave --scheduler out"
                raise InputError(
                    f"cluster, {path}", "packages beside a folder", needed, step
                )
            digest = source["identity"] if name == "bundle" else sha256(path)
            paths[name] = f"data/{folder}/{digest[:16]}/{path.name}"
            workers.send(path, paths[name])
    return source | paths


def _host(environment: dict) -> tuple[str, str]:
    return machine_name(environment), software_name(environment)


def done_cells(
    root: Path, hosts: set[tuple[str, str]] | None = None, auto: str | None = None
) -> set[str]:
    """Keys of the cells that the log at `root` holds, measured on one of these machines
    with its software. Invalid ones count, since they would be invalid again.

    Args:
        hosts: (`machine_name`, `software_name`) of each; default: this machine.
        auto: the runtime that auto means there (None: any); default: here.
    """
    if hosts is None:
        hosts, auto = {_host(log.environment())}, _auto()
    where = {"status": list(runs.MEASURED), "command": "sweep"}
    rows = with_machines(log.load("runs", root=root, where=where))
    keys = set()
    for row, config in zip(rows.itertuples(), map(json.loads, rows["config"])):
        was_auto = config.get("run", {}).get("runtime") == "auto"
        other_runtime = auto and was_auto and row.runtime != auto
        if (row.machine, row.software) in hosts and not other_runtime:
            keys.add(config["cell"])
    return keys


def _auto() -> str:
    """The runtime that auto means in this process, without its fault."""
    return named(resolve())[0]
