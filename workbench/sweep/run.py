"""Measures the cells of a grid that the log lacks.

A cell is exported, if its bundle is missing, measured and, on a device, planned, each in
a process of its own, one cell after the other on this machine or on the workers of a
Dask cluster. The row of `runs` is written last, so that a sweep that is killed loses at
most the cell that was running."""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from workbench import exporter, log, process
from workbench.ane.work import call_work
from workbench.bundle import Bundle
from workbench.check.gates import jsonable
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, stage
from workbench.runtime import is_device
from workbench.sweep import cluster, energy, identity, timing
from workbench.sweep.grid import RUN_AXES, Cell, Grid, cells, check_cells, find
from workbench.sweep.lock import measuring_alone

MEASURED = ("ok", "invalid")
"""Statuses of runs with samples; an invalid run did not run as its settings say."""
HERE = (None,)
"""What auto means here, for `Cell.columns`."""


def sweep(
    grid: Grid,
    *,
    root: log.Root = None,
    bundles: Path | None = None,
    scheduler: str | None = None,
    part: tuple[int, int] = (1, 1),
    progress: str = "sweep",
) -> dict:
    """Measures every cell that the log lacks, in a random order within each round.

    Args:
        root: the log's folder.
        bundles: the cache of bundles; default: data/bundles of the log's project, or
            beside a log outside a project.
        scheduler: address of a Dask scheduler whose `ANE=1` workers measure and write
            the log; every path is one that they have, too. Default: this machine.
        part: (i, n): only every n-th cell, from the i-th on, so that n machines
            measure a grid without a scheduler.
        progress: the name of the bar.

    Returns:
        {cells, done, resumed, failed, invalid, log, reasons, settings}: counts, the
        log's folder, the reasons of failed and invalid cells, and the set of the cells'
        `setting`, with a scheduler for whatever auto may mean. `resumed` are cells that
        needed no run: logged before, or equal to another one; a cell that a worker,
        or this process after it waited for another one, finds in the log is done. A
        cell that ran on another unit than the named one counts as done and as invalid.

    Raises:
        InputError: no cell could be measured.
        InputError, OSError: the system refused a file in the middle, such as on a full
            disk; a note of the error says how many cells are in the log.
    """
    stage("sweep: reading the log and the checkpoints")
    root = Path(root or log.default_root()).absolute()
    bundles = Path(bundles or log.project(root) / "data" / "bundles").absolute()
    every = list(cells(grid, root))
    check_cells(every, grid, here=not scheduler)
    autos = identity.RUNTIMES if scheduler else HERE
    every = every[part[0] - 1 :: part[1]]
    try:
        (root / "runs").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root / "runs").close()
    except OSError as problem:
        needed, step = "a folder that can be written", "name another with --log"
        raise InputError(f"log {root}", problem.strerror, needed, step) from None
    client = cluster.connect(scheduler) if scheduler else None
    todo = missing(every, root, autos)
    run = partial(run_cell, grid=grid, bundles=bundles, root=root)
    outcomes = []
    try:
        with bar(desc=progress, total=len(todo), unit="cell") as shown:
            here = partial(run, report=shown.set_postfix_str)
            running = cluster.run(client, run, todo) if client else map(here, todo)
            for outcome in running:
                outcomes.append(outcome)
                shown.update()
    except (KeyboardInterrupt, InputError, OSError, MemoryError) as problem:
        kept = (
            len(every) - len(todo) + sum(status in MEASURED for status, _ in outcomes)
        )
        text = f"{kept} of {len(every)} cells kept in {root}; the same command resumes"
        problem.add_note(text)
        raise
    counts = Counter(status for status, _ in outcomes)
    reasons = [f"{status}: {why}" for status, why in outcomes if status != "ok"]
    return {
        "cells": len(every),
        "done": counts["ok"] + counts["invalid"],
        "resumed": len(every) - len(todo),
        "failed": counts["failed"],
        "invalid": counts["invalid"],
        "log": str(root),
        "reasons": list(dict.fromkeys(reasons)),
        "settings": {own for cell in every for own in _key(cell, autos)[0]},
    }


def missing(
    every: Iterable[Cell], root: log.Root = None, autos: Sequence = HERE
) -> list[Cell]:
    """The cells without a run of this machine and its software, shuffled within each
    round. Invalid runs count, since they would be invalid again.

    Args:
        autos: what auto may mean on the machines that measure; where it may mean
            several runtimes, no run of this machine counts.
    """
    every, todo = list(every), {}
    done = _done(root, {own for cell in every for own in _key(cell, autos)[0]})
    for cell in every:
        if _key(cell, autos) not in done:
            # cells that differ in an axis that their runtime lacks are one
            todo.setdefault(_key(cell, autos), cell)
    shuffled = random.Random(0).sample(list(todo.values()), len(todo))
    return sorted(shuffled, key=lambda cell: cell.round)


def _key(cell: Cell, autos: Sequence = HERE) -> tuple:
    settings = tuple(cell.columns(auto)["setting"] for auto in autos)
    return settings, cell.round, identity.prompt(cell.judge_ids)


def _done(root: log.Root, settings: Iterable) -> dict[tuple, tuple[str, str | None]]:
    """Status and reason of every cell of the settings that was measured on this machine
    with its software. A run that also validated its bundle is that of the cell without,
    too."""
    here = log.environment()
    where = {name: here[name] for name in ("machine", "software")}
    where |= {"status": MEASURED, "setting": list(settings)}
    rows = log.load("runs", root, where)
    done = {}
    for row in log.plain(rows).itertuples():
        for prompt in (row.prompt, None):
            done[(row.setting,), row.round, prompt] = row.status, row.reason
    return done


def run_cell(
    cell: Cell,
    *,
    grid: Grid,
    bundles: Path,
    root: Path,
    stop: threading.Event | None = None,
    report: Callable[[str], None] | None = None,
) -> tuple[str, str | None]:
    """Exports a missing bundle, measures it and logs the run, a failed one with the end
    of its stderr; returns its status and reason. One cell of a log is measured at a
    time on a machine (see `measuring_alone`), and what another process has logged
    meanwhile is not measured again. `report` is told each stage as it begins.

    Raises:
        process.Cancelled: `stop` was set, and the running child was killed.
    """
    with measuring_alone(root, stop):
        key = _key(cell)
        if known := _done(root, key[0]).get(key):
            return known
        return _measured_cell(cell, grid, bundles, root, stop, report)


def _measured_cell(
    cell: Cell,
    grid: Grid,
    bundles: Path,
    root: Path,
    stop: threading.Event | None,
    report: Callable[[str], None] | None,
) -> tuple[str, str | None]:
    """Exports, measures and logs a cell that the log lacks (see `run_cell`)."""
    call = partial(process.call, timeout_s=cell.run["timeout_s"], stop=stop)
    row, tables = {"config": {}}, {}
    with process.awake():
        outcome = _prepared(cell, bundles, call, report)
        if outcome.failure is None:
            path = outcome.value
            if report:
                report(f"measuring {_bundle_words(cell)}")
            (stop or threading.Event()).wait(cell.run["cool_down_s"])
            threads = cell.run["threads"]
            outcome = call(measure, cell, grid, path, threads=threads)
        if outcome.failure is None:
            row, tables = outcome.value
            # it ran, and not where it was meant to
            if refused := process.invalidating(outcome):
                row |= {"status": "invalid", "reason": refused}
            if is_device(row["runtime"]):
                row = _placed(row, path, call)
    if outcome.failure:
        row |= {"status": "failed", "reason": outcome.failure}
    about = {"export": cell.options.model_dump(), "run": cell.run}
    row["config"] |= about | {"stderr": list(outcome.lines)}
    row |= cell.columns() | {
        "command": "sweep",
        "experiment": grid.experiment,
        "checkpoint": cell.source.name,
        "checkpoint_hash": cell.source.checkpoint_hash,
    }
    log.record(row, root, **tables)
    return row.get("status", "ok"), row.get("reason")


def _bundle_words(cell: Cell) -> str:
    """The checkpoint and the two options that a user varies most."""
    options = cell.options
    return f"{cell.source.name} {options.compress} S={options.max_seq_len}"


def _prepared(
    cell: Cell, bundles: Path, call: partial, report: Callable[[str], None] | None
) -> process.Outcome:
    """The path of the cell's bundle, exported in a child where it is missing."""
    source = cell.source
    if source.finished:
        return process.Outcome(source.path)
    about = source.name, source.checkpoint_hash, cell.options
    try:
        bundle = Bundle.open(bundles / exporter.bundle_name(*about))
    except InputError:
        if report:
            report(f"exporting {_bundle_words(cell)}")
        return call(prepare, cell, bundles)
    return process.Outcome(bundle.root)


def _placed(row: dict, path: Path, call: partial) -> dict:
    """The row with the compute plan of its bundle, which a child makes."""
    from workbench.ane import placement

    shards = [s for s in Bundle.open(path).manifest.shards if s.kind != "expert"]
    units = row["compute_units"]
    plan = call(placement.plan, path, shards, row["runtime"], units)
    if plan.failure:
        row["config"]["placement"] = plan.failure
        return row
    # where Core ML refused a unit, its own reason stands
    return placement.columns(plan.value, units) | row


def prepare(cell: Cell, bundles: Path) -> Path:
    """The bundle of a cell, exported where it is missing."""
    path = cell.source.path
    if cell.source.finished:
        return path
    return exporter.bundle_for(Checkpoint(path), cell.options, bundles).root


def measure(cell: Cell, grid: Grid, path: Path) -> tuple[dict, dict]:
    """In a child: times the bundle at `path`, and validates it if the cell has ids;
    returns the row and the tables of the run."""
    bundle, source, run = Bundle.open(path), cell.source, cell.run
    contents = bundle.manifest.checkpoint["sha256"]
    if source.finished:
        contents = bundle.identity
    if contents != source.contents:
        subject, needed = f"contents of {source.path}", f"the sweep's {source.contents}"
        raise InputError(subject, contents, needed, "copy the same to every worker")
    how = {name: run[name] for name in RUN_AXES if name not in ("T", "depth")}
    decoder = Decoder(bundle, **how)
    startup_s = time.time() - psutil.Process().create_time()
    sizes = {name: run[name] for name in timing.SIZES if name in run}
    with energy.metered() as used, log.disturbance() as disturbance:
        samples = timing.measure_speed(decoder, **sizes)
    tables = {"samples": samples, "layers": timing.layer_table(samples, decoder)}
    config = {
        "startup_s": round(startup_s, 3),
        "energy": used["reason"] and f"not measured: {used['reason']}",
    }
    row = identity.describe(decoder)
    row |= disturbance | {"ane_joules": used["ane_joules"], "config": config}
    if cell.judge_ids:
        result = _validation(cell, grid, decoder, path)
        tables["fidelity"], row["verdict"] = result.rows, result.verdict
        config["gates"] = [gate.json() for gate in result.gates]
        config["price"] = jsonable(result.cost.json())
        row["kl_mean"] = config["price"]["kl"]["mean"]
    manifest = bundle.manifest
    has_features = not (manifest.foreign or manifest.options.plugin)
    if is_device(row["runtime"]) and has_features:
        # what a table of predictions needs beside the time
        config["work"] = call_work(bundle, T=run["T"]).json()
    return row, tables


def _validation(cell: Cell, grid: Grid, decoder: Decoder, path: Path):
    """The bundle against its golden: the grid's, or one made from the checkpoint.

    Bug gates and budget need the checkpoint, which a finished bundle lacks."""
    from workbench.check.golden import Golden
    from workbench.check.validate import validate

    checkpoint = None if cell.source.finished else Checkpoint(cell.source.path)
    if grid.golden:
        golden = replace(Golden.load(find(grid.golden)), source=checkpoint)
    else:
        golden = Golden.of(checkpoint, cell.judge_ids, path.parent.with_name("golden"))
    return validate(decoder, golden, max_kl=grid.max_kl)
