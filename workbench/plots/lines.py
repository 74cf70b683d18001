"""Medians over a number, as lines."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator
from pandas.api.typing import SeriesGroupBy

from workbench.plots.styled import (
    DASHED,
    add_legend,
    looks_by_name,
    panels_in,
    returns_figure,
    shifted,
)
from workbench.plots.text import (
    describe_unplaced,
    format_count,
    format_number,
    group_by,
    label_log,
    width_of,
    wrap_at,
)

MAX_VECTOR_POINTS = 2000
"""More points are drawn as an image, also in a vector format."""
LINE_DISTANCE = 4  # points from the bars of a line to those of the next one
LABEL_WIDTH = 0.75  # inches beside a panel: the label of its y axis and its numbers
HOLLOW = {"linestyle": "", "markerfacecolor": "white"}


@dataclass(frozen=True)
class Line:
    """The points of a line in a panel, and their bars."""

    medians: pd.Series
    """Value of x → median of the rows."""
    low: pd.Series
    high: pd.Series
    """Value of x → lower or upper end of the bar."""
    is_hollow: pd.Series
    """Value of x → whether the point is drawn hollow."""
    has_several: bool
    """Whether a point has several rows."""
    outside_x: int
    outside_y: int
    """The numbers of points that were left out because a logarithmic axis of x or y has
    no place for them."""


@returns_figure
def lines(
    data: pd.DataFrame,
    figure: FigureBase,
    *,
    x: str,
    y: str,
    hue: str,
    col: str | None = None,
    spread: Sequence[float] = (0, 1),
    bars: str = "",
    marks: Mapping[str, float] = {},
    marked: str | None = None,
    hollow: str | None = None,
    vocabulary: Sequence[str] = (),
    xlog: float | None = None,
    ylog: bool = False,
    xlabel: str | None = None,
    ylabel: str | Mapping[str, str] | None = None,
) -> None:
    """Medians of `y` over `x`, a line for each value of `hue`, a panel for each value of
    `col`; bars span the quantiles `spread` of the rows of a point.

    63 lines look different. The legend explains points and bars, and names points that
    are not drawn. A linear axis that starts above 0 says so.

    Args:
        bars: the legend's words for points and bars where the rows of a point are no
            repetitions: an estimate and both ends of its interval.
        marks: names and values of dashed horizontal lines.
        marked: the panel that has them, a value of `col`; None: all panels.
        hollow: a column, such as ``disturbed``. A point whose rows all have a value in
            it is drawn hollow, and the legend gives hollow points the column's name.
        vocabulary: all names that `hue` may have in figures of this kind, in the order
            of the legend. Each keeps its colour and marker, whichever of them are drawn;
            other names follow.
        xlog: base of a logarithmic x axis; None: linear, with whole numbers.
        ylabel: default: `y`. Where each panel shows a quantity of its own, the label of
            each, by its value of `col`: then the panels have no common scale.
    """
    panels = group_by(data, col)
    shares_y = not isinstance(ylabel, Mapping)
    label_of_y = ylabel or y  # of all panels, where they share one
    if not shares_y and (unnamed := [t for t, _ in panels if t not in ylabel]):
        found = f"ylabel has no label for the panel {unnamed[0]!r}"
        raise ValueError(f"{found}; needs one for each value of {col!r}")
    axes = panels_in(figure, len(panels), 1.7, shares_y)
    names = [name for name, _ in group_by(data, hue)]
    line_styles = _line_styles(looks_by_name(names, vocabulary))
    columns = [name for name in (x, hue, col) if name]
    is_crowded = len(data[columns].drop_duplicates()) > MAX_VECTOR_POINTS
    keys = {}
    has_several = has_hollow = False
    outside_x = 0
    outside_y = Counter()  # name of the line → points
    for ax, (title, panel) in zip(axes, panels):
        groups = group_by(panel, hue)
        middle = (len(groups) - 1) / 2
        for place, (name, group) in enumerate(groups):
            is_hollow = _are_hollow(group, x, y, hollow)
            line = _line(group.groupby(x)[y], is_hollow, spread, bool(xlog), ylog)
            has_several |= line.has_several
            has_hollow |= line.is_hollow.any()
            outside_x += line.outside_x
            outside_y[name] += line.outside_y
            if line.medians.empty:
                continue
            # bars of two lines at one x would cover each other
            shift = LINE_DISTANCE * (place - middle) if line.has_several else 0
            _draw_line(ax, line, line_styles[name], is_crowded, shift)
            keys[name] = Line2D([], [], **line_styles[name])
        for value in marks.values() if marked in (None, title) else ():
            ax.axhline(value, **DASHED)
        _set_x_axis(ax, data[x], xlog, xlabel or x)
        _set_y_axis(ax, ylog, label_of_y if shares_y else ylabel[title])
        columns = ax.get_gridspec().ncols
        ax.set_title(wrap_at(title, width_of(figure) / columns - LABEL_WIDTH))
        if shares_y:
            ax.label_outer()
        elif not ax.get_subplotspec().is_last_row():
            ax.set_xlabel("")
    # in the order of the vocabulary and the groups; a panel may lack the first ones
    legend = [keys[name] for name in line_styles if name in keys]
    legend += [Line2D([], [], **DASHED, label=mark) for mark in marks]
    if has_hollow:
        legend.append(Line2D([], [], **HOLLOW, color="black", marker="o", label=hollow))
    notes = []
    if has_several:
        notes.append(bars or f"points: medians; bars: {_describe_spread(spread)}")
    notes += _describe_outside(xlabel or x, outside_x)
    lines_outside = [name for name, count in outside_y.items() if count]
    name_of_y = label_of_y if shares_y else y
    notes += _describe_outside(name_of_y, outside_y.total(), lines_outside)
    notes += describe_unplaced(data, [x, y])
    add_legend(figure, legend, notes)


def _are_hollow(group: pd.DataFrame, x: str, y: str, hollow: str | None) -> pd.Series:
    """Value of x → whether all rows that the point is computed from have a value in the
    column `hollow`."""
    rows = group.dropna(subset=y)
    has_value = rows[hollow].notna() if hollow else pd.Series(False, rows.index)
    return has_value.groupby(rows[x]).all()


def _line(
    points: SeriesGroupBy,
    is_hollow: pd.Series,
    spread: Sequence[float],
    xlog: bool,
    ylog: bool,
) -> Line:
    """The median and the bar of each point. Points for which a logarithmic axis has no
    place are left out and counted."""
    medians = points.median().dropna()
    outside_x = outside_y = 0
    if xlog:
        outside_x = (medians.index <= 0).sum()
        medians = medians[medians.index > 0]
    if ylog:
        outside_y = (medians <= 0).sum()
        medians = medians[medians > 0]
    low, high = (points.quantile(share)[medians.index] for share in spread)
    has_several = (points.count() > 1).any()
    is_hollow = is_hollow[medians.index]
    return Line(medians, low, high, is_hollow, has_several, outside_x, outside_y)


def _line_styles(looks: Mapping[Hashable, tuple[str, str]]) -> dict[Hashable, dict]:
    """The colour, the marker and the label of each line."""
    return {
        name: {"color": colour, "marker": marker, "label": name}
        for name, (colour, marker) in looks.items()
    }


def _draw_line(
    ax: Axes, line: Line, style: Mapping, is_raster: bool, shift: float
) -> None:
    """Draws the points of a line and their bars.

    Args:
        is_raster: whether they are an image also in a vector format.
        shift: points to the right of their places.
    """
    medians = line.medians
    bars = [medians - line.low, line.high - medians]
    style = {**style, "transform": shifted(ax, shift)} if shift else style
    container = ax.errorbar(medians.index, medians, bars, **style, capsize=2)
    # artists that are shifted count for no limits of the axes
    for ends in (medians, line.low, line.high):
        ax.update_datalim(np.column_stack([medians.index, ends]))
    ax.autoscale_view()
    artists = container.get_children()
    if line.is_hollow.any():
        hollow = medians[line.is_hollow]
        # Hollow markers lie upon the filled ones, which errorbar draws at zorder 2.1.
        artists += ax.plot(hollow.index, hollow, **style | HOLLOW, zorder=2.2)
    for artist in artists:
        artist.set_rasterized(is_raster)


def _describe_outside(axis: str, count: int, names: Sequence[str] = ()) -> list[str]:
    """A note on points for which a logarithmic axis has no place; an empty list where
    there are no such points.

    Args:
        names: of their lines.
    """
    if not count:
        return []
    points = format_count(count, "point")
    if names:
        points += f" of {', '.join(names)}"
    return [f"{axis} ≤ 0 is not on the logarithmic axis: {points}"]


def _describe_spread(spread: Sequence[float]) -> str:
    """The range of the bars in words."""
    if tuple(spread) == (0, 1):
        return "the least to the most"
    return "{:.0%} to {:.0%} of the values".format(*spread)


def _set_y_axis(ax: Axes, is_log: bool, label: str) -> None:
    """Sets scale, grid and label of the y axis. A linear one that starts above 0 says
    so."""
    if is_log:
        ax.set_yscale("log")
        label_log(ax.yaxis)
    ax.grid(axis="y")
    if not is_log and ax.get_ylim()[0] > 0:
        label = f"{label}\n(axis starts above 0)"
    ax.set_ylabel(label)


def _set_x_axis(ax: Axes, values: pd.Series, base: float | None, label: str) -> None:
    """Sets the scale and the label of the x axis: linear with whole numbers among the values, or
    logarithmic with a tick at each of the positive values where there is a `base`."""
    ax.set_xlabel(label)
    if base is None:
        ax.xaxis.set_major_locator(WithinValues(values))
        return
    ax.set_xscale("log", base=base)
    ticks = sorted(value for value in values.dropna().unique() if value > 0)
    ax.set_xticks(ticks, labels=map(format_number, ticks))
    if len(ticks) == 1:  # matplotlib's margins of a single place have no width
        ax.set_xlim(ticks[0] / base, ticks[0] * base)
    ax.minorticks_off()


class WithinValues(AutoLocator):
    """Ticks at whole numbers from the least to the largest value, and where there are
    enough, only at values: a model of 30 layers has no layer 30."""

    def __init__(self, values: pd.Series):
        super().__init__()
        self.set_params(integer=True)
        self._values = sorted(values.dropna().unique())

    def tick_values(self, vmin: float, vmax: float) -> np.ndarray:
        ticks = super().tick_values(vmin, vmax)
        if not self._values:
            return ticks
        for places in (
            ticks[np.isin(ticks, self._values)],
            ticks[(ticks >= self._values[0]) & (ticks <= self._values[-1])],
        ):
            if len(places) >= min(2, len(self._values)):
                return places
        return np.array(self._values[:: max(1, len(self._values) - 1)])
