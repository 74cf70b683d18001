"""Measures the cells of a grid that the log lacks.

A missing bundle is exported, measured and, on a device, planned, each in a process of
its own. The cells follow one another on this machine, or run on the workers of a Dask
cluster. The row of `runs` is written last, so that a sweep that is killed loses at most
the cell that was running."""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from workbench import exporter, log, process
from workbench.ane.work import call_work
from workbench.bundle import Bundle, Options
from workbench.check.gates import jsonable
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, plain_line, shows_plain_lines, stage
from workbench.runtime import is_device, resolve
from workbench.sweep import cluster, energy, identity, timing
from workbench.sweep.grid import (
    MEASURED,
    Cell,
    CellResult,
    Grid,
    Run,
    RunKey,
    RunSettings,
    Source,
    cells,
    check_cells,
    locate,
)
from workbench.sweep.lock import measuring_alone

if TYPE_CHECKING:  # its import takes a moment, and only a cell with ids needs it
    from workbench.check.validate import Validation

Report = Callable[[str], None]
"""A function that is called with a line of text when a stage of a cell begins."""


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
        scheduler: the address of a Dask scheduler. Its `ANE=1` workers then measure the
            cells and write the log; they must have every path of this machine. Default:
            this machine measures.
        part: (i, n): only every n-th cell, from the i-th on, so that n machines
            measure a grid without a scheduler.
        progress: the name of the bar.

    Returns:
        cells, done, resumed, failed, invalid: counts. `resumed` are the cells that
            needed no run, since the log has them or another cell is equal. A cell that
            a worker finds in the log, or this process after it waited for another one,
            is done. A cell that ran on another unit than the named one is both done and
            invalid.
        log: the log's folder.
        reasons: why cells failed or are invalid.
        settings: the set of the cells' `setting`.

    Raises:
        InputError: no cell could be measured.
        InputError, OSError: the system refused a file during the sweep, such as on a
            full disk. A note of the error says how many cells are in the log.
    """
    stage("sweep: reading the log and the checkpoints")
    root = Path(root or log.default_root()).absolute()
    bundles = Path(bundles or log.project(root) / "data" / "bundles").absolute()
    planned = list(cells(grid, root))
    check_cells(planned, grid, runs_locally=not scheduler)
    _check_writable(root)
    if scheduler:
        client = cluster.connect(scheduler)
        runtimes = cluster.resolve_auto(client, grid.run.runtime)
        planned = _take_part(list(cells(grid, root, runtimes)), part)
        # workers look into the log themselves, for runs of their machine
        todo = shuffle_within_rounds(distinct_cells(planned))
    else:
        planned = _take_part(planned, part)
        todo = missing(planned, root)
    measure = partial(run_cell, grid=grid, bundles=bundles, root=root)
    results: list[CellResult] = []
    try:
        with bar(desc=progress, total=len(todo), unit="cell") as progress_bar:
            if scheduler:
                ended = cluster.run_jobs(client, measure, todo)
            else:
                report = progress_bar.set_postfix_str
                ended = ((cell, measure(cell, report=report)) for cell in todo)
            for cell, result in ended:
                results.append(result)
                progress_bar.update()
                if shows_plain_lines():
                    count = f"{progress}: cell {len(results)} of {len(todo)}"
                    plain_line(f"{count}, {describe_end(cell, result, root)}")
    except (KeyboardInterrupt, InputError, OSError, MemoryError) as problem:
        logged = len(planned) - len(todo)
        logged += sum(result.status in MEASURED for result in results)
        text = f"{logged} of {len(planned)} cells kept in {root}"
        problem.add_note(f"{text}; the same command resumes")
        raise
    return _describe_results(results, planned, todo) | {"log": str(root)}


def _take_part(planned: list[Cell], part: tuple[int, int]) -> list[Cell]:
    """Part i of n of the cells: every n-th one, so that each part has cells of all bundles
    and rounds.

    Args:
        part: (i, n); i counts from 1.
    """
    number, count = part
    return planned[number - 1 :: count]


def _describe_results(
    results: list[CellResult], planned: list[Cell], todo: list[Cell]
) -> dict:
    """The result of `sweep` without the log's folder."""
    counts = Counter(result.status for result in results)
    reasons = [f"{status}: {reason}" for status, reason in results if status != "ok"]
    return {
        "cells": len(planned),
        "done": counts["ok"] + counts["invalid"],
        "resumed": len(planned) - len(todo),
        "failed": counts["failed"],
        "invalid": counts["invalid"],
        "reasons": list(dict.fromkeys(reasons)),
        "settings": {cell.key().setting for cell in planned},
    }


def _check_writable(root: Path) -> None:
    """Raises an InputError unless files can be written to the log at `root`."""
    try:
        (root / "runs").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root / "runs").close()
    except OSError as problem:
        needed, step = "a folder that can be written", "name another with --log"
        raise InputError(f"log {root}", problem.strerror, needed, step) from None


def describe_end(cell: Cell, result: CellResult, root: log.Root = None) -> str:
    """A cell that has ended, in one line: its settings, and its tok/s in the log or the
    reason why it failed or is invalid."""
    words = describe_cell(cell)
    if cell.run.rounds > 1:
        words += f", round {cell.round + 1} of {cell.run.rounds}"
    results = []
    if result.status in MEASURED:
        key = cell.key()
        rows = log.load("runs", root, {"setting": key.setting, "round": key.round})
        rates = rows["tokens_per_s"].dropna()
        results += [f"{rate:.4g} tok/s" for rate in rates[-1:]]
    if result.status != "ok":
        results.append(f"{result.status}: {result.reason}")
    return f"{words}: {', '.join(results) or result.status}"


def describe_cell(cell: Cell) -> str:
    """The bundle or checkpoint of a cell, the settings that a user varies most, and the
    other ones that differ from their defaults."""
    options, run, defaults = cell.options, cell.run, Run()
    name = cell.source.path.name if cell.source.finished else cell.source.name
    words = [name, options.compress, f"S={options.max_seq_len}"]
    others = identity.non_default_options(options)
    words += [
        f"{option}={value}"
        for option, value in others.items()
        if option not in ("compress", "max_seq_len")
    ]
    words += [f"T={run.T}", f"depth={run.depth}"]
    for axis in ("runtime", "precision", "fast", "reads", "compute_units", "hints"):
        value = getattr(run, axis)
        default = resolve() if axis == "runtime" else getattr(defaults, axis)[0]
        if value and value != default:
            words.append(f"{axis}={value}")
    return " ".join(words)


def missing(planned: Iterable[Cell], root: log.Root = None) -> list[Cell]:
    """The distinct cells without a run of this machine and its software, in the order in
    which they are measured (`shuffle_within_rounds`). An invalid run counts, since
    another one would be invalid again."""
    planned = list(planned)
    runs = _logged_results(root, {cell.key().setting for cell in planned})
    lacking = [cell for cell in planned if cell.key() not in runs]
    return shuffle_within_rounds(distinct_cells(lacking))


def distinct_cells(planned: Iterable[Cell]) -> list[Cell]:
    """The first cell of each key. Cells have the same key where they differ only in an
    axis that their runtime lacks: one run serves them all."""
    by_key: dict[RunKey, Cell] = {}
    for cell in planned:
        by_key.setdefault(cell.key(), cell)
    return list(by_key.values())


def shuffle_within_rounds(planned: list[Cell]) -> list[Cell]:
    """The cells round by round, in a seeded random order within each round."""
    # in order, a machine that warms up would slow down the last settings of each round
    shuffled = random.Random(0).sample(planned, len(planned))
    return sorted(shuffled, key=lambda cell: cell.round)


def _logged_results(
    root: log.Root, settings: Iterable[str]
) -> dict[RunKey, CellResult]:
    """The result of every run of the settings that the log has of this machine with its
    software. A run that also validated its bundle has two keys: it serves the cell
    without a validation, too."""
    where = log.identify_machine()
    where |= {"status": MEASURED, "setting": list(settings)}
    rows = log.load("runs", root, where)
    runs = {}
    # the rows are in order of time: the status of the newest run of a key counts
    for row in log.plain(rows).itertuples():
        result = CellResult(row.status, row.reason)
        runs[RunKey(row.setting, row.round, None)] = result
        if row.prompt:
            runs[RunKey(row.setting, row.round, row.prompt)] = result
    return runs


def run_cell(
    cell: Cell,
    *,
    grid: Grid,
    bundles: Path,
    root: Path,
    stop: threading.Event | None = None,
    report: Report | None = None,
) -> CellResult:
    """Exports a missing bundle, measures it and logs the run. The row of a failed run has
    the end of its stderr.

    One cell of a log is measured at a time on a machine (see `measuring_alone`). A cell
    that another process has logged meanwhile is not measured again.

    Raises:
        process.Cancelled: `stop` was set, and the running child was killed.
    """
    with measuring_alone(root, stop):
        key = cell.key()
        runs = _logged_results(root, [key.setting])
        # another process may have logged the cell while this one waited
        if key in runs:
            return runs[key]
        measurement = CellMeasurement(cell, grid, bundles, root, stop, report)
        return measurement.measure_and_log()


@dataclass(frozen=True)
class CellMeasurement:
    """The measurement of a cell that the log lacks. Each of its stages runs in a process
    of its own.

    Args:
        bundles: the folder of exported bundles.
        root: the log's folder.
        stop: an event; once it is set, the running child is killed.
    """

    cell: Cell
    grid: Grid
    bundles: Path
    root: Path
    stop: threading.Event | None = None
    report: Report | None = None

    def measure_and_log(self) -> CellResult:
        """Exports a missing bundle, measures it and logs the run."""
        with process.awake():
            outcome = self._export()
            if outcome.failure is None:
                outcome = self._measure(outcome.value)
        return self._log(outcome)

    def _export(self) -> process.Outcome:
        """The outcome whose value is the path of the cell's bundle. Only a missing bundle
        is exported, in a child process."""
        source, options = self.cell.source, self.cell.options
        if source.finished:
            return process.Outcome(source.path)
        name = exporter.bundle_name(source.name, source.checkpoint_hash, options)
        # opening it here saves the start of a process for every cell of a finished export
        try:
            bundle = Bundle.open(self.bundles / name)
        except InputError:
            self._report_stage("exporting")
            return self._call(export_bundle, self.cell, self.bundles)
        return process.Outcome(bundle.root)

    def _measure(self, path: Path) -> process.Outcome:
        """The outcome whose value is a `MeasuredRun` of the bundle at `path`. The run of a
        device has its compute plan, too."""
        self._report_stage("measuring")
        self._cool_down()
        arguments = self.cell, self.grid, path
        outcome = self._call(
            measure_in_child, *arguments, threads=self.cell.run.threads
        )
        if outcome.failure:
            return outcome
        row = outcome.value.row
        if is_device(row["runtime"]):
            self._add_placement(row, path)
        # Core ML ran the program, though not on the unit that the cell names: this reason
        # takes precedence over that of the plan
        if message := outcome.invalid_reason:
            row |= {"status": "invalid", "reason": message}
        return outcome

    def _cool_down(self) -> None:
        """Waits `cool_down_s` seconds, or until `stop` is set."""
        (self.stop or threading.Event()).wait(self.cell.run.cool_down_s)

    def _add_placement(self, row: dict, path: Path) -> None:
        """Adds the columns of the bundle's compute plan to a row; a child makes the plan."""
        from workbench.ane import placement

        shards = [s for s in Bundle.open(path).manifest.shards if s.kind != "expert"]
        units = row["compute_units"]
        arguments = path, shards, row["runtime"], units
        outcome = self._call(placement.read_compute_plan, *arguments)
        if outcome.failure:
            row["config"]["placement"] = outcome.failure
        else:
            row |= placement.placement_columns(outcome.value, units)

    def _log(self, outcome: process.Outcome) -> CellResult:
        """Logs a run, or the reason why it failed.

        Args:
            outcome: of `_measure`, or of an export that failed.
        """
        cell = self.cell
        if outcome.failure is None:
            measured = outcome.value
        else:
            row = {"status": "failed", "reason": outcome.failure, "config": {}}
            measured = MeasuredRun(row, tables={})
        row = measured.row
        row["config"] |= {
            "export": cell.options.model_dump(),
            "run": cell.run.json(),
            "stderr": list(outcome.lines),
        }
        # These name the run in the log, also where it failed and no decoder described it.
        # Where one did, its columns are equal: both come from `identity`.
        row |= cell.columns() | {
            "command": "sweep",
            "experiment": self.grid.experiment,
            "checkpoint": cell.source.name,
            "checkpoint_hash": cell.source.checkpoint_hash,
        }
        log.record(row, self.root, **measured.tables)
        return CellResult(row.get("status", "ok"), row.get("reason"))

    def _call(self, function: Callable, *args, threads: int = 1) -> process.Outcome:
        """Calls a function in a child process, for as long as the cell's settings allow."""
        return process.call(
            function,
            *args,
            threads=threads,
            timeout_s=self.cell.run.timeout_s,
            stop=self.stop,
        )

    def _report_stage(self, stage: str) -> None:
        """Reports a stage of the cell."""
        if self.report:
            self.report(f"{stage} {describe_cell(self.cell)}")


def export_bundle(cell: Cell, bundles: Path) -> Path:
    """Exports the bundle of a cell if it is missing, and returns its path."""
    path = cell.source.path
    if cell.source.finished:
        return path
    return exporter.bundle_for(Checkpoint(path), cell.options, bundles).root


class MeasuredRun(NamedTuple):
    """A run as the log stores it, but for the columns that the cell decides."""

    row: dict
    """A row of the table `runs`."""
    tables: dict
    """Its rows of `samples`, `layers` and `fidelity`."""


def measure_in_child(cell: Cell, grid: Grid, path: Path) -> MeasuredRun:
    """Runs in a child process: times the bundle at `path`, and validates it if the cell
    has ids.

    Raises:
        InputError: the bundle or its checkpoint is another one than the sweep's.
    """
    bundle, run = _open_bundle(cell.source, path), cell.run
    decoder = _make_decoder(bundle, run)
    # imports and loading, which every process of a user pays once
    startup_s = time.time() - psutil.Process().create_time()
    with energy.metered() as energy_used, log.measure_disturbance() as disturbance:
        samples = timing.measure_speed(
            decoder,
            T=run.T,
            depth=run.depth,
            n_gen=run.n_gen,
            repetitions=run.repetitions,
            min_tokens=run.min_tokens,
            min_seconds=run.min_seconds,
        )
    tables = {"samples": samples, "layers": timing.layer_table(samples, decoder)}
    row = identity.run_columns(decoder) | disturbance
    row["ane_joules"] = energy_used.ane_joules
    row["config"] = {"startup_s": round(startup_s, 3), "energy": None}
    if energy_used.reason:
        row["config"]["energy"] = f"not measured: {energy_used.reason}"
    measured = MeasuredRun(row, tables)
    if cell.validate_ids:
        _add_validation(measured, _validate(cell, grid, decoder, path))
    manifest = bundle.manifest
    has_features = not (manifest.foreign or manifest.options.plugin)
    if is_device(row["runtime"]) and has_features:
        # a table of predictions needs these features beside the time
        row["config"]["work"] = call_work(bundle, T=run.T).json()
    return measured


def _make_decoder(bundle: Bundle, run: RunSettings) -> Decoder:
    """The decoder of a bundle with the settings of a cell."""
    return Decoder(
        bundle,
        run.runtime,
        precision=run.precision,
        fast=run.fast,
        reads=run.reads,
        compute_units=run.compute_units,
        hints=run.hints,
    )


def _add_validation(measured: MeasuredRun, validation: "Validation") -> None:
    """Adds a validation's verdicts, gates, cost and rows of `fidelity` to a run."""
    row, cost = measured.row, jsonable(validation.cost.json())
    row |= {
        "verdict": validation.verdict,
        "quality": validation.quality,
        "kl_mean": cost["kl"]["mean"],
    }
    row["config"]["gates"] = [gate.json() for gate in validation.gates]
    row["config"][identity.COST_KEY] = cost
    measured.tables["fidelity"] = validation.rows


def _open_bundle(source: Source, path: Path) -> Bundle:
    """Opens the bundle at `path`, and checks that it is the sweep's: a worker's copy may
    differ.

    Raises:
        InputError: the bundle, or its checkpoint, is another one than the sweep's.
    """
    bundle = Bundle.open(path)
    contents_hash = bundle.manifest.checkpoint["sha256"]
    if source.finished:
        contents_hash = bundle.identity
    if contents_hash != source.contents_hash:
        subject = f"contents of {source.path}"
        needed = f"the sweep's {source.contents_hash}"
        step = "copy the same to every worker"
        raise InputError(subject, contents_hash, needed, step)
    return bundle


def validated_ts(options: Options) -> list[int]:
    """The T at which the validation of a cell with these options measures errors."""
    from workbench.check.states import default_ts

    return default_ts(options)


def _validate(cell: Cell, grid: Grid, decoder: Decoder, path: Path) -> "Validation":
    """Validates the bundle against the grid's golden, or against one that is made from
    the checkpoint. Without the checkpoint of a finished bundle, the gates that need it do
    not run."""
    from workbench.check.golden import Golden
    from workbench.check.validate import validate

    checkpoint = None  # the gates that need it are then not run
    if not cell.source.finished:
        checkpoint = Checkpoint(cell.source.path)
    if grid.golden:
        golden = replace(Golden.load(locate(grid.golden)), source=checkpoint)
    else:
        folder = path.parent.with_name("golden")
        golden = Golden.of(checkpoint, cell.validate_ids, folder)
    return validate(decoder, golden, max_kl=grid.max_kl)
