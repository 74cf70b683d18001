"""KL against what the choice of formats costs."""

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from workbench.plots.styled import (
    DASHED,
    MARKERS,
    PALETTE,
    add_legend,
    panels_in,
    returns_figure,
)
from workbench.plots.text import describe_unplaced, group_by, label_log

CHOSEN, MIXED, SINGLE = "chosen", "mixed", "one format"
"""Values of the column `kind`."""
STATISTICS = {"kl": "mean", "kl_p99": "99% of the tokens are below"}
"""The columns that have a panel, and its title."""
LINE = {"color": PALETTE[0], "linewidth": 1}
STAR = {"color": PALETTE[5], "marker": "*", "markersize": 11, "linestyle": ""}
SINGLE_COLOURS = [
    colour for colour in PALETTE if colour not in (LINE["color"], STAR["color"])
]
"""The colours of single formats."""


@returns_figure
def frontier(
    choices: pd.DataFrame,
    figure: FigureBase,
    *,
    x: str,
    xlabel: str,
    max_kl: float | None = None,
) -> None:
    """KL in nats over bytes or milliseconds, the mean in one panel and the 99% quantile
    over the tokens in another. A line connects the choices of several formats, whose
    measured ones are dots; each format alone has a mark, the chosen one a star.

    Args:
        choices: kind (`CHOSEN`, `MIXED` or `SINGLE`), name, kl and kl_p99 (null where a
            choice was not measured), predicted_kl, and the column `x`.
        max_kl: the limit on the mean, drawn as a dashed line.
    """
    axes = panels_in(figure, len(STATISTICS), 2.2)
    single_formats = choices[choices["kind"] == SINGLE]
    drawable = single_formats[single_formats["kl"] > 0]
    chosen = choices[choices["kind"] == CHOSEN]
    keys = {}
    for ax, (column, title) in zip(axes, STATISTICS.items()):
        _draw_mixed(ax, choices[choices["kind"] == MIXED], x, column)
        formats = group_by(drawable, "name")
        looks = zip(cycle(SINGLE_COLOURS), cycle(MARKERS[1:]))
        for (name, rows), (colour, marker) in zip(formats, looks):
            mark = {"color": colour, "marker": marker, "linestyle": ""}
            ax.plot(rows[x], rows[column], **mark)
            keys[name] = Line2D([], [], **mark, label=name)
        ax.plot(chosen[x], chosen[column], **STAR)
        keys[CHOSEN] = Line2D([], [], **STAR | {"markersize": 8}, label=CHOSEN)
        if max_kl and column == "kl":
            ax.axhline(max_kl, **DASHED)
            limit = f"your limit on the mean, {max_kl:g} nats"
            keys["limit"] = Line2D([], [], **DASHED, label=limit)
        ax.set_yscale("log")
        label_log(ax.yaxis)
        ax.grid()
        ax.set(title=title, xlabel=xlabel, ylabel="KL from Hugging Face's model (nats)")
        ax.label_outer()
    # The panels share limits that enclose the marks. The line of mixed formats is not
    # enclosed: it goes on to a KL near 0, far below the marks.
    visible = pd.concat([drawable, chosen])
    values = visible[list(STATISTICS)].to_numpy(float)
    if (values > 0).any():
        axes[0].set_ylim(values[values > 0].min() / 2, values.max() * 2)
        margin = 0.05 * (visible[x].max() - visible[x].min() or 1.0)
        axes[0].set_xlim(visible[x].min() - margin, visible[x].max() + margin)
    line = Line2D([], [], **LINE, marker="o", markersize=3, label="mixed formats")
    notes = ["dots: measured; the line of the mean is predicted between them"]
    for name in single_formats.loc[single_formats["kl"] == 0, "name"]:
        # the search measures storage alone: the rounding of fp16 arithmetic is not in it
        notes.append(
            f"{name} has a KL of 0, of storage alone, which a logarithmic axis has not"
        )
    notes += describe_unplaced(single_formats, [x, "kl"])
    add_legend(figure, [line, *keys.values()], notes)


def _draw_mixed(ax: Axes, mixed: pd.DataFrame, x: str, column: str) -> None:
    """The line of mixed choices: the mean as predicted where nothing was measured."""
    mixed = mixed.sort_values(x)
    values = mixed[column]
    if column == "kl":
        values = values.fillna(mixed["predicted_kl"])
    positive = values > 0
    ax.plot(mixed.loc[positive, x], values[positive], **LINE)
    measured = mixed[mixed[column] > 0]
    ax.plot(measured[x], measured[column], "o", color=LINE["color"], markersize=3)
