"""A heatmap of the difference between two runs' errors by layer and position."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from workbench.plots.fidelity import METRICS
from workbench.plots.figure import (
    axes,
    colour_bar,
    crosses,
    grid_cells,
    heading,
    style,
    unmeasured_key,
)


@style()
def fidelity_difference(
    cells: pd.DataFrame,
    *,
    metric: str = "error",
    title: str = "A − B",
    sides: str = "A − B (above 0: A errs more)",
    ax: Axes | None = None,
) -> Axes:
    """Run A's error less run B's as colours on a scale that is symmetric about 0:
    orange where A errs more, purple where B does.

    `cells`: ``layer``, ``position``, ``difference``, one row each. Cells that were not
    measured are hatched, those of a difference that is not finite are marked × on
    black."""
    table = cells.pivot(index="layer", columns="position", values="difference")
    table = table.astype(float)
    finite = table.where(np.isfinite(table))
    most = finite.abs().max(axis=None)
    if not most > 0:
        most = 1.0
    shown = table.replace([np.inf, -np.inf], 2 * most)
    ax = axes(ax, 6.5, 3.2)
    colours = matplotlib.colormaps["PuOr_r"].with_extremes(over="black")
    mesh = grid_cells(ax, shown, Normalize(-most, most), colours)
    crosses(ax, np.isinf(table.to_numpy()), "white")
    label = f"{METRICS[metric][0]}, {sides}"
    colour_bar(mesh, ax, label)
    return heading(ax, title, unmeasured_key(table))
