"""Measures the cells of a grid that the log lacks.

Cells run one after the other in child processes of this machine, or on the workers of a
Dask cluster. This process alone writes the log, a cell's files as soon as the cell
ends, so that a sweep that is killed loses at most the cell that was running."""

import json
import random
import secrets
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
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

    root = Path(root or log.default_root())
    if scheduler is None:
        bundles = bundles or log.project(root) / "data" / "bundles"
    sources = {path: _source(grid, path, root) for path in grid.bundle or [None]}
    check_sizes(grid)
    everything = list(cells(grid))
    random.Random(0).shuffle(everything)
    everything.sort(key=lambda c: c.round)
    with _workers(scheduler, measure, grid.checkpoint) as (machines, results, send):
        _make_folder(root)
        finished = done_cells(root, *machines)
        missing = [
            c for c in everything if c.key(_contents(sources[c.bundle])) not in finished
        ]
        if missing:
            sources = {path: send(source) for path, source in sources.items()}
        jobs = [_job(c, grid, sources[c.bundle], bundles) for c in missing]
        resumed = len(everything) - len(jobs)
        counts = {"cells": len(everything), "done": 0, "resumed": resumed}
        counts |= {"failed": 0, "invalid": 0, "log": str(root), "reasons": []}
        bar = tqdm(total=len(jobs), desc="sweep", unit="cell", disable=not progress)
        with bar:
            for _, files, last in results(jobs):
                run_id = log.adopt(files, root)
                if last:
                    runs_row = log.load("runs", root, {"run_id": run_id}).iloc[0]
                    _count(counts, runs_row)
                    bar.update()
                    on_cell()
    return counts


def _make_folder(root: Path) -> None:
    """Makes the log's folder before anything is measured; refuses one that cannot be
    written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(
            f"log {root}",
            problem.strerror,
            "a folder that can be written",
            "name another with --log",
        ) from None


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
    golden = grid.golden and str(cell.find(grid.golden, root).resolve())
    source = {"golden": golden, "bundle": None, "identity": None}
    if bundle is None:
        checkpoint = Checkpoint(cell.find(grid.checkpoint, root))
        V = checkpoint.config.vocab_size
        source["checkpoint"] = str(checkpoint.path.resolve())
        source["checkpoint_hash"] = checkpoint.sha256
    else:
        opened = open_folder(cell.find(bundle, root))
        V = opened.manifest.dims.V
        source["checkpoint"] = opened.manifest.checkpoint["name"]
        source["checkpoint_hash"] = opened.manifest.checkpoint["sha256"]
        source |= {"bundle": str(opened.root), "identity": opened.identity}
    token_ids(grid.validate_ids, V, "validate_ids of the grid")
    return source


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
        `hosts` and `auto` of `done_cells`; a function from jobs to `Cluster.results`; a
        function that replaces a source's paths by those of the measuring machine.
    """
    if scheduler is None:

        def results(jobs: list[dict]):
            return ((job, cell.run_cell(job, measure), True) for job in jobs)

        yield _this_machine(), results, dict
        return
    with cluster.connect(scheduler) as workers:
        hosts = set(map(_host, workers.environments()))

        def results(jobs: list[dict]):
            return workers.results(jobs, cell.run_cell, cell.failed)

        send = partial(_sent, workers=workers, checkpoint=checkpoint)
        yield (hosts, None), results, send


def _sent(source: dict, workers: cluster.Cluster, checkpoint: str) -> dict:
    """A source with paths that exist on every worker.

    Bundles and goldens are sent to the workers that lack them, into folders named by
    their hash; a checkpoint must be on each worker already."""
    paths = {}
    if source["identity"] is None:
        paths["checkpoint"] = checkpoint
        workers.check(cell.lacks, checkpoint)
    for name, folder in (("bundle", "bundles"), ("golden", "golden")):
        if source[name]:
            path = Path(source[name])
            if adopted(path):
                raise InputError(
                    f"cluster, {path}",
                    "packages beside a folder",
                    "bundles, which are whole folders",
                    "leave --scheduler out",
                )
            digest = source["identity"]
            if name == "golden":
                digest = sha256(path)
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
        hosts, auto = _this_machine()
    where = {"status": list(runs.MEASURED), "command": "sweep"}
    rows = with_machines(log.load("runs", root, where))
    keys = set()
    for row, config in zip(rows.itertuples(), map(json.loads, rows["config"])):
        was_auto = config.get("run", {}).get("runtime") == "auto"
        other_runtime = auto and was_auto and row.runtime != auto
        if (row.machine, row.software) in hosts and not other_runtime:
            keys.add(config["cell"])
    return keys


def _this_machine() -> tuple[set[tuple[str, str]], str]:
    """`hosts` and `auto` of `done_cells` for this process; `auto` has no fault."""
    return {_host(log.environment())}, named(resolve())[0]
