"""Figures of a first light: the ladder's placement, the cost of a dispatch, host and
device."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize

from workbench.plots.figure import (
    axes,
    grid_cells,
    heading,
    label_cells,
    on_machine,
    pivot_in_order,
    style,
    unmeasured_key,
    write_cells,
)

_SHARE = ListedColormap(["#F3B58A", "#F7E3D0", "#DCEBF5"])
_PARTS = {
    "Core ML": {"color": "#0072B2"},
    "host": {"facecolor": "white", "hatch": "////"},
}


@style()
def placement_ladder(cells: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Rung × unit: a word for the result, coloured by success.

    `cells`: ``rung``, ``column``, ``text`` and ``good``, from 0 (did not run) to 1 (ran
    wholly); missing ones are hatched. A column ``machine`` goes into the title and must
    name one."""
    title = on_machine("placement ladder", cells)
    good, texts = (
        pivot_in_order(cells, "rung", "column", name) for name in ("good", "text")
    )
    good.index.name = good.columns.name = None
    ax = axes(ax, 2.6 + 1.1 * len(good.columns), 1.0 + 0.2 * len(good))
    mesh = grid_cells(ax, good.astype(float), Normalize(0, 1), _SHARE)
    write_cells(mesh, texts)
    label_cells(ax.yaxis, good.index, 64)
    return heading(ax, title, unmeasured_key(good))


@style()
def dispatch(points: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Milliseconds of a call against the layers in a shard, each setting with the line
    through its points.

    `points`: ``setting``, ``layers``, ``ms``, ``fit_ms``, ``dispatch_ms`` (where the
    line is at no layer). A column ``machine`` goes into the title and must name one.
    """
    ax = axes(ax, 5.5, 3.0)
    if points.empty:
        return _nothing(ax)
    for setting, line in points.groupby("setting", sort=False):
        line = line.sort_values("layers")
        start = line["dispatch_ms"].iloc[0]
        (dots,) = ax.plot(
            line["layers"], line["ms"], ls="", label=f"{setting}: {start:.2g} ms"
        )
        fit = [start, *line["fit_ms"]]
        layers = [0, *line["layers"]]
        ax.plot(layers, fit, color=dots.get_color(), marker="", lw=0.8)
    ax.set(xlabel="layers in a shard", ylabel="ms per call")
    ax.set_xticks([0, *sorted(points["layers"].unique())])
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=min(0, points["dispatch_ms"].min()))
    ax.grid()
    ax.legend(title="at no layer", loc="upper left")
    return heading(ax, on_machine("a call against the layers in its shard", points), [])


@style()
def host_device(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """A bar for each setting: Core ML's own milliseconds, and behind them the host's.

    `parts`: ``setting``, ``part`` (Core ML or host), ``ms``. A column ``machine`` goes
    into the title and must name one."""
    table = pivot_in_order(parts, "setting", "part", "ms").astype(float)
    ax = axes(ax, 6.0, 1.0 + 0.2 * len(table))
    if parts.empty:
        return _nothing(ax)
    left = pd.Series(0.0, table.index)
    for part, ms in table.items():
        ax.barh(
            table.index, ms, 0.65, left, label=part, edgecolor="black", **_PARTS[part]
        )
        left += ms
    ax.set(xlabel="ms per call, median", ylim=(len(table) - 0.5, -0.5))
    ax.tick_params(axis="y", length=0)
    return heading(ax, on_machine("host and device", parts))


def _nothing(ax: Axes) -> Axes:
    """Axes with the text "not measured"."""
    ax.set(xticks=[], yticks=[])
    centre = {"ha": "center", "va": "center", "transform": ax.transAxes}
    ax.text(0.5, 0.5, "not measured", **centre)
    return ax
