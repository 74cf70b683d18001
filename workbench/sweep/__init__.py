"""Cross products of options, measured cell by cell in fresh processes and logged.

`grid` describes the cells, `execute` measures those that the log lacks, `results` reads the log's tables of a grid.
`cell` and `timing` are one measurement, `process` and `cluster` run it, `runs` describes and records rows of the log.
"""

from workbench.sweep.cell import bundle_for
from workbench.sweep.execute import done_cells, sweep
from workbench.sweep.grid import RUN_AXES, Grid, cells, load_grid, make_grid
from workbench.sweep.results import configurations, offered_machines, stored_tables, varied_axes

__all__ = ["RUN_AXES", "Grid", "bundle_for", "cells", "configurations", "done_cells", "load_grid", "make_grid", "offered_machines",
           "stored_tables", "sweep", "varied_axes"]  # fmt: skip
