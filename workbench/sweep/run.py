"""Measures the cells of a grid that the log lacks.

A cell is exported, if its bundle is missing, and measured, each in a fresh process, one
cell after the other on this machine or on the workers of a Dask cluster. The process
that measures writes the run itself, the row of `runs` last, so that a sweep that is
killed loses at most the cell that was running."""

import os
import random
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from workbench import export as exporting
from workbench import log, process
from workbench.bundle import Bundle
from workbench.decode import Decoder
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.export.cached import is_cached
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import energy, identity, timing
from workbench.sweep.grid import Cell, Grid, cells, check_sizes, find

MEASURED = ("ok", "invalid")
"""Statuses of runs with samples; an invalid run did not run as its settings say."""
HOW = ("runtime", "precision", "fast", "reads", "compute_units", "hints")
"""Arguments of a decoder."""


def sweep(
    grid: Grid,
    *,
    root: log.Root = None,
    bundles: Path | None = None,
    scheduler: str | None = None,
    part: tuple[int, int] = (1, 1),
    stop: threading.Event | None = None,
    progress: bool | str = True,
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
        stop: an event; once it is set, the running cell is ended and
            `process.Cancelled` raised.
        progress: whether a bar is shown, or the bar's name.

    Returns:
        {cells, done, resumed, failed, invalid, log, reasons, settings}: counts, the
        log's folder, the reasons of failed and invalid cells, and the set of the cells'
        `setting`. A cell that ran on another unit than the named one counts as done and
        as invalid.
    """
    from tqdm.auto import tqdm

    root = Path(root or log.default_root()).absolute()
    bundles = Path(bundles or log.project(root) / "data" / "bundles").absolute()
    everything = _checked(grid, root)[part[0] - 1 :: part[1]]
    how = {"grid": grid, "bundles": bundles, "root": root}
    with _runner(scheduler, how, stop) as run:
        _make_folder(root)
        todo = _lacking(everything, root)
        counts = {"cells": len(everything), "done": 0}
        counts |= {"resumed": len(everything) - len(todo), "failed": 0, "invalid": 0}
        reasons = []
        bar = {"total": len(todo), "unit": "cell"}
        bar["desc"] = "sweep" if progress is True else progress
        for status, reason in tqdm(run(todo), disable=not progress, **bar):
            counts["done" if status in MEASURED else "failed"] += 1
            counts["invalid"] += status == "invalid"
            said = f"{status}: {reason}"
            if status != "ok" and said not in reasons:
                reasons.append(said)
    settings = {cell.columns()["setting"] for cell in everything}
    return counts | {"log": str(root), "reasons": reasons, "settings": settings}


def missing(grid: Grid, root: log.Root = None) -> list[Cell]:
    """The cells without a run of this machine and its software, shuffled within each
    round. Invalid runs count, since they would be invalid again."""
    return _lacking(list(cells(grid, root)), root)


def _lacking(every: list[Cell], root: log.Root) -> list[Cell]:
    done = _done(root)
    todo = {}  # by key: cells of which a runtime lacks an axis may be equal
    for cell in every:
        if _key(cell) not in done:
            todo.setdefault(_key(cell), cell)
    shuffled = list(todo.values())
    random.Random(0).shuffle(shuffled)
    return sorted(shuffled, key=lambda cell: cell.round)


def _key(cell: Cell) -> tuple:
    columns = cell.columns()
    return columns["setting"], columns["round"], columns["prompt"]


def _done(root: log.Root) -> dict[tuple, tuple[str, str | None]]:
    """Status and reason of every cell that was measured on this machine with its
    software. A run that also validated its bundle is that of the cell without, too."""
    here = _pick(log.environment(), "machine", "software")
    rows = log.load("runs", root, here | {"status": list(MEASURED)})
    done = {}
    for row in log.plain(rows).itertuples():
        for prompt in {row.prompt, None}:
            done[row.setting, row.round, prompt] = row.status, row.reason
    return done


def _checked(grid: Grid, root: Path) -> list[Cell]:
    """The grid's cells; refuses those that nothing could measure."""
    every = list(cells(grid, root))
    check_sizes(every)
    for source in {cell.source for cell in every}:
        if source.finished:
            V = Bundle.open(source.path).manifest.dims.V
        else:
            V = Checkpoint(source.path).config.vocab_size
        token_ids(grid.validate_ids, V, "validate_ids of the grid")
    return every


def _make_folder(root: Path) -> None:
    """Makes the log's folder before anything is measured; refuses one that cannot be
    written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        needed, step = "a folder that can be written", "name another with --log"
        raise InputError(f"log {root}", problem.strerror, needed, step) from None


@contextmanager
def _runner(scheduler: str | None, how: dict, stop: threading.Event | None):
    """Yields a function from cells to the status and reason of each."""
    if scheduler is None:
        yield partial(map, partial(run_cell, stop=stop, **how))
        return
    from workbench.sweep import cluster

    with cluster.connect(scheduler) as client:
        yield partial(cluster.run, client, partial(run_unless_done, **how))


def run_unless_done(cell: Cell, *, root: Path, **how) -> tuple[str, str | None]:
    """On a worker: `run_cell`, unless a worker that died since had logged the cell."""
    return _done(root).get(_key(cell)) or run_cell(cell, root=root, **how)


def run_cell(
    cell: Cell,
    *,
    grid: Grid,
    bundles: Path,
    root: Path,
    stop: threading.Event | None = None,
) -> tuple[str, str | None]:
    """Exports a missing bundle and measures it, each in a fresh process; returns the
    status and reason of the logged run. A failed one is logged with the end of its
    stderr."""
    source, path = cell.source, cell.source.path
    how = {"timeout_s": cell.run["timeout_s"], "stop": stop}
    with process.awake():
        outcome = process.Outcome()
        if not source.finished:
            contents = source.checkpoint_hash
            path = bundles / exporting.bundle_name(source.name, contents, cell.options)
            if not is_cached(path):
                outcome = process.call(prepare, cell, bundles, **how)
        if outcome.failure is None:
            time.sleep(cell.run["cool_down_s"])
            how["threads"] = cell.run["threads"]
            outcome = process.call(measure, cell, grid, path, root, **how)
    if outcome.failure is None:
        return outcome.value
    row = _identity(cell, grid) | {"status": "failed", "reason": outcome.failure}
    row["config"]["stderr"] = list(outcome.lines)
    log.record(row, root)
    return "failed", outcome.failure


def prepare(cell: Cell, bundles: Path) -> None:
    """In a child: exports the bundle of a cell."""
    exporting.bundle_for(_checkpoint(cell), cell.options, bundles)


def measure(cell: Cell, grid: Grid, path: Path, root: Path) -> tuple[str, str | None]:
    """In a child: times the bundle at `path`, validates it if the cell has ids, logs
    the run, and returns its status and reason."""
    began = time.time()
    before = log.state()["thermal_pressure"]
    bundle = Bundle.open(path)
    if cell.source.finished and bundle.identity != cell.source.contents:
        subject, actual = f"bundle {path}", bundle.identity[:12]
        needed = f"the sweep's, {cell.source.contents[:12]}"
        step = "remove it, and start the sweep again"
        raise InputError(subject, actual, needed, step)
    decoder = Decoder(bundle, **_pick(cell.run, *HOW))
    sizes = _pick(cell.run, *timing.SIZES)
    startup_s = time.time() - psutil.Process().create_time()
    with energy.metered() as used:
        samples = timing.measure_speed(decoder, **sizes)
    from workbench.ane import placement
    from workbench.check.gates import jsonable

    row = _identity(cell, grid) | identity.describe(decoder)
    row |= {"thermal_pressure_before": before, "ane_joules": used["ane_joules"]}
    row |= _pick(cell.columns(decoder.runtime), "values")
    config = row["config"] | {
        "not_timed": timing.NOT_TIMED,
        "flags": log.flags(samples),
        "load_average": os.getloadavg()[0],
        "startup_s": round(startup_s, 3),
    }
    if used["reason"]:
        config["energy"] = f"not measured: {used['reason']}"
    if messages := process.core_ml_messages():
        config["stderr"] = messages
    # it ran, and not where it was meant to
    reasons = process.invalidating(messages)
    fidelity = None
    if cell.judge_ids:
        result = _validation(cell, grid, decoder, path)
        fidelity, row["verdict"] = result.rows, result.verdict
        config["gates"] = [gate.json() for gate in result.gates]
        config["price"] = result.price and jsonable(result.price.json())
        row["kl_mean"] = config["price"] and config["price"]["kl"]["mean"]
    if decoder.is_device:
        left_s = max(1, cell.run["timeout_s"] - (time.time() - began)) / 2
        try:
            plan = placement.planned(
                bundle,
                decoder.runtime,
                decoder.compute_units,
                shards=[model.shard for model in (*decoder.layers, *decoder.heads)],
                timeout_s=left_s,
            )
            row |= placement.columns(plan)
            if reason := placement.off_engine(plan, decoder.compute_units):
                reasons.append(reason)
        except InputError as problem:
            config["placement"] = str(problem)
    if reasons:
        row |= {"status": "invalid", "reason": reasons[0]}
    layers = timing.layer_table(samples, decoder)
    tables = {"fidelity": fidelity, "samples": samples, "layers": layers}
    log.record(row | {"config": config}, root, **tables)
    return row.get("status", "ok"), row.get("reason")


def _validation(cell: Cell, grid: Grid, decoder: Decoder, path: Path):
    """The bundle against its golden: the grid's, or one made from the checkpoint.

    Bug gates and budget need the checkpoint, which a finished bundle lacks."""
    from workbench.check import golden
    from workbench.check.validate import validate_stored

    checkpoint = None if cell.source.finished else _checkpoint(cell)
    if grid.golden:
        stored = find(grid.golden)
        reference = golden.Golden.load(stored)
    else:
        folder = path.parent.with_name("golden")
        stored = golden.golden_path(checkpoint, cell.judge_ids, folder)
        reference = golden.stored_golden(checkpoint, cell.judge_ids, folder)
    return validate_stored(
        decoder, reference, checkpoint, path=stored, max_kl=grid.max_kl
    )


def _checkpoint(cell: Cell) -> Checkpoint:
    """The cell's checkpoint; refuses another one at its path on this machine."""
    checkpoint = Checkpoint(cell.source.path)
    if checkpoint.sha256 != cell.source.checkpoint_hash:
        needed = f"the sweep's, {cell.source.checkpoint_hash[:12]}"
        step = "copy the same checkpoint to every worker"
        subject = f"checkpoint {checkpoint.path}"
        raise InputError(subject, checkpoint.sha256[:12], needed, step)
    return checkpoint


def _identity(cell: Cell, grid: Grid) -> dict:
    """The columns of `runs` that grid and cell decide."""
    config = {"export": cell.options.model_dump(), "run": cell.run}
    return cell.columns() | {
        "command": "sweep",
        "experiment": grid.experiment,
        "checkpoint": cell.source.name,
        "checkpoint_hash": cell.source.checkpoint_hash,
        "config": config,
    }


def _pick(mapping: dict, *names: str) -> dict:
    """The items of a mapping that have these names and a value."""
    return {name: mapping[name] for name in names if name in mapping}
