"""What decoding costs: tokens per second, milliseconds per layer, bytes of memory.

Medians are drawn with the range of what was measured, never alone.
"""

from collections.abc import Mapping

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from workbench.plots.figure import (
    axes,
    grid_cells,
    heading,
    median_range,
    on_machine,
    pivot_in_order,
    style,
    unmeasured_key,
    write_cells,
)

_GIB = 2**30
_ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_HATCHES = ("", "////", "\\\\\\\\", "----", "xxxx", "||||", "++++")


@style()
def speed(samples: pd.DataFrame, *, lines: str = "T", ax: Axes | None = None) -> Axes:
    """Medians over max_seq_len, one line per value of the column `lines`; bars reach from the least to the largest.

    `samples`: ``max_seq_len``, ``value``, ``unit`` (one throughout) and `lines`, one row per repetition of one phase,
    such as the log's samples with their run's settings joined on; rows marked ``warmup`` are left out. A column
    ``machine`` goes into the title and must name one.
    """
    title = on_machine("speed, median and range", samples)
    timed = (
        samples[~samples["warmup"].fillna(False).astype(bool)] if "warmup" in samples else samples
    )
    units = timed["unit"].unique()
    if len(units) != 1:
        raise ValueError(f"speed: found units {sorted(units)}; needs samples of one unit and phase")
    ax = axes(ax, 4.5, 2.8)
    ordered = timed.astype({"value": float, "max_seq_len": int}).sort_values(lines, kind="stable")
    median_range(ax, ordered, "max_seq_len", "value", lines, f"{lines} = {{}}", base=2)
    ax.set(xlabel="max_seq_len", ylabel=units[0])
    ax.set_ylim(bottom=0)
    return heading(ax, title)


@style()
def layer_ms(layers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Milliseconds of a typical layer (median over layers and runs) at each T × max_seq_len, as numbers on colour.

    `layers`: ``T``, ``max_seq_len`` and ``layer_ms``, such as the log's table with its run's settings joined on.
    Settings without a measurement are hatched. A column ``machine`` goes into the title and must name one.
    """
    title = on_machine("time of one layer", layers)
    grid = layers.pivot_table(
        index="T", columns="max_seq_len", values="layer_ms", aggfunc="median"
    ).astype(float)
    ax = axes(ax, 1.6 + 0.75 * len(grid.columns), 1.2 + 0.35 * len(grid))
    norm = Normalize(0, grid.max(axis=None))
    mesh = grid_cells(ax, grid, norm, matplotlib.colormaps["cividis"])
    write_cells(
        ax,
        grid,
        lambda ms: f"{ms:#.3g}".rstrip(".") if ms == ms else None,
        color=lambda ms: "black" if norm(ms) > 0.5 else "white",
    )
    ax.figure.colorbar(mesh, ax=ax, label="median ms per layer", pad=0.02).outline.set_visible(
        False
    )
    return heading(ax, title, unmeasured_key(grid))


@style()
def memory_bar(parts: pd.DataFrame, budget: Mapping[str, int], *, ax: Axes | None = None) -> Axes:
    """Stacked bars of what must be resident, one per setting, over hollow bars of what machines have.

    `parts`: ``setting``, ``part`` (weights, KV cache, embedding, buffers …) and ``bytes``; settings and parts are drawn
    in the order given. `budget` maps a machine's name to its memory in bytes; it may be empty.
    """
    table = pivot_in_order(parts, "setting", "part", "bytes").astype(float).fillna(0)
    widest = max(table.sum(axis=1).max(), *budget.values(), 0)
    scale, unit = (_GIB, "GiB") if widest >= _GIB else (2**20, "MiB")
    table, machines = table / scale, pd.Series(budget, dtype=float) / scale
    ax = axes(ax, 6.5, 0.9 + 0.25 * (len(table) + len(machines)))
    totals = _stack(ax, table)
    ax.barh(machines.index, machines, 0.6, facecolor="none", edgecolor="black", linewidth=0.8)
    ax.vlines(
        machines,
        -0.5,
        range(len(table), len(table) + len(machines)),
        "black",
        "dashed",
        linewidth=0.8,
    )
    for name, total in pd.concat([totals, machines]).items():
        text = ax.annotate(
            f"{total:.2f} {unit}", (total, name), (4, 0), textcoords="offset points", va="center"
        )
        text.set_bbox(_ON_LINES)
    bars = len(table) + len(machines)
    ax.set(xlabel=unit, xlim=(0, 1.14 * widest / scale), ylim=(bars - 0.5, -0.5))
    ax.tick_params(axis="y", length=0)
    return heading(ax, "resident memory")


def _stack(ax: Axes, table: pd.DataFrame) -> pd.Series:
    """Draws the columns of `table` as stacked bars, each with a hatch of its own, one bar per row; returns their lengths."""
    left = pd.Series(0.0, table.index)
    for hatch, part in zip(_HATCHES, table):
        ax.barh(
            table.index,
            table[part],
            0.6,
            left,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=part,
        )
        left += table[part]
    return left


@style()
def parts_bar(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One stacked bar of the milliseconds of a token: ``part``, ``ms``, in the order given, each labelled and hatched."""
    ax = axes(ax, 6.5, 1.7)
    labels = [f"{row.part} ({row.ms:.3g} ms)" for row in parts.itertuples()]
    totals = _stack(ax, pd.DataFrame([parts["ms"].to_list()], columns=labels))
    ax.set(xlabel="ms per token, all layers", yticks=[], xlim=(0, totals[0]))
    ax.spines["left"].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2)
    return ax


@style()
def against_peer(rows: pd.DataFrame, this: str = "this") -> Figure:
    """Benchmark rows as pairs of bars, `this` against the peer, one panel per row: ``name``, ``value``, ``unit``, ``peer``,
    ``peer_value``, ``ratio`` (over 1 where `this` is the better one). A column ``machine`` must name one, which stands above."""
    machine = on_machine("", rows).strip()
    figure, panels = plt.subplots(1, len(rows), figsize=(3.1 * len(rows), 2.4), squeeze=False)
    for ax, row in zip(panels[0], rows.itertuples()):
        ax.bar(
            [this, row.peer],
            [row.value, row.peer_value],
            0.55,
            color=["#0072B2", "white"],
            edgecolor="black",
            hatch=["", "////"],
        )
        better = f"{row.ratio:.1f}× better" if row.ratio >= 1 else f"{1 / row.ratio:.1f}× worse"
        ax.set(title=f"{row.name.replace('_', ' ')}: {better}", ylabel=row.unit)
        if row.unit == "bytes":
            ax.yaxis.set_major_formatter(EngFormatter("B"))
        ax.grid(axis="y")
    if machine:
        figure.suptitle(machine, x=0.01, ha="left", fontsize=matplotlib.rcParams["axes.titlesize"])
    return figure


@style()
def ratios(measures: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Run B over run A: a dot per measurement with its interval; hollow where there are too few runs for one.

    `measures`: ``phase``, ``shard``, ``T``, ``depth``, ``ratio``, ``low``, ``high``, as `workbench.log.compare` gives. A
    column ``machine`` goes into the title and must name one.
    """
    shown = measures.dropna(subset="ratio")
    names = [
        " ".join(
            str(v)
            for v in (r.phase, r.shard, f"T {r.T}", f"depth {r.depth}")
            if "<NA>" not in str(v) and v == v and v
        )
        for r in shown.itertuples()
    ]
    ax = axes(ax, 6.0, 1.0 + 0.22 * len(shown))
    for y, row in enumerate(shown.itertuples()):
        sure = row.low == row.low
        if sure:
            ax.plot([row.low, row.high], [y, y], "-", color="#0072B2", marker="|")
        ax.plot(row.ratio, y, "o", color="#0072B2", markerfacecolor="#0072B2" if sure else "white")
        ax.annotate(
            f"{row.ratio:.3g}×",
            (row.ratio, y),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    ax.axvline(1, color="black", linewidth=1, linestyle="--")
    ax.set_yticks(range(len(shown)), labels=names)
    ax.set(xlabel="median of B over median of A", ylim=(len(shown) - 0.4, -0.8))
    ax.grid(axis="x")
    return heading(ax, on_machine("B against A", measures))
