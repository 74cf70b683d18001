"""A table as coloured cells with their numbers."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch

from workbench.plots.cells import contrasting, draw_cells, label_cells
from workbench.plots.styled import (
    add_legend,
    returns_figure,
    set_height,
    unmeasured_key,
)
from workbench.plots.text import labels_of, measure_line, width_of, wrap, wrap_at

ROW_HEIGHT = 0.25  # inches
MAX_ROW_LABELS = 40
COLUMN_LABELS_PER_INCH = 5.25  # of two digits each
ROW_LABEL_MARGIN = 0.45  # inches beside the labels of rows, with the name of the axis


@returns_figure
def grid(
    table: pd.DataFrame,
    figure: FigureBase,
    *,
    texts: Sequence[Sequence[str]] | None = None,
    label: str = "",
    categories: Sequence[str] = (),
    blank: bool = False,
    missing: str = "",
) -> None:
    """A table as coloured cells. Nulls are dotted. The names of index and columns label
    the axes.

    Args:
        texts: of the cells; default: their numbers, and none where there are
            categories.
        label: what the colours show.
        categories: all names that cells may have, in place of numbers. Each has one
            colour, in order from dark to light, and the legend has those that occur.
        blank: whether nulls are white, where they are no gaps in a measurement.
        missing: the legend's words for nulls; default: not measured.
    """
    if categories:
        places = {name: place for place, name in enumerate(categories)}
        values_table = table.map(places.get).astype(float)
        norm = Normalize(0, max(1, len(categories) - 1))
        texts = texts or np.full(table.shape, "")
    else:
        values_table = table.astype(float)
        norm = Normalize(*np.nanquantile(values_table, (0, 1)))
    values = values_table.to_numpy()
    set_height(figure, 1.1 + ROW_HEIGHT * len(table))
    ax = figure.subplots()
    mesh = draw_cells(ax, values_table, norm)
    mesh.set(edgecolor="white", linewidth=1)
    if texts is None:
        texts = table.map("{:.3g}".format).replace("nan", "").to_numpy()
    colours = np.where(np.isnan(values), "black", contrasting(mesh))
    for (y, x), colour in np.ndenumerate(colours):
        text = texts[y][x]
        ax.text(x + 0.5, y + 0.5, text, color=colour, ha="center", va="center")
    share = 0.45 / len(table.columns)
    columns = [wrap(figure, name, share) for name in labels_of(table.columns)]
    rows = labels_of(table.index)
    row_width = max(map(measure_line, rows), default=0.0) + ROW_LABEL_MARGIN
    max_columns = int(COLUMN_LABELS_PER_INCH * (width_of(figure) - row_width))
    # the last column may be a total, or something that is in no row of the others
    label_cells(ax.xaxis, columns, max_columns, last=True)
    label_cells(ax.yaxis, rows, MAX_ROW_LABELS)
    ax.set(xlabel=table.columns.name, ylabel=table.index.name)
    keys = [
        Patch(facecolor=mesh.to_rgba(place), label=name)
        for place, name in enumerate(categories)
        if (values == place).any()
    ]
    if label and not categories:
        figure.colorbar(mesh, ax=ax, label=wrap_at(label, ROW_HEIGHT * len(table)))
    if blank:
        ax.patch.set(facecolor="white", hatch=None)
    elif np.isnan(values).any():
        keys.append(unmeasured_key(missing))
    if keys:
        add_legend(figure, keys, [label] if label and categories else [])
