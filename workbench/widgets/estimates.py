"""How long the cells of a grid will take: from those that this session measured."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from workbench import exporter
from workbench.bundle import Options
from workbench.sweep.grid import Cell
from workbench.sweep.run import Report

EXPORTING, MEASURING = "exporting", "measuring"
"""The first words of what `run_cell` reports when a stage of a cell begins."""


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
    the others."""

    def __init__(self):
        self._measured: list[tuple[Stage, float]] = []  # the newest last

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
    source = cell.source
    if source.finished:
        return True
    name = exporter.bundle_name(source.name, source.checkpoint_hash, cell.options)
    return (bundles / name).exists()
