"""States that do not grow: how a matrix drifts, what its options cost, and from which
length on it is smaller than a cache."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from workbench.plots.figure import PAGE, median_range, on_machine, panels_heading, style


@style()
def state_drift(errors: pd.DataFrame) -> Figure:
    """Errors of a matrix, a line per ``form``: after the last token over ``half_life``,
    and over ``tokens`` at the half-life with the largest error of all.

    `errors`: ``form``, ``half_life`` (tokens), ``tokens``, ``seed`` and ``error``;
    medians over the seeds, bars from the least to the largest."""
    last = errors["tokens"].max()
    worst = errors.loc[errors["error"].idxmax(), "half_life"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.7), sharey=True)
    at_end = errors[errors["tokens"] == last]
    median_range(left, at_end, "half_life", "error", "form", base=2)
    at_worst = errors[errors["half_life"] == worst]
    median_range(right, at_worst, "tokens", "error", "form", base=2)
    left.set(yscale="log", xlabel=f"half-life in tokens, after {last:,} tokens")
    left.set_ylabel("RMS error / RMS of the matrix")
    right.set_xlabel(f"tokens, at a half-life of {worst:,.0f}")
    for ax in (left, right):
        ax.tick_params(axis="x", labelsize=6)
        ax.minorticks_off()
    seeds = errors["seed"].nunique()
    _legend_below(figure, left)
    title = f"drift of a matrix state in fp16, median and range, n = {seeds}"
    return panels_heading(figure, title)


@style()
def state_prices(prices: pd.DataFrame) -> Figure:
    """What the options of a matrix state cost, a bar per ``setting``: bytes of states,
    milliseconds of a call, error of the matrix.

    `prices`: ``setting``, ``state_bytes``, ``error`` and ``samples`` (ms, a list); bars
    of the milliseconds are medians, whiskers reach from the least to the largest. A
    column ``machine`` must name one, which stands above."""
    figure, panels = plt.subplots(1, 3, figsize=(PAGE, 2.4), sharey=True)
    samples = pd.DataFrame(prices["samples"].tolist())
    medians = samples.median(axis=1)
    longest = samples.max(axis=1)
    bars = {
        "bytes of states": prices["state_bytes"],
        "ms per call, median and range": medians,
        "error of the matrix": prices["error"],
    }
    look = {"height": 0.6, "color": "#56B4E9", "edgecolor": "black", "linewidth": 0.6}
    formats = EngFormatter("B", places=1), "{:.3g}", "{:.3g}"
    for ax, (name, values), text in zip(panels, bars.items(), formats):
        drawn = ax.barh(prices["setting"], values, **look)
        ax.bar_label(drawn, fmt=text, padding=3, fontsize=7)
        ax.set(xlabel=name, xlim=(0, 1.45 * values.max()))
    right = max(1.05 * longest.max(), 1.45 * medians.max())
    panels[1].set_xlim(right=right)
    panels[0].invert_yaxis()
    panels[0].xaxis.set_major_formatter(EngFormatter("B"))
    for place, (low, high) in enumerate(zip(samples.min(axis=1), longest)):
        panels[1].hlines(place + 0.2, low, high, color="#D55E00", linewidth=1.5)
    n = samples.count(axis=1).min()
    title = on_machine(f"what undo and a pair of states cost, n = {n}", prices)
    return panels_heading(figure, title)


@style()
def state_crossover(sizes: pd.DataFrame) -> Figure:
    """Bytes of states that a token reads and writes, and predicted tok/s, over
    ``max_seq_len``: a colour per ``model``, full lines with its recurrent layers,
    dashed as if every layer attended.

    `sizes`: ``model``, ``layers`` (of the two kinds, the first one is drawn full),
    ``max_seq_len``, ``state_bytes``, ``tokens_per_s``, and ``chip``, one throughout.
    """
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.8))
    kinds = list(sizes["layers"].unique())
    for number, (model, rows) in enumerate(sizes.groupby("model", sort=False)):
        for kind, line in rows.groupby("layers", sort=False):
            look = {"color": f"C{number}", "marker": "os^D"[number], "markersize": 3.5}
            if kind != kinds[0]:
                look |= {"ls": "--", "mfc": "white"}
            look["label"] = f"{model}, {kind}"
            panels[0].plot(line["max_seq_len"], line["state_bytes"], **look)
            panels[1].plot(line["max_seq_len"], line["tokens_per_s"], **look)
    lengths = sorted(sizes["max_seq_len"].unique())
    labels = []
    for length in lengths:
        labels.append(f"{length // 1024}k" if length >= 1024 else str(length))
    for ax in panels:
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, labels=labels)
        ax.minorticks_off()
        ax.set_xlabel("max_seq_len")
        ax.grid(axis="y")
    panels[0].set(yscale="log", ylabel="bytes of states")
    panels[0].yaxis.set_major_formatter(EngFormatter("B"))
    panels[1].set(ylabel=f"tok/s on an {sizes['chip'].iloc[0]}, predicted")
    panels[1].set_ylim(bottom=0)
    _legend_below(figure, panels[0])
    return panels_heading(figure, "where states that do not grow win")


def _legend_below(figure: Figure, ax) -> None:
    """One legend for all panels, below them."""
    keys, names = ax.get_legend_handles_labels()
    place = {"loc": "outside lower left", "ncols": min(3, len(names))}
    figure.legend(keys, names, fontsize=7, **place)
