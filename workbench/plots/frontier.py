"""KL against what the choice of formats costs."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from workbench.plots.styled import (
    CHOSEN_LOOK,
    DASHED,
    PRESET_LOOKS,
    add_legend,
    looks_by_name,
    panels_in,
    returns_figure,
)
from workbench.plots.text import describe_unplaced, group_by, label_log

CHOSEN, MIXED, SINGLE = "chosen", "mixed", "one format"
"""Values of the column `kind`."""
STATISTICS = {"kl": "mean", "kl_p99": "99% of the tokens are below"}
"""The columns that have a panel, and its title."""
MIXED_COLOUR, MIXED_MARK = PRESET_LOOKS[MIXED]
LINE = {"color": MIXED_COLOUR, "linewidth": 1}
LOG_MARGIN = 1.1
"""The factor between the last mark or bar and the end of a logarithmic axis of `x`."""
STAR = {
    # The chosen formats lie on the line of mixed ones, and often beside a dot of it: the
    # star is larger than all other marks, and its dark edge parts it from the line.
    "color": CHOSEN_LOOK[0],
    "marker": CHOSEN_LOOK[1],
    "markersize": 13,
    "markeredgecolor": "black",
    "markeredgewidth": 0.8,
    "linestyle": "",
    "zorder": 3,
}


@returns_figure
def frontier(
    choices: pd.DataFrame,
    figure: FigureBase,
    *,
    x: str,
    xlabel: str,
    vocabulary: Sequence[str] = (),
    max_kl: float | None = None,
    ends: Sequence[str] = (),
    bars: str = "",
) -> None:
    """KL in nats over bytes or milliseconds, the mean in one panel and the 99% quantile
    over the tokens in another. The choices of several formats have a line, of the mean
    as predicted and of the quantile through the measured choices, and a dot where they
    were measured. Each format alone has a mark, the chosen one a star.

    Args:
        choices: kind (`CHOSEN`, `MIXED` or `SINGLE`), name, kl and kl_p99 (null where a
            choice was not measured), predicted_kl, and the column `x`.
        vocabulary: all names that single formats may have, as in `lines`.
        max_kl: the limit on the mean, drawn as a dashed line.
        ends: the columns with both ends of the interval of `x`. Single formats and the
            chosen one have it as a bar, and the axis of `x` is logarithmic.
        bars: the legend's words for these bars.
    """
    axes = panels_in(figure, len(STATISTICS), 2.2)
    single_formats = choices[choices["kind"] == SINGLE]
    drawable = single_formats[single_formats["kl"] > 0]
    chosen = choices[choices["kind"] == CHOSEN]
    names = [name for name, _ in group_by(single_formats, "name")]
    look_of = looks_by_name(names, vocabulary)
    keys = {}
    for ax, (column, title) in zip(axes, STATISTICS.items()):
        _draw_mixed(ax, choices[choices["kind"] == MIXED], x, column)
        for name, rows in group_by(drawable, "name"):
            colour, marker = look_of[name]
            mark = {"color": colour, "marker": marker, "linestyle": ""}
            ax.plot(rows[x], rows[column], **mark)
            _draw_intervals(ax, rows, x, column, ends, colour)
            keys[name] = Line2D([], [], **mark, label=name)
        ax.plot(chosen[x], chosen[column], **STAR)
        _draw_intervals(ax, chosen, x, column, ends, STAR["markeredgecolor"])
        keys[CHOSEN] = Line2D([], [], **STAR | {"markersize": 10}, label=CHOSEN)
        if max_kl and column == "kl":
            ax.axhline(max_kl, **DASHED)
            limit = f"your limit, {max_kl:g} nats"
            keys["limit"] = Line2D([], [], **DASHED, label=limit)
        ax.set_yscale("log")
        label_log(ax.yaxis)
        if ends:
            ax.set_xscale("log")
        ax.grid()
        ax.set(title=title, xlabel=xlabel, ylabel="KL from Hugging Face (nats)")
        ax.label_outer()
    # The panels share limits that enclose the marks. The line of mixed formats is not
    # enclosed: it goes on to a KL near 0, far below the marks.
    visible = pd.concat([drawable, chosen])
    values = visible[list(STATISTICS)].to_numpy(float)
    if (values > 0).any():
        axes[0].set_ylim(values[values > 0].min() / 2, values.max() * 2)
        places = visible[[x, *ends]]
        low, high = places.min().min(), places.max().max()
        if ends:
            axes[0].set_xlim(low / LOG_MARGIN, high * LOG_MARGIN)
            label_log(axes[0].xaxis)
        else:
            margin = 0.05 * (high - low or 1.0)
            axes[0].set_xlim(low - margin, high + margin)
    line = Line2D(
        [], [], **LINE, marker=MIXED_MARK, markersize=3, label="mixed formats"
    )
    notes = [
        "dots: measured; lines: the mean as predicted, and the 99% quantile from dot to dot"
    ]
    if ends and bars:
        notes.append(bars)
    for name in single_formats.loc[single_formats["kl"] == 0, "name"]:
        # the search measures storage alone: the rounding of fp16 arithmetic is not in it
        notes.append(
            f"{name} has a KL of 0, of storage alone, which a logarithmic axis cannot show"
        )
    notes += describe_unplaced(single_formats, [x, "kl"])
    add_legend(figure, [line, *keys.values()], notes)


def _draw_intervals(
    ax: Axes, rows: pd.DataFrame, x: str, column: str, ends: Sequence[str], colour: str
) -> None:
    """The bars from one end of the intervals of `x` to the other; none without `ends`."""
    if not ends:
        return
    low, high = (rows[end] for end in ends)
    ax.errorbar(
        rows[x],
        rows[column],
        xerr=[rows[x] - low, high - rows[x]],
        fmt="none",
        ecolor=colour,
        elinewidth=1,
        capsize=2,
    )


def _draw_mixed(ax: Axes, mixed: pd.DataFrame, x: str, column: str) -> None:
    """The line of mixed choices, and dots at the measured ones.

    The mean's line has predictions alone, since a measured mean among them would look
    like a jump of the mean. A choice of a single format has its measured mean: the
    predictions of the others are scaled to it.
    """
    mixed = mixed.sort_values(x)
    values = mixed[column]
    if column == "kl":
        is_scale = mixed["name"].ne(MIXED) & values.notna()
        values = values.where(
            is_scale | mixed["predicted_kl"].isna(), mixed["predicted_kl"]
        )
    positive = values > 0
    ax.plot(mixed.loc[positive, x], values[positive], **LINE)
    measured = mixed[mixed[column] > 0]
    dots = {"marker": MIXED_MARK, "color": MIXED_COLOUR, "markersize": 3}
    ax.plot(measured[x], measured[column], linestyle="", **dots)
