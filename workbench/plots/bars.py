"""Horizontal bars."""

import numpy as np
import pandas as pd
from matplotlib.figure import FigureBase

from workbench.plots.styled import add_legend, returns_figure, set_height
from workbench.plots.text import labels_of, width_of, wrap


@returns_figure
def bars(
    table: pd.DataFrame,
    figure: FigureBase,
    *,
    xlabel: str = "",
    decimals: int | None = None,
) -> None:
    """Horizontal bars: a group for each row, and a bar with its value for each
    column.

    Args:
        decimals: digits of a value behind the point; None: three significant digits,
            which suit values of different magnitudes.
    """
    number = "{:.3g}" if decimals is None else f"{{:.{decimals}f}}"
    count = len(table.columns)
    set_height(figure, 1 + (0.1 + 0.2 * count) * len(table))
    ax = figure.subplots()
    places = np.arange(len(table))
    table = table.astype(float).set_axis(labels_of(table.columns), axis=1)
    for index, (name, values) in enumerate(table.items()):
        y = places + (index - (count - 1) / 2) * 0.8 / count
        drawn = ax.barh(y, values.fillna(0), 0.75 / count, label=name)
        texts = values.map(number.format).replace("nan", "not measured")
        ax.bar_label(drawn, texts, padding=3, fontsize=7)
    ax.axvline(0, color="black")
    ax.set_yticks(places, labels=[wrap(figure, n) for n in labels_of(table.index)])
    ax.invert_yaxis()
    ax.margins(x=0.9 / width_of(figure), y=0.02)
    ax.set_xlabel(xlabel)
    if count > 1:
        add_legend(figure, ax.get_legend_handles_labels()[0])
