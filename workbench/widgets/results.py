"""The cells of a grid, and their results in the log at a setting."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import sweep
from workbench.bundle import Options
from workbench.sweep.grid import Cell, Grid, stored_cells
from workbench.sweep.run import validated_ts

Setting = Mapping[str, Any]
"""A value for each axis that has a control; other axes have one value in the grid."""
FIRST_AXES = ("bundle", "max_seq_len", "T", "compress", "precision")
"""The axes that always have a control, the first controls first."""

NOT_MEASURED, TIMES_ONLY = "not measured", "times only"
"""Marks of an axis' values without errors in the log, the second of those with times."""
TIME_AXES = ("T", "depth", "fast")
"""The axes that change the times of a bundle and none of the values that it computes."""

# `values` is the hash of all that decides what a run computes, `setting` the hash of all
# that decides its times as well
HASHES = {"fidelity": "values", "samples": "setting", "layers": "setting"}
"""Table of the log → the column whose hash finds a cell's rows."""


class GridResults:
    """The results of a grid's cells in the log.

    Args:
        root: the log's folder.
    """

    def __init__(self, grid: Grid, root: Path):
        self.grid, self.root = grid, root
        self.cells = _table(sweep.cells(grid, root))
        """The cells that this machine measures, with their values on every axis."""
        # the log may come from machines on which `auto` is another runtime
        self._stored_cells = _with_hashes(_table(stored_cells(grid, root)))
        self.tables: dict[str, pd.DataFrame] = {}
        """See `sweep.stored_tables`; empty before `refresh`."""

    def refresh(self) -> None:
        """Reads the log."""
        self.tables = sweep.stored_tables(self.grid, self.root)

    def axes(self) -> dict[str, list]:
        """The axes with a control, and their values: `FIRST_AXES` and those that
        vary."""
        # finished bundles have no export axes
        names = [*(self.grid.export or ["bundle"]), *sweep.RUN_AXES]
        if self.grid.run.runtime == ["auto"]:
            # it follows from the target: no control combines one with another's runtime
            names.remove("runtime")
        values = {name: self.cells[name].unique().tolist() for name in names}
        first = [name for name in FIRST_AXES if name in names]
        varied = [name for name in names if name not in first and len(values[name]) > 1]
        return {name: values[name] for name in [*first, *varied]}

    def cell(self, setting: Setting) -> Cell:
        return _cells_at(self.cells, setting)[0]

    def options(self, setting: Setting) -> Options:
        """The export options of the bundle of a setting."""
        return _cells_at(self.cells, setting, sweep.RUN_AXES)[0].options

    def missing(self, setting: Setting) -> list[Cell]:
        """The cells that the log lacks, those of the setting's bundle first."""
        first = self.options(setting)
        cells = sweep.missing(self.cells["cell"], self.root)
        return sorted(cells, key=lambda cell: cell.options != first)

    def rows(
        self, table: str, setting: Setting, *, ignoring: Iterable[str]
    ) -> pd.DataFrame:
        """The rows of a table at a setting, at all values of the axes `ignoring`. Rows of
        `fidelity` are found whatever the values of `TIME_AXES` with which their run was
        made."""
        hash_column = HASHES[table]
        cells = _rows_at(self._stored_cells, setting, ignoring)
        rows = self.tables[table]
        return rows[rows[hash_column].isin(cells[hash_column])]

    def most_measured(self) -> Setting:
        """The first setting that has errors and times in the log; without one, the first
        that has errors, else the first that has times, else the first of the grid."""
        names = [*self.axes()]
        cells = self._with_results()
        count = 2 * cells["has_errors"] + cells["has_times"]
        return cells.loc[count.idxmax(), names].to_dict()

    def marks(self) -> dict[str, dict[Any, str]]:
        """Axis → value → its mark, for the values of which the log has no errors at any
        setting: `TIMES_ONLY` where it has times, or where a validation never measures
        errors, else `NOT_MEASURED`. An axis whose values all lack errors has no marks,
        but of those that will never have any."""
        cells = self._with_results()
        marks = {}
        for name, values in self.axes().items():
            of_value = cells.groupby(cells[name].map(values.index))
            has = of_value[["has_errors", "has_times", "is_validated_T"]].any()
            is_comparable = has["has_errors"].any()
            marks[name] = {}
            for place, value in has[~has["has_errors"]].iterrows():
                if value["has_times"] or not value["is_validated_T"]:
                    marks[name][values[place]] = TIMES_ONLY
                elif is_comparable:
                    marks[name][values[place]] = NOT_MEASURED
        return marks

    def validated_ts(self, setting: Setting) -> list[int]:
        """The T at which a validation of the setting's bundle measures errors."""
        return validated_ts(self.options(setting))

    def _with_results(self) -> pd.DataFrame:
        """The cells whose values the controls have, with columns that say whether the log
        has their errors and their times, and whether a validation measures errors at
        their T."""
        cells = self._stored_cells
        for name, values in self.axes().items():
            cells = cells[cells[name].isin(values)]
        fidelity, samples = self.tables["fidelity"], self.tables["samples"]
        names = [name for name in self.axes() if name not in TIME_AXES]
        # these tables have many rows of a few cells
        is_validated = cells["values"].isin(fidelity["values"].unique())
        groups = [cells[name].map(str) for name in names]
        has_T = cells["T"].isin(fidelity["T"].unique())
        is_validated_T = [
            cell.run.T in validated_ts(cell.options) for cell in cells["cell"]
        ]
        return cells.assign(
            has_errors=is_validated.groupby(groups).transform("any") & has_T,
            has_times=cells["setting"].isin(samples["setting"].unique()),
            is_validated_T=is_validated_T,
        )

    def fidelity(self, setting: Setting, tensor: str) -> pd.DataFrame:
        """The rows of a tensor at the setting's max_seq_len, or else at the nearest one
        that was measured: those of the setting's T and of the smallest T of the grid.
        Where the setting's T was not validated there, the next larger T that was takes
        its place, or else the largest one. The largest T of the rows is thus the one
        that stands for the setting's."""
        # at every max_seq_len, of which the nearest one is selected below
        rows = self.rows("fidelity", setting, ignoring=(*TIME_AXES, "max_seq_len"))
        rows = rows[rows["tensor"].eq(tensor) & rows["mode"].eq(mode_of(tensor))]
        rows = _at_nearest_length(rows, self.options(setting).max_seq_len)
        return self._at_T(rows, setting["T"]).sort_values("T")

    def measured(self, tensor: str) -> pd.DataFrame:
        """The rows of a tensor at every setting of the grid that the log has."""
        rows = self.tables["fidelity"]
        return rows[rows["tensor"].eq(tensor) & rows["mode"].eq(mode_of(tensor))]

    def _at_T(self, rows: pd.DataFrame, T: int) -> pd.DataFrame:
        """The rows of this T, or of the one that takes its place (see `fidelity`), and
        of the smallest T of the grid."""
        measured = rows["T"].unique()
        # a call of several tokens resembles a longer call more than a call of one token
        larger = [other for other in measured if other >= T]
        shown_T = min(larger) if larger else max(measured, default=T)
        return rows[rows["T"].isin([int(self.cells["T"].min()), shown_T])]


def _at_nearest_length(rows: pd.DataFrame, S: int) -> pd.DataFrame:
    """The rows of the max_seq_len that is nearest to S; no rows if there are none."""
    lengths = rows["max_seq_len"].unique()
    nearest = min(lengths, key=lambda length: abs(length - S), default=None)
    return rows[rows["max_seq_len"] == nearest]


def mode_of(tensor: str) -> str:
    """Logits are compared at the end of a chained pass, all others layer by layer."""
    return "chained" if tensor == "logits" else "isolated"


def _table(cells: Iterable[Cell]) -> pd.DataFrame:
    """Cells with a column for each option and way to run them."""
    return pd.DataFrame(
        {"cell": cell, "bundle": cell.source.path.name}
        | vars(cell.options)
        | cell.run.json()
        | {"hints": str(cell.run.hints)}
        for cell in cells
    )


def _with_hashes(cells: pd.DataFrame) -> pd.DataFrame:
    """A table of cells with the columns of both hashes."""
    columns = [cell.columns() for cell in cells["cell"]]
    hashes = {name: [of[name] for of in columns] for name in {*HASHES.values()}}
    return cells.assign(**hashes)


def _cells_at(
    cells: pd.DataFrame, setting: Setting, ignoring: Iterable[str] = ()
) -> list[Cell]:
    """The cells of a table at a setting, at all values of the axes `ignoring`."""
    return _rows_at(cells, setting, ignoring)["cell"].tolist()


def _rows_at(
    cells: pd.DataFrame, setting: Setting, ignoring: Iterable[str] = ()
) -> pd.DataFrame:
    """The rows of a table of cells at a setting, at all values of the axes
    `ignoring`."""
    for name, value in setting.items():
        if name not in ignoring:
            cells = cells[cells[name] == value]
    return cells
