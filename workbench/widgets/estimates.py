"""How long the cells of a grid will take: from those that this session measured, and
before the first one from the times of an earlier export and validation."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from workbench import exporter
from workbench.bundle import Options
from workbench.paths import BUNDLE
from workbench.sweep.grid import Cell
from workbench.sweep.run import Report

EXPORTING, MEASURING = "exporting", "measuring"
"""The first words of what `run_cell` reports when a stage of a cell begins."""
VERDICT = "verdict.json"
"""The name in `check.gates`, which no widget imports."""
TIMES_SHARE = 0.25
"""The share of a validation's seconds that the times of a cell take, about."""
MAX_SHARE = 10
"""A bundle whose validation ended this many times the seconds of its export later was not
validated right after it."""


class Stage(NamedTuple):
    """A part of the work of a cell."""

    name: str
    """`EXPORTING` or `MEASURING`."""
    validates: bool
    """Whether the stage also validates the bundle, which takes longer than its times."""
    options: Options


class CellSeconds:
    """The seconds of stages of cells that were measured in this session. A stage is
    expected to take as long as the last one of the same export options did, or else as
    the last one of other options. A stage whose like was not measured has no estimate:
    the first cell of a bundle, which exports and validates, takes many times as long as
    the others.

    Such a stage has a first estimate where an earlier export and validation are known
    (see `read_first`): of another model or of other options it may be far off."""

    def __init__(self):
        self._measured: list[tuple[Stage, float]] = []  # the newest last
        # name and `validates` of a stage → seconds
        self._first: dict[tuple[str, bool], float] = {}

    def add(self, stage: Stage, seconds: float) -> None:
        self._measured.append((stage, seconds))

    @contextmanager
    def timing(self, cell: Cell) -> Iterator[Report]:
        """Adds the stages that begin within the context, unless it is left by an
        error. Gives the function to which the stages of the cell are reported."""
        begun: list[tuple[str, float]] = []
        yield lambda text: begun.append((text.split()[0], time.monotonic()))
        ends = [start for _, start in begun[1:]] + [time.monotonic()]
        for (name, start), end in zip(begun, ends):
            self.add(stage_of(cell, name), end - start)

    def estimate(self, stages: Iterable[Stage]) -> float | None:
        """The seconds that stages will take together; None if one has no estimate."""
        seconds = [self._of_stage(stage) for stage in stages]
        return None if None in seconds else sum(seconds)

    def read_first(self, bundles: Iterable[Path]) -> None:
        """Takes first estimates from the first of these bundles whose export and
        validation followed one another."""
        for bundle in bundles:
            if seconds := _times_of_files(bundle):
                exporting, validating = seconds
                times = TIMES_SHARE * validating
                self._first = {
                    (EXPORTING, False): exporting,
                    (MEASURING, True): validating + times,
                    (MEASURING, False): times,
                }
                return

    def first_estimate(self, stages: Iterable[Stage]) -> float | None:
        """As `estimate`, with first estimates where a stage has no other one."""
        seconds = []
        for stage in stages:
            measured = self._of_stage(stage)
            first = self._first.get((stage.name, stage.validates))
            seconds.append(first if measured is None else measured)
        return None if None in seconds else sum(seconds)

    def _of_stage(self, stage: Stage) -> float | None:
        of_others = None
        for measured, seconds in reversed(self._measured):
            if measured == stage:
                return seconds
            if of_others is None and measured[:2] == stage[:2]:
                of_others = seconds
        return of_others


def stage_of(cell: Cell, name: str) -> Stage:
    """The stage of a cell with this name."""
    validates = name == MEASURING and bool(cell.validate_ids)
    return Stage(name, validates, cell.options)


def plan_stages(cells: Iterable[Cell], bundles: Path) -> list[list[Stage]]:
    """The stages of each cell, when the cells are measured in this order.

    Args:
        bundles: the folder of exported bundles: the first cell of a bundle that it
            lacks exports it.
    """
    planned, with_bundle = [], []
    for cell in cells:
        stages = [stage_of(cell, MEASURING)]
        if cell.options not in with_bundle:
            with_bundle.append(cell.options)
            if not _has_bundle(cell, bundles):
                stages.insert(0, stage_of(cell, EXPORTING))
        planned.append(stages)
    return planned


def _has_bundle(cell: Cell, bundles: Path) -> bool:
    return cell.source.finished or bundle_path(cell, bundles).exists()


def bundle_path(cell: Cell, bundles: Path) -> Path:
    """The path at which the export of a cell lies in a folder of bundles."""
    source = cell.source
    name = exporter.bundle_name(source.name, source.checkpoint_hash, cell.options)
    return bundles / name


def _times_of_files(bundle: Path) -> tuple[float, float] | None:
    """The seconds of a bundle's export and of the validation that followed it; None where
    the times of the files do not tell them.

    The exporter's lock is as old as the beginning of the first export, and the manifest
    as its end. A validation ends with the verdict."""
    paths = bundle.with_name(f".{bundle.name}.lock"), bundle / BUNDLE, bundle / VERDICT
    try:
        begin, end, verdict = (path.stat().st_mtime for path in paths)
    except OSError:
        return None
    exporting, validating = end - begin, verdict - end
    is_whole = exporting > 0 and 0 < validating <= MAX_SHARE * exporting
    return (exporting, validating) if is_whole else None
