"""Cross products of options, measured cell by cell in fresh processes and logged.

Rooms within: `grid` (what is measured), `cell` and `timing` (one measurement), `process` and `cluster` (where it runs),
`runs` (its rows in the log).
"""

from workbench.sweep.grid import Grid, bundle_for, cells, configurations, done_cells, load_grid, make_grid, stored_tables, sweep

__all__ = ["Grid", "bundle_for", "cells", "configurations", "done_cells", "load_grid", "make_grid", "stored_tables", "sweep"]
