"""Figures of the cost of decoding: tokens per second, milliseconds per layer, bytes of
memory, and speed against fidelity.

Medians are drawn with the range of the samples.
"""

import textwrap
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter

from workbench.plots.figure import (
    COLUMN,
    INVALID,
    ON_LINES,
    PAGE,
    PALETTE,
    axes,
    colour_bar,
    counts_in_words,
    grid_cells,
    heading,
    invalid_key,
    median_range,
    note,
    on_machine,
    panels_heading,
    pivot_in_order,
    ring,
    style,
    unmeasured_key,
    without_invalid,
    write_cells,
)

_GIB = 2**30
_VERDICTS = {
    "GREEN": ("o", PALETTE[2]),
    "RED": ("X", PALETTE[5]),
    "not_run": ("s", "0.6"),
}
_HATCHES = ("", "//", "\\\\", "--", "xx", "||", "++")


@style()
def speed(samples: pd.DataFrame, *, lines: str = "T", ax: Axes | None = None) -> Axes:
    """Medians over max_seq_len, one line per value of the column `lines`; bars reach
    from the least to the largest.

    `samples`: ``max_seq_len``, ``value``, ``unit`` (one throughout) and `lines`, one
    row per repetition of one phase, such as the log's samples with their run's settings
    joined on; rows marked ``warmup`` are left out. A column ``machine`` goes into the
    title and must name one. Medians of rows that a column ``invalid`` gives a reason
    for are hatched bars, beside the lines, with the reason below."""
    timed = samples
    if "warmup" in samples:
        timed = samples[~samples["warmup"].fillna(False).astype(bool)]
    timed, invalid = without_invalid(timed)
    units = samples["unit"].unique()
    if len(units) != 1:
        raise ValueError(
            f"speed: found units {sorted(units)}; needs samples of one unit and phase"
        )
    titles = {"tok/s": "decode speed", "ms": "time of a call"}
    what = titles.get(units[0], units[0])
    rows = timed
    if timed.empty:
        rows = invalid
    count = counts_in_words(rows.groupby(["max_seq_len", lines]).size())
    title = on_machine(f"{what}, median and range, n = {count}", samples)
    ax = axes(ax, COLUMN, 2.6)
    ordered = timed.astype({"value": float, "max_seq_len": int})
    ordered = ordered.sort_values(lines, kind="stable")
    median_range(ax, ordered, "max_seq_len", "value", lines, f"{lines} = {{}}", base=2)
    ax.set(xlabel="max_seq_len", ylabel=units[0])
    for (length, name), values in invalid.groupby(["max_seq_len", lines])["value"]:
        length = int(length)
        median = values.median()
        ax.bar(length, median, 0.2 * length, **INVALID)
        note(ax, f"{lines} = {name}", length, median).set_bbox(ON_LINES)
    lengths = sorted(samples["max_seq_len"].astype(int).unique())
    ax.set_xticks(lengths, labels=map(str, lengths))
    keys = ax.get_legend_handles_labels()[0] + invalid_key(ax, invalid)
    ax.set_ylim(bottom=0)
    return heading(ax, title, keys)


@style()
def speed_beside(samples: pd.DataFrame, *, by: str) -> Figure:
    """`speed` in a panel for each value of the column `by`, with one scale; all other
    columns as there."""
    groups = list(samples.groupby(by, sort=False))
    size = PAGE, 2.6
    figure, panels = plt.subplots(1, len(groups), figsize=size, sharey=True)
    for ax, (name, rows) in zip(panels, groups):
        title = speed(rows, ax=ax).get_title("left")
        ax.set_title("")
        ax.set_xlabel(f"{ax.get_xlabel()}\n{name}")
    panels[0].set_ylim(0, 1.05 * samples["value"].max())
    return panels_heading(figure, title)


@style()
def over_time(samples: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Milliseconds of calls over the time since the first one, a line per T: medians of
    at most 60 equal intervals, in a band from the 10th to the 90th percentile.

    `samples`: ``phase`` (``call``; every ``thermal_pressure`` above zero is marked on
    the axis), ``elapsed_s``, ``value`` and ``T``, such as the log's samples of one run;
    a column ``machine`` goes into the title and must name one."""
    title = on_machine("speed over time", samples)
    ax = axes(ax, 4.5, 2.8)
    calls = samples[samples["phase"] == "call"].dropna(subset="elapsed_s")
    for T, line in calls.groupby("T", sort=True):
        intervals = pd.cut(line["elapsed_s"], 60)
        stretches = line.groupby(intervals, observed=True)
        ms = stretches["value"]
        at = stretches["elapsed_s"].mean()
        label = f"T = {T}"
        (drawn,) = ax.plot(at, ms.median(), marker="", label=label)
        band = {"color": drawn.get_color(), "alpha": 0.2, "linewidth": 0}
        ax.fill_between(at, ms.quantile(0.1), ms.quantile(0.9), **band)
    hot = samples[samples["phase"] == "thermal_pressure"]
    hot = hot[hot["value"] > 0]
    for level, rows in hot.groupby("value"):
        label = f"thermal pressure {level:.0f}"
        zeros = [0] * len(rows)
        ax.plot(rows["elapsed_s"], zeros, "|", clip_on=False, label=label)
    ax.set(xlabel="s since the first call", ylabel="ms per call", ylim=(0, None))
    return heading(ax, title)


@style()
def layer_ms(layers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Median milliseconds of a layer, over layers and runs, at each T × max_seq_len, as
    numbers on colour.

    `layers`: ``T``, ``max_seq_len`` and ``layer_ms``, such as the log's table with its
    run's settings joined on. Settings without a measurement are hatched; settings with
    a reason in a column ``invalid`` have another hatch. A column ``machine`` goes into
    the title and must name one."""
    title = on_machine("time of one layer", layers)
    valid, invalid = without_invalid(layers)
    cells = {
        "index": "T",
        "columns": "max_seq_len",
        "values": "layer_ms",
        "aggfunc": "median",
    }
    every = layers.pivot_table(**cells)
    grid = valid.pivot_table(**cells)
    grid = grid.reindex_like(every).astype(float)
    ax = axes(ax, COLUMN, 1.2 + 0.35 * len(grid))
    most = grid.max(axis=None)
    mesh = grid_cells(
        ax, grid, Normalize(0, most if most > 0 else 1), colormaps["cividis"]
    )
    vain = every.notna() & grid.isna()
    for y, x in np.argwhere(vain.to_numpy()):
        ax.add_patch(Rectangle((x, y), 1, 1, **INVALID | {"facecolor": "white"}))
    write_cells(mesh, grid.map(lambda ms: f"{ms:#.3g}".rstrip("."), na_action="ignore"))
    colour_bar(mesh, ax, "median ms per layer")
    settings = pd.MultiIndex.from_frame(invalid[["T", "max_seq_len"]])
    invalid = invalid[vain.stack().reindex(settings).to_numpy()]
    return heading(ax, title, unmeasured_key(every) + invalid_key(ax, invalid))


@style()
def memory_bar(
    parts: pd.DataFrame, budget: Mapping[str, int], *, ax: Axes | None = None
) -> Axes:
    """Stacked bars of resident bytes, one per setting, and dashed lines at machines'
    memory.

    `parts`: ``setting``, ``part`` (weights, KV cache, embedding, buffers …) and
    ``bytes``; settings and parts are drawn in the order given. `budget` maps a
    machine's name to its memory in bytes; it may be empty."""
    table = pivot_in_order(parts, "setting", "part", "bytes")
    table = table.astype(float).fillna(0)
    totals = table.sum(axis=1)
    widest = max(totals.max(), *budget.values(), 0)
    scale = 2**20
    unit = "MiB"
    if widest >= _GIB:
        scale = _GIB
        unit = "GiB"
    table = table / scale
    machines = pd.Series(budget, dtype=float) / scale
    ax = axes(ax, PAGE, 0.9 + 0.25 * (len(table) + len(machines)))
    totals = _stack(ax, table)
    for name, total in totals.items():
        note(ax, f"{total:.2f} {unit}", total, name).set_bbox(ON_LINES)
    top = -0.6 - 0.7 * len(machines)
    for place, (name, size) in enumerate(machines.items()):
        y = top + 0.7 * place + 0.3
        ax.plot(
            [size, size],
            [y, len(table) - 0.5],
            "--",
            color="black",
            linewidth=0.8,
            marker="",
        )
        note(ax, f"{name}: {size:.2f} {unit}", size, y).set_fontsize(7)
    ax.set(xlabel=unit, xlim=(0, 1.35 * widest / scale))
    ax.set(ylim=(len(table) - 0.5, top))
    ax.tick_params(axis="y", length=0)
    if len(table.columns) == 1:
        return heading(ax, f"{table.columns[0]}, resident", [])
    return heading(ax, "resident memory")


def _stack(ax: Axes, table: pd.DataFrame) -> pd.Series:
    """Draws the columns of `table` as stacked bars, each with a hatch of its own, one
    bar per row; returns their lengths."""
    left = pd.Series(0.0, table.index)
    look = {"edgecolor": "white", "linewidth": 0.5}
    for hatch, (part, lengths) in zip(_HATCHES, table.items()):
        ax.barh(table.index, lengths, 0.6, left, hatch=hatch, label=part, **look)
        left += lengths
    return left


@style()
def parts_bar(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One stacked bar of the milliseconds of a token: ``part``, ``ms``, in the order
    given, each named above its start."""
    ax = axes(ax, PAGE, 1.1 + 0.15 * len(parts))
    left = 0.0
    for place, row in enumerate(parts.itertuples(), 1):
        height = 0.5 + 0.25 * (len(parts) - place)
        ax.barh(0, row.ms, 0.6, left, edgecolor="white", linewidth=0.5)
        ax.plot(
            [left, left],
            [-0.3, height],
            color="0.4",
            linewidth=0.6,
            marker="",
            zorder=0,
        )
        note(ax, f"{row.part}, {row.ms:.3g} ms", left, height)
        left += row.ms
    ax.set(
        xlabel="ms per token, all layers",
        yticks=[],
        xlim=(0, left),
        ylim=(-0.35, height + 0.25 * len(parts)),
    )
    ax.spines["left"].set_visible(False)
    return heading(ax, "time of a token by part of the layers")


@style()
def against_peer(rows: pd.DataFrame, this: str = "this") -> Figure:
    """Benchmark rows as pairs of bars, `this` against the peer, one panel per row.

    `rows`: ``name``, ``value``, ``unit``, ``peer``, ``peer_value``, ``ratio`` (above 1
    if `this` is better). With the lists ``samples`` and ``peer_samples``, whiskers have
    their range. A column ``machine`` goes into the title and must name one."""
    title = on_machine(f"{this} against {rows['peer'].iloc[0]}", rows)
    figure, panels = plt.subplots(
        1, len(rows), figsize=(PAGE / 2 * len(rows), 2.4), squeeze=False
    )
    for ax, row in zip(panels[0], rows.itertuples()):
        look = {
            "color": ["#0072B2", "white"],
            "edgecolor": "black",
            "hatch": ["", "////"],
        }
        heights = [row.value, row.peer_value]
        ax.bar([this, row.peer], heights, 0.55, **look)
        sides = getattr(row, "samples", ()), getattr(row, "peer_samples", ())
        for place, samples in enumerate(sides):
            if len(samples) > 1:
                ax.vlines(
                    place, min(samples), max(samples), color="#D55E00", linewidth=1.5
                )
                ax.set_xlabel(f"n = {len(samples)}, range")
        if row.ratio >= 1:
            better = f"{row.ratio:.1f}× better"
        else:
            better = f"{1 / row.ratio:.1f}× worse"
        ax.set(title=f"{row.name.replace('_', ' ')}: {better}", ylabel=row.unit)
        if row.unit == "bytes":
            ax.yaxis.set_major_formatter(EngFormatter("B"))
        ax.grid(axis="y")
    return panels_heading(figure, title)


@style()
def ratios(measures: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Run B over run A on a log scale: a dot per measurement with its interval; a
    hollow dot has too few runs for one.

    `measures`: ``phase``, ``shard``, ``T``, ``depth``, ``ratio``, ``low``, ``high``, as
    in `workbench.log.compare`. A column ``machine`` goes into the title and must name
    one. With a column ``unit`` the better run is labelled: more tok/s is better, less
    of other units."""
    shown = measures.dropna(subset="ratio")
    ax = axes(ax, PAGE, 1.0 + 0.22 * len(shown))
    names = []
    above = {
        "xytext": (0, 5),
        "textcoords": "offset points",
        "ha": "center",
        "fontsize": 7,
    }
    for y, row in enumerate(shown.itertuples()):
        name = ""
        words = {"": row.phase, " ": row.shard, " T ": row.T, " depth ": row.depth}
        for word, value in words.items():
            if pd.notna(value):
                name += f"{word}{value}"
        names.append(name)
        fill = "white"
        if pd.notna(row.low):
            fill = "#0072B2"
            ends = [row.low, row.high]
            ax.plot(ends, [y, y], "-", color=fill, marker="|")
        ax.plot(row.ratio, y, "o", color="#0072B2", markerfacecolor=fill)
        text = f"{row.ratio:.3g}×"
        if "unit" in shown and row.ratio != 1:
            better = (row.ratio > 1) == (row.unit == "tok/s")
            text += ", B better" if better else ", B worse"
        ax.annotate(text, (row.ratio, y), **above)
    ax.axvline(1, color="black", linewidth=1, linestyle="--")
    largest = max([2, *shown["ratio"], *1 / shown["ratio"]])
    reach = 1.5 * largest
    ax.set(xscale="log", xlim=(1 / reach, reach))
    ax.xaxis.set_major_formatter(_one_two_five)
    ax.xaxis.set_minor_formatter(_one_two_five)
    ax.set_yticks(range(len(shown)), labels=names)
    xlabel = "median of B over median of A"
    if shown["low"].isna().any():
        xlabel += "; hollow: too few rounds to be sure"
    ax.set(xlabel=xlabel, ylim=(len(shown) - 0.4, -0.8))
    ax.grid(axis="x")
    return heading(ax, on_machine("B against A", measures))


def _one_two_five(value: float, _) -> str:
    """The label of a tick on a log scale: none but 1, 2 and 5 times a power of ten."""
    if f"{value:e}"[0] in "125":
        return f"{value:g}"
    return ""


@style()
def speed_against_fidelity(
    configurations: pd.DataFrame, *, max_kl: float | None = None, ax: Axes | None = None
) -> Axes:
    """Every configuration as a point: tokens per second over its cost; a line joins the
    Pareto front of those that pass.

    `configurations`: one row each, with ``tokens_per_s``, ``verdict`` (GREEN, RED or
    not_run) and ``kl_mean`` (nats) or, where no KL was measured, ``worst_cosine``.
    Points of the front and the fastest of each ``compress`` are labelled with ``name``.
    `max_kl` is the user's limit. A column ``machine`` goes into the title and must name
    one; ``n`` is the number of a point's runs, ``slowest`` and ``fastest`` (tok/s) are
    the ends of their range. Rows with a reason in a column ``invalid`` are hatched,
    with the reason below, and are not in the front."""
    priced = "kl_mean" in configurations and configurations["kl_mean"].notna().all()
    if priced:
        cost = configurations["kl_mean"]
        label = "mean KL from Hugging Face (nats)"
    else:
        cost = 1 - configurations["worst_cosine"].astype(float)
        label = "1 − worst update cosine"
    cost = cost.astype(float).clip(lower=1e-9)
    points = configurations.assign(cost=cost)
    valid, invalid = without_invalid(points)
    title = "speed against fidelity"
    if "n" in points:
        title += ", median and range" if "slowest" in points else ", medians"
        title += f"; runs: {counts_in_words(points['n'])}"
    ax = axes(ax, PAGE, 3.4)
    speeds = points.reindex(columns=["tokens_per_s", "fastest"])
    highest = float(speeds.max(axis=None))
    _verdict_points(ax, valid)
    if len(invalid):
        ax.scatter(
            invalid["cost"],
            invalid["tokens_per_s"].astype(float),
            40,
            zorder=2,
            **INVALID,
        )
    _front(ax, valid)
    if max_kl is not None and priced:
        limit = {"color": "black", "linewidth": 1, "linestyle": "--"}
        ax.axvline(max_kl, label=f"your limit, {max_kl:g}", **limit)
    ax.set_xscale("log")
    ax.set(xlabel=label, ylabel="tok/s", ylim=(0, 1.12 * highest))
    ax.margins(x=0.25)
    ax.grid()
    keys = ax.get_legend_handles_labels()[0] + invalid_key(ax, invalid)
    return heading(ax, on_machine(title, configurations), keys)


def _verdict_points(ax: Axes, valid: pd.DataFrame) -> None:
    """Draws the points of valid runs by verdict, over the ranges of their speeds."""
    if "slowest" in valid:
        ends = valid[["slowest", "fastest"]].astype(float)
        ax.vlines(
            valid["cost"], ends["slowest"], ends["fastest"], color="0.6", linewidth=0.8
        )
    for verdict, (marker, colour) in _VERDICTS.items():
        part = valid[valid["verdict"] == verdict]
        if len(part):
            look = {"color": colour, "label": verdict, "alpha": 0.8}
            ax.plot(part["cost"], part["tokens_per_s"], marker, **look)


def _front(ax: Axes, valid: pd.DataFrame) -> None:
    """Draws the Pareto front of the GREEN points; labels it and the fastest of each
    `compress`."""
    front = pareto_front(valid[valid["verdict"] == "GREEN"])
    if len(front):
        look = {"color": "black", "linewidth": 0.8, "marker": "", "zorder": 1}
        ax.step(
            front["cost"],
            front["tokens_per_s"],
            where="post",
            label="best that pass",
            **look,
        )
        last = front.iloc[-1]
        ring(ax, last["cost"], last["tokens_per_s"], label="fastest that passes")
    named = front
    if "compress" in valid:
        ordered = valid.sort_values("tokens_per_s")
        fastest = ordered.drop_duplicates("compress", keep="last")
        named = pd.concat([front, fastest]).drop_duplicates("name")
    if "name" not in named:
        return
    for row in named.to_dict("records"):
        text = textwrap.fill(row["name"], 34)
        label = note(ax, text, row["cost"], row["tokens_per_s"])
        label.set(fontsize=6, bbox=ON_LINES)


def pareto_front(points: pd.DataFrame) -> pd.DataFrame:
    """The rows with more ``tokens_per_s`` than every row of smaller or equal ``cost``,
    sorted by cost."""
    points = points.astype({"tokens_per_s": float})
    ordered = points.sort_values(["cost", "tokens_per_s"], ascending=[True, False])
    best = ordered["tokens_per_s"].cummax()
    return ordered[(best > best.shift(fill_value=-1.0))]


@style()
def roofline(predictions: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Published against predicted milliseconds, each predicted by a fit without it; the
    band is ± 30%.

    `predictions`: ``figure``, ``published_ms``, ``predicted_ms``; columns ``chip`` and
    ``weights`` go into the legend."""
    ax = axes(ax, COLUMN, 3.2)
    ms = predictions[["published_ms", "predicted_ms"]]
    low = ms.min(axis=None) / 2
    high = ms.max(axis=None) * 2
    ends = np.array([low, high])
    ax.plot(ends, ends, color="black", marker="", lw=0.8, label="equal")
    ax.fill_between(ends, 0.7 * ends, 1.3 * ends, color="0.9", label="± 30%")
    names = predictions["figure"].str.split(",").str[0]
    for column in ("chip", "weights"):
        if column in predictions:
            names += ", " + predictions[column]
    for name, rows in predictions.groupby(names, sort=False):
        ax.plot(rows["published_ms"], rows["predicted_ms"], ls="none", label=name)
    ax.set(xscale="log", xlabel="published ms", xlim=(low, high))
    ax.set(yscale="log", ylabel="predicted ms", ylim=(low, high))
    ratio = ms["predicted_ms"] / ms["published_ms"]
    misfit = (ratio - 1).abs().median()
    ax.set_title(f"roofline, median misfit {misfit:.0%}")
    ax.legend(loc="upper left", fontsize=6)
    return ax
